"""LoRA adapters in PEFT's format: read and checked against a model's config, then as changes of its ops. Knows no requests.

Followed: PEFT's files (adapter_config.json, adapter_model.safetensors) with LoRA (Hu et al., 2021, arXiv:2106.09685), rsLoRA
(Kalajdzievski, 2023, arXiv:2312.03732) and DoRA (Liu et al., 2024, arXiv:2402.09353).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.core.errors import FormatError, ModelNotFound, OptionError
from exl2nb.io.atomic import atomic_write
from exl2nb.io.hf_config import read_json
from exl2nb.io.safetensors import SafetensorsFile, save
from exl2nb.model.config import ModelConfig
from exl2nb.model.config_fields import Fields
from exl2nb.model.layers import MLP
from exl2nb.model.layout import Linear, head_linear, layer_linears, layer_norms
from exl2nb.model.lora_settings import Adapted, Contents, check_agreement, check_supported, read_scales
from exl2nb.model.model import Model, Network
from exl2nb.model.store import fused_linears, row_order
from exl2nb.ops.gpu import unpack_half
from exl2nb.ops.lora_table import Adapter, LoraChange, LoraPart, norm_bias_of
from exl2nb.ops.records import MatrixOp

ADAPTER_SETTINGS_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 4096
MAX_NAME = 1024  # characters of a tensor's name
_STACK_OF_ROLE = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "up"}  # the matrix that a role is a part of
_ROLE_ORDER = ("q", "k", "v", "o", "gate", "up", "down")
_LORA_KEY = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.default)?(?:\.(weight|bias))?")


@dataclass(frozen=True, kw_only=True)
class LoraTarget:
    """The adapter of one module: y += scale * (x @ a.T) @ b.T. With a magnitude (DoRA), each row of the sum is rescaled to that norm.

    a: `(r, K)`, of an embedding `(V, r)`. b: `(N, r)`, its rows in the order of the roles. magnitude, bias: `(N,)` or None. All f32.
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None
    bias: Tensor | None = None
    embedding: bool = False

    @property
    def rank(self) -> int:
        """Of the product."""
        return self.b.shape[1]


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """An adapter as it was read.

    digest: of its numbers and settings. base: the model that it names. rank: its largest. targets: by layer (-1: outside the layers) and
    roles; the embedding's role is "embed". vectors: norms and biases that replace the model's, by their names in its files.
    """

    path: Path
    digest: str
    base: str
    rank: int
    targets: Mapping[tuple[int, tuple[str, ...]], LoraTarget]
    vectors: Mapping[str, Tensor]


def read_lora(directory: Path, config: ModelConfig) -> LoraFile:
    """Read an adapter for a model.

    Args:
        directory: holds adapter_config.json and adapter_model.safetensors.
        config: of the model.

    Raises:
        ModelNotFound: one of the files is missing.
        FormatError: another method than LoRA, or an option of PEFT that is not supported. A module that the model does not have, or whose
            kind cannot be adapted here. A tensor of a wrong shape, missing beside its other half, or not finite. Settings that name
            tensors which the file does not have, or tensors that the settings rule out.
        ConfigError: a setting that cannot be used.
    """
    _check_files(directory)
    settings = Fields(read_json(directory / ADAPTER_SETTINGS_FILE), str(directory / ADAPTER_SETTINGS_FILE))
    check_supported(settings)
    scale_of = read_scales(settings)
    reader = _Reader(config, directory / ADAPTER_WEIGHTS_FILE)
    with SafetensorsFile(directory / ADAPTER_WEIGHTS_FILE) as file:
        for name in file.names():
            reader.take(name, file.info(name).shape, lambda name=name: file.read(name))
    targets, vectors = reader.finish(scale_of)
    check_agreement(settings, reader.contents())
    digest = blake2b(digest_size=16)
    for key, target in sorted(targets.items()):
        digest.update(f"{key} {target.scale!r}".encode())
        for tensor in (target.a, target.b, target.magnitude, target.bias):
            digest.update(b"" if tensor is None else tensor.contiguous().numpy().tobytes())
    for name, vector in sorted(vectors.items()):
        digest.update(name.encode() + vector.contiguous().numpy().tobytes())
    rank = max((target.rank for target in targets.values()), default=0)
    base = settings.text("base_model_name_or_path", default="")
    return LoraFile(path=directory, digest=digest.hexdigest(), base=base, rank=rank, targets=targets, vectors=vectors)


