"""From a model directory to a Model: read, check, repack. Every shape is checked from headers before any data is read."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.core.errors import DeviceError, OptionError
from exl2nb.core.log import logger
from exl2nb.core.progress import Meter, Sink
from exl2nb.io.hf_config import read_config, with_quantization
from exl2nb.model.archs import parse_config
from exl2nb.model.config import ModelConfig
from exl2nb.model.facts import remote_code
from exl2nb.model.gpu_memory import Arena, kept_by_layer
from exl2nb.model.inspection import inspect
from exl2nb.model.layers import MLP, Attention, Embedding, Head, Layer, Norm, ResidualAdd, RoutedMLP
from exl2nb.model.model import SMALL_MODEL_BYTES, LayerRange, Model, Network
from exl2nb.model.rope import MAX_CONTEXT, RopeOverride, rope_tables, trained_context
from exl2nb.model.sources import Source, find_sources, read_gptq
from exl2nb.model.store import ModelStore, open_store
from exl2nb.model.streaming import Streaming, pack_layer, with_streamed
from exl2nb.ops.memory_ops import large_pages
from exl2nb.quant.exl2 import Exl2Tensors

WEIGHT_KINDS = ("auto", "fp32")
FINGERPRINT_SAMPLES = 64  # per file, evenly spread: a quantisation changes every tensor, so samples suffice
FINGERPRINT_SAMPLE_BYTES = 4096
ROPE_ROWS = 64  # of a fingerprint


def read_model_config(directory: str | os.PathLike[str], *, rope: RopeOverride | None = None) -> ModelConfig:
    """Read and check the config.json of a model directory.

    Args:
        rope: changes to its RoPE.

    Raises:
        ModelNotFound: no directory or no config.json. ConfigError: a value that cannot be used. UnknownArchitecture: lists the known ones.
        OptionError: changes that the model's RoPE does not take.
    """
    rope = rope or RopeOverride()
    raw = rope.raw(with_quantization(directory, read_config(directory)))
    for note in remote_code(Path(directory), raw):
        logger.warning("%s: %s", directory, note)
    where = str(Path(directory) / "config.json")
    return rope.apply(parse_config(raw, where=f"{where} with rope_scaling" if rope.scaling is not None else where))


def load_model(
    directory: str | os.PathLike[str],
    *,
    device: str = "cpu",
    spans: Sequence[LayerRange] = (),
    experts: bool = False,
    streaming: Streaming | None = None,
    weights: str = "auto",
    context: int | None = None,
    rope: RopeOverride | None = None,
    progress: Sink | None = None,
    deterministic: bool = False,
) -> Model:
    """Load an EXL2, GPTQ or plain fp16, bf16 or fp32 model.

    Args:
        directory: holds config.json and the .safetensors files.
        device: "cpu", "cuda" or "cuda:1"; on CUDA every plain weight is kept in fp16, and so is a GPTQ matrix whose scales fp16 cannot
            hold.
        spans: layers on several devices, in running order and without gaps, in place of `device`.
        experts: with spans: keep the experts of sparse layers on the CPU, wherever the rest of their layer is.
        streaming: with spans: where prompts through layers on the CPU are computed; None: on the CPU.
        weights: "auto" keeps every matrix in the format it is stored in; "fp32" widens plain ones and reconstructs quantised ones to fp32
            (a reference: 4 bytes a weight).
        context: longest sequence in tokens; None = max_position_embeddings. Dynamic NTK takes its base from it. A RuntimeWarning
            where it is longer than what the model was trained for.
        rope: changes to the model's RoPE.
        progress: a sink for events of stage "load", counted in layers.
        deterministic: on CUDA, take prompts through the decode kernels too, so that no token's bits depend on chunks or on the batch; on
            the CPU that is always so.

    Returns:
        The model. `close()` gives its memory back.

    Raises:
        ModelNotFound, ConfigError, UnknownArchitecture: as `read_model_config`. FormatError: tensors that are missing, unknown, of a wrong
        shape or dtype, or that break their format, all listed at once. OptionError: an argument out of range. DeviceError: an unknown
        device.
    """
    if weights not in WEIGHT_KINDS:
        raise OptionError(f"load_model: weights is {weights!r}; expected one of {', '.join(WEIGHT_KINDS)}")
    if context is not None and (isinstance(context, bool) or not isinstance(context, int) or not 1 <= context <= MAX_CONTEXT):
        raise OptionError(f"load_model: context is {context!r}; expected an integer from 1 to {MAX_CONTEXT}")
    for place in [span.device for span in spans] or [device]:
        if not isinstance(place, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", place):
            raise DeviceError(f"load_model: device is {place!r}; expected cpu, cuda or cuda:<number>")
        if place != "cpu" and "cuda" not in ops.libraries().loaded:
            raise DeviceError(f"load_model: device is {place!r}, which cannot be used: {ops.libraries().cuda_problem}; use device='cpu'")
        if place != "cpu" and weights == "fp32":
            raise OptionError("load_model: weights='fp32' is a reference for the CPU; use device='cpu'")
    config = read_model_config(directory, rope=rope)
    _check_spans(spans, config.num_layers)
    if streaming is not None and spans and not experts:
        spans = with_streamed(spans, streaming)
    if experts and (config.moe is None or not spans):
        raise OptionError(f"load_model: experts apart from their layers, {'without spans' if config.moe else 'and this model has none'}")
    longest = config.max_position_embeddings
    if config.learned_positions and context is not None and context > longest:
        raise OptionError(f"load_model: context is {context}; expected at most {longest}, the positions this model has learned")
    config.check_context(longest if context is None else context)
    _warn_beyond_context(config, context, where=Path(directory).name)
    with open_store(config, directory) as store:
        sources = find_sources(config, store)
        pieces, shared = [], small_model_memory(directory, widened=weights == "fp32")
        host = None if shared is None else Arena(shared.numel(), "cpu", shared)  # of every span on the CPU
        apart = Builder(config, store, sources, widen=weights == "fp32", device="cpu", arena=host) if experts else None
        if apart is not None:
            apart.together = streaming is not None
        with Meter("load", total=config.num_layers + 2, unit="layers", sink=progress) as meter:
            for span in spans or [LayerRange(device, 0, config.num_layers)]:
                with ops.on_device(span.device):
                    arena = (
                        host
                        if span.device == "cpu"
                        else None
                        if span.lent
                        else _allocate_arena(config, directory, span, experts=not experts)
                    )
                    builder = Builder(config, store, sources, widen=weights == "fp32", device=span.device, arena=arena, experts=apart)
                    builder.together = streaming is not None and (span.device == "cpu" or span.lent)
                    pieces.append(builder.span(span, meter))
                    if span.device != "cpu":
                        torch.cuda.empty_cache()  # what held tensors while they were packed
    embedding, head = pieces[0].embedding, pieces[-1].head
    assert embedding is not None
    assert head is not None
    network = Network(embedding, tuple(layer for piece in pieces for layer in piece.layers), head)
    longest = context if context is not None else longest
    if len(spans) > 1 or experts:
        from exl2nb.model.split import SplitModel

        options = {"deterministic": deterministic, "experts": experts, "streaming": streaming}
        return SplitModel(config, network, spans, context=longest, **options)
    return Model(config, network, context=longest, device=spans[0].device if spans else device, deterministic=deterministic)


def _check_spans(spans: Sequence[LayerRange], layers: int) -> None:
    bounds = [0, *(span.last for span in spans)]
    if spans and ([span.first for span in spans] != bounds[:-1] or bounds[-1] != layers or any(span.last <= span.first for span in spans)):
        raise OptionError(f"load_model: spans are {[(span.first, span.last) for span in spans]}; expected 0 to {layers} without gaps")


def _warn_beyond_context(config: ModelConfig, context: int | None, *, where: str) -> None:
    """Say that a context is longer than what the model knows; dynamic NTK and longrope stretch themselves."""
    known = trained_context(config)
    if context is None or context <= known or config.rope.type in ("dynamic", "longrope"):
        return
    if all(config.rope_kind(layer) == "none" for layer in range(config.num_layers)):
        return
    warnings.warn(
        f"{where}: context is {context}, the model was trained for {known} tokens; answers beyond those are likely nonsense: lower "
        f"context, or stretch the positions with rope_scale={context / known:g} or rope_scaling={{'rope_type': 'yarn', "
        f"'factor': {context / known:g}}}",
        RuntimeWarning,
        stacklevel=4,
    )


def _allocate_arena(config: ModelConfig, directory: str | os.PathLike[str], span: LayerRange, *, experts: bool) -> Arena:
    """One allocation for all weights of a span on a GPU."""
    embedding, *layers, head = kept_by_layer(config, inspect(directory), experts=experts)
    ends = (embedding if span.first == 0 else 0) + (head if span.last == config.num_layers else 0)
    return Arena(ends + sum(layers[span.first : span.last]), span.device)


class _Piece(NamedTuple):
    """What a span holds of a network."""

    embedding: Embedding | None
    layers: list[Layer]
    head: Head | None


class Builder:
    """Reads the tensors of a plan and packs them into layers. experts: reads and packs those, in place of this one, or None.

    together: each layer's tensors side by side, as `Image` needs them.
    """

    def __init__(
        self,
        config: ModelConfig,
        store: ModelStore,
        sources: dict[str, Source],
        *,
        widen: bool,
        device: str,
        arena: Arena | None,
        experts: Builder | None = None,
    ) -> None:
        self.config, self.store, self.sources, self.widen, self.device, self.arena = config, store, sources, widen, device, arena
        self.experts, self.together = experts, False

    def span(self, span: LayerRange, meter: Meter) -> _Piece:
        """Everything of a span, layer by layer."""
        config = self.config
        embedding, head, layers = None, None, []
        if span.first == 0:
            embedding = Embedding(
                table=self.table(config.names.embed),
                scale=config.embed_scale,
                position_table=self.table(config.names.positions) if config.learned_positions else None,
            )
            meter.step(detail="embedding")
        for layer in range(span.first, span.last):
            owner = self.experts or self
            mlp = self.mlp(layer) if config.experts(layer) is None else owner.routed_mlp(layer)
            if isinstance(mlp, RoutedMLP) and owner is not self and owner.together:
                mlp = pack_layer(mlp)
            attention = replace(self.attention(layer), layer=layer - span.first)
            one = Layer(attention=attention, mlp=mlp, parallel=config.parallel)
            layers.append(pack_layer(one) if self.together else one)
            meter.step(detail=f"layer {layer}")
        if span.last == config.num_layers:
            # the factor on the logits rides on the last norm
            head = Head(norm=self.norm(config.names.norm, scale=config.logit_scale), matrix=self.matrix(config.names.head))
            meter.step(detail="head")
        return _Piece(embedding, layers, head)

    def attention(self, layer: int) -> Attention:
        """The attention half of one layer."""
        config, names = self.config, self.config.names
        qkv = [names.at(layer, role) for role in ("q", "k", "v")]
        head_norms = {part: self.weight(names.at(layer, part)) if config.qk_norm else None for part in ("q_norm", "k_norm")}
        return Attention(
            layer=layer,
            norm=self.norm(names.at(layer, "attention_norm") if config.pre_norm else None),
            qkv=self.stacked(qkv),
            qkv_bias=self.bias(qkv),
            **head_norms,
            o=self.matrix(names.at(layer, "o")),
            o_bias=self.bias([names.at(layer, "o")]),
            added=self.residual_add(names.at(layer, "attention_post_norm")),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.windows[layer],
            softcap=config.attention_softcap,
            rope=config.rope_kind(layer),
            interleaved=config.interleaved,
            clip=config.clip_qkv,
        )

    def mlp(self, layer: int) -> MLP:
        """The MLP half of one layer."""
        config, names = self.config, self.config.names
        up = [names.at(layer, role) for role in (("gate", "up") if config.gated else ("up",))]
        down, norm = names.at(layer, "down"), names.at(layer, "attention_norm" if config.parallel else "mlp_norm")
        return MLP(
            norm=self.norm(norm if config.pre_norm else None),
            gated=config.gated,
            up=self.stacked(up),
            up_bias=self.bias(up),
            down=self.matrix(down),
            down_bias=self.bias([down]),
            added=self.residual_add(names.at(layer, "mlp_post_norm")),
            activation=config.activation,
        )

    def routed_mlp(self, layer: int) -> RoutedMLP:
        """The MLP half of a sparse layer."""
        config, names, moe = self.config, self.config.names, self.config.experts(layer)
        assert moe is not None, layer
        experts = range(moe.num_experts)
        shared = {role: names.at(layer, f"shared_{role}") for role in ("gate", "up", "down", "router")} if moe.shared_size else {}
        return RoutedMLP(
            norm=self.norm(names.at(layer, "mlp_norm") if config.pre_norm else None),
            router=self.router(names.at(layer, "router")),
            up=tuple(self.stacked([names.at(layer, f"gate.{e}"), names.at(layer, f"up.{e}")]) for e in experts),
            down=tuple(self.matrix(names.at(layer, f"down.{e}")) for e in experts),
            shared_up=self.stacked([shared["gate"], shared["up"]]) if shared else None,
            shared_down=self.matrix(shared["down"]) if shared else None,
            shared_gate=self.router(shared["router"]) if shared else None,
            top_k=moe.top_k,
            renormalize=moe.renormalize,
            activation=config.activation,
            added=self.residual_add(names.at(layer, "mlp_post_norm")),
        )

    def router(self, key: str) -> Tensor:
        """The blob of a matrix that is never quantised."""
        return self.place(ops.pack_dense(self.read_table(key)))

    def norm(self, key: str | None, *, scale: float = 1.0) -> Norm:
        """The norm of module `key`, its result times `scale`; without a key no norm."""
        config = self.config
        bias = self.place(self.vector(f"{key}.bias") * scale) if key and config.norm_bias else None
        return Norm(weight=self.weight(key, scale=scale) if key else None, bias=bias, eps=config.norm_eps, layer=config.norm == "layer")

    def residual_add(self, key: str) -> ResidualAdd:
        """How a half's result is added; `key` is that of its post norm, where there are any."""
        config = self.config
        return ResidualAdd(norm=self.weight(key) if config.post_norm else None, eps=config.norm_eps, scale=config.residual_scale)

    def weight(self, key: str, *, scale: float = 1.0) -> Tensor:
        """The weight of a norm, in f32, with what the architecture adds to it, times `scale`."""
        return self.place((self.vector(f"{key}.weight") + self.config.norm_offset) * scale)

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor moved into the arena, where there is one."""
        return tensor if self.arena is None else self.arena.keep(tensor)

    def table(self, key: str) -> Tensor:
        """The weight of an embedding."""
        return self.place(self.read_table(key))

    def read_table(self, key: str) -> Tensor:
        """The numbers of a table as they are stored."""
        table = self.store.read(f"{key}.weight")
        return table.float() if self.widen else table.to(self.device)

    def matrix(self, key: str) -> Tensor:
        """The blob of one linear."""
        return self.place(self.packed(key))

    def packed(self, key: str) -> Tensor:
        """A blob without padding columns, which may go into another one."""
        source = self.sources[key]
        if source.kind == "dense":
            weight = self.store.read(f"{source.prefix}.weight")
            return ops.pack_dense(weight.float() if self.widen else weight.to(self.device))
        if source.kind == "gptq":
            gptq = read_gptq(self.config, self.store, source.linear)
            packed = None if self.widen else gptq.packed() if self.device == "cpu" else gptq.packed_half()
            if packed is None:
                return ops.pack_dense(gptq.reconstruct().T.contiguous().to(self.device))
            qweight, scales, zeros, perm, rows = packed
            zeros, perm = (None if part is None else part.to(self.device) for part in (zeros, perm))
            codes = (qweight.to(self.device), scales.to(self.device), zeros, perm, rows.to(self.device))
            return ops.pack_gptq(*codes, bits=gptq.bits, in_features=gptq.in_features)
        outputs = source.linear.out_features
        exl2 = Exl2Tensors.read(self.store, source.prefix, in_features=source.linear.in_features, out_features=outputs)
        if self.widen:
            return ops.pack_dense(exl2.reconstruct()[:, :outputs].T.float().contiguous())
        parts = (exl2.q_weight, exl2.q_scale, exl2.q_scale_max, exl2.q_groups, exl2.q_invperm)
        return ops.pack_exl2(*(part.to(self.device) for part in parts), out_features=outputs)

    def stacked(self, keys: list[str]) -> Tensor:
        """One blob of several linears with the same input."""
        return self.place(ops.pack_concat([self.packed(key) for key in keys]))

    def vector(self, name: str) -> Tensor:
        """A norm or bias in f32."""
        return self.store.read(name).float().to(self.device)

    def bias(self, keys: list[str]) -> Tensor | None:
        """The biases of several linears side by side, None where they have none."""
        present = [self.linear_bias(key) for key in keys if self.sources[key].linear.bias]
        return self.place(torch.cat(present)) if present else None

    def linear_bias(self, key: str) -> Tensor:
        """The bias of one linear."""
        return self.vector(f"{key}.bias")


def small_model_memory(directory: str | os.PathLike[str], *, widened: bool) -> Tensor | None:
    """Large-page memory for the packed weights of a small model; None for a larger one, whose matrices stay where they were packed.

    A model that fits in the processor's cache is read from there in every step, and each 4 KiB page then costs a page table walk (5,000 in
    the demo model). Larger models are bound by memory bandwidth instead.

    Args:
        widened: 16-bit numbers become 32-bit ones.
    """
    size = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    return large_pages((2 * size if widened else size) + size // 8 + (2 << 20)) if size <= SMALL_MODEL_BYTES else None


def fingerprint(directory: str | os.PathLike[str], model: Model) -> str:
    """32 hex digits: config.json, and of every `.safetensors` file its header, its size and samples; the kind of device; the RoPE tables.

    Equal for equal files, whatever the directory is called. Some RoPE types depend on the context that the model was loaded with.

    Cost: reads at most 256 KiB per file besides the header.
    """
    digest = blake2b("+".join(model.capabilities.placement.kinds).encode(), digest_size=16)
    config = model.config
    for kind in sorted({config.rope_kind(layer) for layer in range(config.num_layers)}):
        for table in rope_tables(config, ROPE_ROWS, context=model.context, kind=kind):
            digest.update(table.contiguous().numpy().tobytes())
    folder = Path(directory)
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            header = min(8 + int.from_bytes(file.read(8), "little"), size)
            file.seek(0)
            digest.update(size.to_bytes(8, "little") + file.read(header))
            for i in range(FINGERPRINT_SAMPLES):
                file.seek(header + (size - header) * i // FINGERPRINT_SAMPLES)
                digest.update(file.read(FINGERPRINT_SAMPLE_BYTES))
    return digest.hexdigest()