def adapter_bytes(directory: Path, config: ModelConfig, *, strips: bool = False) -> int:
    """Memory that an adapter will take, from the headers of its file. strips: with the second copy of layers' products that a GPU has.

    Raises:
        ModelNotFound, FormatError: as `read_lora`, but for what only the numbers tell.
    """
    _check_files(directory)
    settings = Fields(read_json(directory / ADAPTER_SETTINGS_FILE), str(directory / ADAPTER_SETTINGS_FILE))
    check_supported(settings)
    reader = _Reader(config, directory / ADAPTER_WEIGHTS_FILE)
    with SafetensorsFile(directory / ADAPTER_WEIGHTS_FILE) as file:
        for name in file.names():
            shape = file.info(name).shape
            reader.take(name, shape, lambda shape=shape: torch.empty(shape, device="meta"))
    nbytes = reader.nbytes(strips=strips)
    check_agreement(settings, reader.contents())
    return nbytes


def _check_files(directory: Path) -> None:
    for name in (ADAPTER_SETTINGS_FILE, ADAPTER_WEIGHTS_FILE):
        if not (directory / name).is_file():
            pickled = name == ADAPTER_WEIGHTS_FILE and (directory / "adapter_model.bin").exists()
            hint = "; adapter_model.bin is a pickle, which is never read: save it again with save_pretrained(safe_serialization=True)"
            raise ModelNotFound(f"{directory}: no {name}{hint if pickled else '; expected an adapter as PEFT saves it'}")


def save_lora(
    directory: str | os.PathLike[str], pairs: Mapping[str, tuple[Tensor, Tensor]], *, alpha: float | None = None, base: str = ""
) -> Path:
    """Write an adapter in PEFT's format.

    Args:
        directory: to make, or to write into.
        pairs: name of a module in the model's files, such as "model.layers.0.self_attn.q_proj" -> lora_A `(r, K)` and lora_B `(N, r)`.
        alpha: the product is scaled by alpha / r; None = not scaled.
        base: name of the model that it was made for.

    Raises:
        OptionError: no pair, or two tensors that do not belong together. ConversionError: it cannot be written.
    """
    ranks = {name: a.shape[0] for name, (a, b) in pairs.items() if a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1] > 0}
    if not pairs or len(ranks) < len(pairs):
        wrong = next((name for name in pairs if name not in ranks), "nothing")
        raise OptionError(f"save_lora: {wrong} was given; expected lora_A (r, K) and lora_B (N, r) of at least one module")
    folder, rank = Path(directory), max(ranks.values())
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none", "r": rank,
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "lora_alpha": rank if alpha is None else alpha,
        "alpha_pattern": {name: r for name, r in ranks.items() if alpha is None and r != rank},
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
    }  # fmt: skip
    tensors = {
        f"base_model.model.{name}.lora_{side}.weight": t.detach().contiguous()
        for name, pair in pairs.items()
        for side, t in zip("AB", pair)
    }
    save(folder / ADAPTER_WEIGHTS_FILE, tensors)
    with atomic_write(folder / ADAPTER_SETTINGS_FILE) as file:
        file.write(json.dumps(settings, indent=2).encode())
    return folder


class _Reader:
    """Sorts the tensors of a file to the modules of a model."""

    def __init__(self, config: ModelConfig, path: Path) -> None:
        self.config, self.path = config, path
        names = config.names
        self.modules: dict[str, list[Linear]] = {names.head: [head_linear(config)], **fused_linears(config)}
        for layer in range(config.num_layers):
            self.modules |= {linear.key: [linear] for linear in layer_linears(config, layer).values()}
        norms = [names.norm, *(names.at(layer, part) for layer in range(config.num_layers) for part in layer_norms(config))]
        self.norms = {f"{key}.{kind}" for key in norms for kind in ("weight", "bias")}
        self.halves: dict[str, dict[str, Tensor]] = {}
        self.written: dict[str, str] = {}  # module -> its name in the file
        self.vectors: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], read: Callable[[], Tensor]) -> None:
        """One tensor, read only where its name and shape are right."""
        if len(name) > MAX_NAME:
            raise FormatError(f"{self.path}: tensor {name[:80]!r}...: its name has {len(name)} characters; expected at most {MAX_NAME}")
        plain = name
        while plain.startswith("base_model.model."):
            plain = plain.removeprefix("base_model.model.")
        found = _LORA_KEY.fullmatch(plain)
        if found is None:
            ours = self._renamed(re.sub(r"\.(base_layer|modules_to_save(\.default)?)\.", ".", plain))
            frozen = ".original_module." in plain or (".base_layer.weight" in plain and self._is_table(ours, shape))
            if not frozen:  # a copy of what the model has: PEFT saves embeddings beside adapters of them
                self._take_vector(name, ours, shape, read)
            return
        module = self._renamed(f"{found[1]}.weight").removesuffix(".weight")
        kind = found[2] + ("_bias" if found[3] == "bias" else "")
        inputs, outputs = self._size(name, module, embedding="embedding" in kind)
        side = kind.rpartition("_")[2] if "embedding" in kind else kind
        expected = {"A": "(r, K)", "B": "(N, r)", "B_bias": "(N,)", "magnitude_vector": "(N,)"}.get(side)
        fits = {
            "A": len(shape) == 2 and shape[1] == inputs,
            "B": len(shape) == 2 and shape[0] == outputs,
            "B_bias": shape == (outputs,),
            "magnitude_vector": shape in ((outputs,), (1, outputs)),
        }.get(side, False)
        rank = shape[0 if side == "A" else -1] if side in ("A", "B") and fits else 1
        if not fits or not 1 <= rank <= min(MAX_RANK, max(inputs, outputs)):
            raise FormatError(
                f"{self.path}: tensor {name!r}: found shape {shape}, expected {expected} with K = {inputs}, N = {outputs} and 1 to "
                f"{min(MAX_RANK, max(inputs, outputs))} as r: is it an adapter of this model?"
            )
        if kind.startswith("embedding") is False and module == self.config.names.embed:
            raise FormatError(f"{self.path}: tensor {name!r}: of the embedding only lora_embedding_A and lora_embedding_B are supported")
        self.halves.setdefault(module, {})[side] = self._finite(name, read())
        self.written[module] = found[1]

    def _is_table(self, name: str, shape: tuple[int, ...]) -> bool:
        names, config = self.config.names, self.config
        return name in (f"{names.embed}.weight", f"{names.head}.weight") and shape == (config.vocab_size, config.hidden_size)

    def _renamed(self, name: str) -> str:
        for old, new in self.config.files.renames:
            name = name.replace(old, new)
        return name

    def _size(self, name: str, module: str, *, embedding: bool) -> tuple[int, int]:
        """Inputs and outputs of a module."""
        if module == self.config.names.embed:
            return self.config.vocab_size, self.config.hidden_size
        linears = self.modules.get(module)
        if linears is None or embedding:
            some = ", ".join(sorted({key.rpartition(".")[2] for key in self.modules}))
            raise FormatError(f"{self.path}: tensor {name!r}: this model has no module {module[:120]!r} that can be adapted; it has {some}")
        return linears[0].in_features, sum(linear.out_features for linear in linears)

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise FormatError(f"{self.path}: tensor {name!r}: is {tensor.dtype}; expected float numbers")
        if tensor.is_meta:
            return tensor
        tensor = tensor.float()
        if not bool(tensor.isfinite().all()):
            raise FormatError(f"{self.path}: tensor {name!r}: holds numbers that are not finite")
        if tensor.numel() and float(tensor.abs().max()) > 60000:
            raise FormatError(f"{self.path}: tensor {name!r}: holds {float(tensor.abs().max()):.3g}, more than fp16 can hold")
        return tensor

    def _take_vector(self, name: str, ours: str, shape: tuple[int, ...], read: Callable[[], Tensor]) -> None:
        """A norm or a bias."""
        key, _, kind = ours.rpartition(".")
        if ours in self.norms:
            size = self.config.hidden_size
        elif kind == "bias" and key in self.modules:
            size = sum(linear.out_features for linear in self.modules[key])
        else:
            raise FormatError(f"{self.path}: tensor {name!r}: of whole modules only norms, and of linears only biases can be replaced")
        if shape != (size,):
            raise FormatError(f"{self.path}: tensor {name!r}: found shape {shape}, expected ({size},)")
        self.vectors[ours] = self._finite(name, read())

    def finish(self, scale_of: Callable[[str, int], float]) -> tuple[dict[tuple[int, tuple[str, ...]], LoraTarget], dict[str, Tensor]]:
        """Targets and vectors, checked to be whole."""
        targets = {}
        for module, found in self.halves.items():
            self._check_whole(module, found)
            a, b, bias = found["A"], found["B"], found.get("B_bias")
            scale = scale_of(self.written[module], len(a))
            magnitude = found.get("magnitude_vector")
            if module == self.config.names.embed:
                if magnitude is not None or bias is not None:
                    raise FormatError(f"{self.path}: module {module!r}: DoRA and biases of the embedding are not supported")
                targets[-1, ("embed",)] = LoraTarget(a=a.T, b=b, scale=scale * self.config.embed_scale, embedding=True)  # as PEFT does
                continue
            linears = self.modules[module]
            order = row_order(self.config, linears)
            targets[linears[0].layer, tuple(linear.role for linear in linears)] = LoraTarget(
                a=a, b=b[order].contiguous(), scale=scale, magnitude=None if magnitude is None else magnitude.flatten()[order],
                bias=None if bias is None else scale * bias[order],
            )  # fmt: skip
        if not targets and not self.vectors:
            raise FormatError(f"{self.path}: holds no tensors; expected lora_A and lora_B of some modules")
        return targets, self._split_biases()

    def _check_whole(self, module: str, found: Mapping[str, Tensor]) -> None:
        if "A" not in found or "B" not in found or found["A"].shape[0] != found["B"].shape[1]:
            shapes = {side: tuple(tensor.shape) for side, tensor in found.items()}
            raise FormatError(f"{self.path}: module {module!r}: found {shapes}; expected lora_A (r, K) and lora_B (N, r) with one r")

    def contents(self) -> Contents:
        """What the file has, for comparison with its settings."""
        names = self.config.names
        modules = {key: any(linear.bias for linear in linears) for key, linears in self.modules.items()}
        others = {name.rpartition(".")[0] for name in self.norms} | {names.embed}
        adapted = {
            self.written[module]: Adapted(
                layer=self.modules[module][0].layer if module in self.modules else -1,
                rank=len(found["A"]) if "A" in found else None,
                magnitude="magnitude_vector" in found,
                bias="B_bias" in found,
                embedding=module == names.embed,
            )
            for module, found in self.halves.items()
        }
        return Contents(
            file=str(self.path),
            modules=modules | {name: False for name in others},
            adapted=adapted,
            vectors=frozenset(self.vectors),
            tied=self.config.tie_word_embeddings,
        )

    def nbytes(self, *, strips: bool) -> int:
        """As `adapter_changes` keeps it: products in fp16, a gain (DoRA) and a bias of every op that has one, and norms, in fp32."""
        total, vectors, copies = 0, set[tuple[int, str, str]](), list[tuple[int, str, int]]()  # layer, stack, gain or bias; bytes
        for module, found in self.halves.items():
            self._check_whole(module, found)
            (rank, inputs), outputs = found["A"].shape, len(found["B"])
            total += 2 * inputs * (rank + -rank % 16) + 2 * rank * outputs + 4 * rank
            if strips and module in self.modules and (first := self.modules[module][0]).layer >= 0:
                size = 2 * (rank + -rank % 16) * (inputs + -inputs % 16 + outputs + -outputs % 16)
                copies.append((first.layer, _STACK_OF_ROLE.get(first.role, first.role), size))
            for linear in self.modules.get(module, ()):
                stack = linear.layer, _STACK_OF_ROLE.get(linear.role, linear.role)
                vectors |= {(*stack, kind) for kind, side in (("gain", "magnitude_vector"), ("bias", "B_bias")) if side in found}
                if linear.bias and "magnitude_vector" in found:
                    vectors.add((*stack, "bias"))
        norms = set[tuple[str, str]]()
        for name in self.vectors:
            key = name.rpartition(".")[0]
            for linear in self.modules.get(key, ()):
                vectors.add((linear.layer, _STACK_OF_ROLE.get(linear.role, linear.role), "bias"))
            if key not in self.modules:
                norms |= {(key, kind) for kind in (("weight", "bias") if self.config.norm_bias else ("weight",))}
        changed = {(layer, stack) for layer, stack, _ in vectors}  # these have no second copy
        total += sum(size for layer, stack, size in copies if (layer, stack) not in changed)
        for layer, stack, _ in vectors:
            roles = {} if layer < 0 else layer_linears(self.config, layer)
            mine = [linear.out_features for role, linear in roles.items() if _STACK_OF_ROLE.get(role, role) == stack]
            total += 4 * (sum(mine) if mine else self.config.vocab_size)
        shared = sum(self.config.parallel and key != self.config.names.norm for key, _ in norms)  # of attention and MLP
        return total + 4 * self.config.hidden_size * (len(norms) + shared)

    def _split_biases(self) -> dict[str, Tensor]:
        found = {}
        for name, vector in self.vectors.items():
            key = name.rpartition(".")[0]
            linears = self.modules.get(key, [])
            if len(linears) <= 1:
                found[name] = vector
                continue
            parts = vector[row_order(self.config, linears)].split([linear.out_features for linear in linears])
            found |= {f"{linear.key}.bias": part for linear, part in zip(linears, parts)}
        return found


class ChangeSize(NamedTuple):
    """How much an adapter changes a matrix: Frobenius norms of the change at scale 1, and of the matrix. layer: -1 outside the layers."""

    layer: int
    role: str
    rank: int
    change: float
    weight: float


def change_sizes(file: LoraFile, model: Model) -> list[ChangeSize]:
    """Every matrix that an adapter changes, layer by layer.

    Cost: unpacks these matrices of the model one by one, on the CPU.
    """
    config, found = model.config, []
    for (layer, roles), target in sorted(file.targets.items()):
        linears = {} if layer < 0 else layer_linears(config, layer)
        sizes = [linears[role].out_features for role in roles] if layer >= 0 else [len(target.b)]
        stack = _STACK_OF_ROLE.get(roles[0], roles[0])
        first = sum(linear.out_features for role, linear in linears.items() if _STACK_OF_ROLE.get(role, role) == stack
                    and _ROLE_ORDER.index(role) < _ROLE_ORDER.index(roles[0]))  # fmt: skip
        whole = model.matrix(layer, _STACK_OF_ROLE.get(roles[0], roles[0]))
        if whole is None:
            continue
        for role, size, b in zip(roles, sizes, target.b.split(sizes)):
            weight = whole if layer < 0 else whole[:, first : first + size]
            a = target.a.T if target.embedding else target.a
            if target.magnitude is None:
                change = abs(target.scale) * float(((a @ a.T).double() * (b.T @ b).double()).sum().clamp_min(0).sqrt())
            else:
                change = _dora_change(weight, a, b, target, sum(sizes[: roles.index(role)]))
            found.append(ChangeSize(layer, role, target.rank, change, float(weight.norm())))
            first += size
    return found


def _dora_change(weight: Tensor, a: Tensor, b: Tensor, target: LoraTarget, first: int) -> float:
    """Norm of what DoRA makes of a matrix, less the matrix."""
    assert target.magnitude is not None
    changed = weight + target.scale * (a.T @ b.T)
    magnitude = target.magnitude[first : first + len(b)]
    return float((changed * (magnitude / changed.norm(dim=0).clamp(min=1e-20)) - weight).norm())


@dataclass(frozen=True)
class RoleLocation:
    """Where a role is in a program: number of the op, first output, outputs."""

    op: int
    first: int
    columns: int


def role_locations(config: ModelConfig, network: Network, program: ops.Program) -> dict[tuple[int, str], RoleLocation]:
    """Every matrix that can be adapted, by layer and role; the embedding is (-1, "embed"), the head (-1, "head")."""
    op_of = {op.blob.data_ptr(): number for number, op in enumerate(program.steps) if isinstance(op, MatrixOp)}
    found = {(-1, "embed"): RoleLocation(0, 0, config.hidden_size)}
    for index, layer in enumerate(network.layers):
        attention, mlp = layer.attention, layer.mlp
        blobs = [(attention.qkv, ("q", "k", "v")), (attention.o, ("o",))]
        if isinstance(mlp, MLP):
            blobs += [(mlp.up, ("gate", "up") if mlp.gated else ("up",)), (mlp.down, ("down",))]
        linears = layer_linears(config, index)
        for blob, roles in blobs:
            first = 0
            for role in roles:
                found[index, role] = RoleLocation(op_of[blob.data_ptr()], first, linears[role].out_features)
                first += linears[role].out_features
    found[-1, "head"] = RoleLocation(op_of[network.head.matrix.data_ptr()], 0, config.vocab_size)
    return found


def adapter_changes(file: LoraFile, config: ModelConfig, network: Network, program: ops.Program) -> Adapter:
    """An adapter as changes of a program's ops, on the CPU. With DoRA every adapted matrix is unpacked once.

    Raises:
        FormatError: it adapts experts, or another place that has no op of its own.
    """
    where = role_locations(config, network, program)
    made: dict[int, _Change] = {}
    for (layer, roles), target in file.targets.items():
        missing = [role for role in roles if (layer, role) not in where]
        if missing:
            raise FormatError(f"{file.path}: adapts {missing[0]!r} of layer {layer}; experts of a sparse layer cannot be adapted")
        place = where[layer, roles[0]]
        made.setdefault(place.op, _Change(program.steps[place.op])).add(target, place.first)
    for name, vector in file.vectors.items():
        for op, which in _vector_places(name, config, where):
            made.setdefault(op, _Change(program.steps[op])).replace(which, name, vector, config)
    return {op: change.finish() for op, change in made.items()}


def _vector_places(name: str, config: ModelConfig, where: Mapping[tuple[int, str], RoleLocation]) -> list[tuple[int, Any]]:
    """Ops that a norm or bias belongs to; of a bias with its place."""
    key, _, kind = name.rpartition(".")
    if key == config.names.norm:
        return [(where[-1, "head"].op, "norm")]
    for layer in range(config.num_layers):
        for part in layer_norms(config):
            if key == config.names.at(layer, part):
                owners = {"attention_norm": ("q", "up") if config.parallel else ("q",), "mlp_norm": ("up",),
                          "attention_post_norm": ("o",), "mlp_post_norm": ("down",)}[part]  # fmt: skip
                if any((layer, owner) not in where for owner in owners):
                    raise FormatError(f"adapter: {name} is of a sparse layer, which cannot be adapted")
                return [(where[layer, owner].op, "norm") for owner in owners]
        for role, linear in layer_linears(config, layer).items():
            if linear.key == key and kind == "bias" and (layer, role) in where:
                return [(where[layer, role].op, where[layer, role])]
    raise FormatError(f"adapter: {name} cannot be replaced in this model")


class _Change:
    """A LoraChange of an op in the making."""

    def __init__(self, op: ops.Op) -> None:
        self.op, self.parts = op, list[LoraPart]()
        self.vectors: dict[str, Tensor] = {}

    @property
    def matrix(self) -> MatrixOp:
        """The op, which has a matrix."""
        assert isinstance(self.op, MatrixOp), self.op.name
        return self.op

    def _vector(self, name: str) -> Tensor:
        if name not in self.vectors:
            self.vectors[name] = torch.zeros(ops.shape(self.matrix.blob)[1])
        return self.vectors[name]

    def _own_bias(self, columns: slice) -> Tensor | float:
        own = self.matrix.bias
        return 0.0 if own is None else own[columns].cpu()

    def add(self, target: LoraTarget, first: int) -> None:
        """The product, and what DoRA and a bias of B add to it."""
        columns, b = slice(first, first + len(target.b)), target.b.T
        if target.magnitude is not None:
            blob = self.matrix.blob
            plain = ops.unpack(blob) if blob.device.type == "cpu" else unpack_half(blob).float().cpu()
            weight = plain[:, columns] + target.scale * (target.a.T @ b)
            gain = target.magnitude / weight.norm(dim=0).clamp(min=1e-20)
            self._vector("gain")[columns] = gain - 1
            if self.matrix.bias is not None:  # it is not stretched
                self._vector("bias")[columns] -= (gain - 1) * self._own_bias(columns)
        if target.bias is not None:
            self._vector("bias")[columns] += target.bias
        inputs = target.a if target.embedding else target.a.T
        self.parts.append(LoraPart.of(inputs, b, torch.full((target.rank,), target.scale), first))

    def replace(self, which: str | RoleLocation, name: str, vector: Tensor, config: ModelConfig) -> None:
        """Another norm, or another bias of a linear."""
        if isinstance(which, RoleLocation):
            columns = slice(which.first, which.first + which.columns)
            self._vector("bias")[columns] += vector - self._own_bias(columns)
            return
        scale = config.logit_scale if name.startswith(f"{config.names.norm}.") else 1.0
        kind = "norm_bias" if name.endswith(".bias") else "norm"
        self.vectors[kind] = (vector + (config.norm_offset if kind == "norm" else 0.0)) * scale

    def finish(self) -> LoraChange:
        """The change; a norm and its bias are replaced together."""
        if "norm" in self.vectors or "norm_bias" in self.vectors:
            own = {"norm": self.matrix.norm, "norm_bias": norm_bias_of(self.matrix)}
            for kind, vector in own.items():
                if vector is not None:
                    self.vectors.setdefault(kind, vector)
        return LoraChange(parts=tuple(self.parts), **self.vectors)
