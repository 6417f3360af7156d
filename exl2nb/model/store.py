"""A checkpoint under our names: renamed, fused matrices sliced, transposed ones transposed back. Knows nothing of their use."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from exl2nb.core.errors import FormatError
from exl2nb.io.safetensors import TensorInfo
from exl2nb.io.shards import TensorStore
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, layer_linears
from exl2nb.quant.gptq_format import GPTQ_SUFFIXES

Slice = Callable[[Tensor], Tensor]
GPTQ_TENSOR_SUFFIXES = (*GPTQ_SUFFIXES, "g_idx")


@dataclasses.dataclass(frozen=True)
class _Part:
    """source: name in the files; shape after `cut`, None for its own. rows: first and last + 1 of those that are read, None for all."""

    source: str
    slice: Slice | None = None
    shape: tuple[int, ...] | None = None
    rows: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class FusedGptq:
    """The fused GPTQ matrix that holds a linear: its tensors' prefix in the files, its outputs, and the linear's columns int64 `(N,)`."""

    store: TensorStore
    prefix: str
    out_features: int
    columns: Tensor


class ModelStore:
    """A TensorStore seen through `config.files`: same methods, our names. Closing it closes the files.

    Raises:
        FormatError: two tensors come to the same name, or a fused or transposed one has another shape than the config says.
    """

    def __init__(self, config: ModelConfig, store: TensorStore) -> None:
        self._config, self._store = config, store
        self.directory: Path = store.directory
        self.is_exl2 = store.is_exl2
        self._parts: dict[str, _Part] = {}
        self._untouched: dict[str, str] = {}
        self._fused_gptq: dict[str, tuple[str, list[Linear]]] = {}
        fused, stacked = fused_linears(config), _stacked_tensors(config)
        for source in store.names():
            name = source
            for old, new in config.files.renames:
                name = name.replace(old, new)
            if _matches_any(name, config.files.passed):
                self._untouched[name] = source
                continue
            if _matches_any(name, config.files.ignored):
                continue
            stem, _, suffix = name.rpartition(".")
            if name in stacked:
                self._add_stacked(source, *stacked[name])
            elif stem in fused and suffix in ("weight", "bias"):
                self._add_fused(source, suffix, fused[stem])
            elif stem in fused and suffix in GPTQ_TENSOR_SUFFIXES:
                for linear in fused[stem]:
                    self._add(f"{linear.key}.{suffix}", _Part(source))
                    self._fused_gptq[linear.key] = (source.rpartition(".")[0], fused[stem])
            else:
                self._add(name, self._plain(source, name))

    @property
    def files(self) -> list[Path]:
        """The files that count, sorted by name."""
        return self._store.files

    def names(self) -> list[str]:
        """All names, in the order of the files."""
        return list(self._parts)

    def source(self, name: str) -> str:
        """The name in the files of the tensor that holds `name`."""
        return self._parts[name].source

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __len__(self) -> int:
        return len(self._parts)

    def info(self, name: str) -> TensorInfo:
        """Header entry of one tensor; of a part of a fused one, with the part's shape."""
        part = self._parts.get(name)
        if part is None:
            return self._store.info(name)
        info = self._store.info(part.source)
        return info if part.shape is None else dataclasses.replace(info, name=name, shape=part.shape)

    def read(self, name: str, *, rows: tuple[int, int] | None = None, into: Tensor | None = None) -> Tensor:
        """Copy one tensor into memory, or its rows from the first to the last + 1 of `rows`; `into` as of SafetensorsFile.read."""
        part = self._parts.get(name)
        if part is None or (part.slice is None and part.rows is None):
            return self._store.read(name if part is None else part.source, rows=rows, into=into)
        tensor = self._store.read(part.source, rows=part.rows, into=into)
        tensor = tensor if part.slice is None else part.slice(tensor).contiguous()
        return tensor if rows is None else tensor[rows[0] : rows[1]]

    @property
    def nbytes(self) -> int:
        """Data bytes of all tensors that are ours, a fused GPTQ matrix counted once."""
        shared = {part.source: self._store.info(part.source).nbytes for part in self._parts.values() if part.shape is None}
        return sum(shared.values()) + sum(self.info(name).nbytes for name, part in self._parts.items() if part.shape is not None)

    def fused_gptq(self, key: str) -> FusedGptq | None:
        """The fused GPTQ matrix that holds linear `key`, whose parts cannot be read one by one; None: it is not fused."""
        if key not in self._fused_gptq:
            return None
        prefix, linears = self._fused_gptq[key]
        total = sum(linear.out_features for linear in linears)
        at = next(i for i, linear in enumerate(linears) if linear.key == key)
        return FusedGptq(self._store, prefix, total, rows_of_role(self._config, linears, at)(torch.arange(total)))

    def untouched(self) -> list[str]:
        """Names, after the renames, of tensors that are not the decoder's (a vision tower's): the converter passes them on."""
        return list(self._untouched)

    def read_untouched(self, name: str) -> Tensor:
        """Copy one of them into memory, as it is."""
        return self._store.read(self._untouched[name])

    def info_untouched(self, name: str) -> TensorInfo:
        """Header entry of one of them."""
        return self._store.info(self._untouched[name])

    def close(self) -> None:
        """Close all files."""
        self._store.close()

    def __enter__(self) -> ModelStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ModelStore({str(self.directory)!r}, {len(self.files)} files, {len(self)} tensors)"

    def _add(self, name: str, part: _Part) -> None:
        if name in self._parts:
            first, info = self._parts[name].source, self._store.info(part.source)
            raise FormatError(f"{info.path}: tensor {part.source!r}: found {first!r} too, which is the same one; expected one of them")
        self._parts[name] = part

    def _plain(self, source: str, name: str) -> _Part:
        files, info = self._config.files, self._store.info(source)
        if files.unit_head and name == f"{self._config.names.head}.weight":
            return _Part(source, lambda w: torch.nn.functional.normalize(w.float(), dim=-1).to(w.dtype))
        layer = self._config.names.layer.partition("{}")[0]
        if files.transposed and name.startswith(layer) and name.endswith(".weight") and len(info.shape) == 2 and not self.is_exl2:
            return _Part(source, lambda w: w.T, info.shape[::-1])
        return _Part(source)

    def _add_fused(self, source: str, suffix: str, linears: list[Linear]) -> None:
        info, transposed = self._store.info(source), self._config.files.transposed and suffix == "weight"
        rows = sum(linear.out_features for linear in linears)
        inner = (linears[0].in_features,) if suffix == "weight" else ()
        want = (*inner, rows) if transposed else (rows, *inner)
        if info.shape != want:
            raise FormatError(f"{info.path}: tensor {source!r}: found shape {info.shape}, expected {want} for this config.json")
        for at, linear in enumerate(linears):
            part = _Part(source, rows_of_role(self._config, linears, at, transposed=transposed), (linear.out_features, *inner))
            self._add(f"{linear.key}.{suffix}", part)

    def _add_stacked(self, source: str, linears: list[Linear], transposed: bool) -> None:
        info, config = self._store.info(source), self._config
        outputs, inputs = linears[0].shape
        block = (inputs, outputs) if transposed else (outputs, inputs)
        if info.shape not in ((len(linears) * block[0], block[1]), (len(linears), *block)):
            raise FormatError(
                f"{info.path}: tensor {source!r}: found shape {info.shape}, expected {(len(linears) * block[0], block[1])} for this "
                f"config.json's {config.moe.num_experts if config.moe else 0} experts"
            )
        for i, linear in enumerate(linears):
            rows = info.shape[0] // len(linears)
            self._add(f"{linear.key}.weight", _Part(source, _block_slice(block, transposed), linear.shape, (i * rows, (i + 1) * rows)))


Store = TensorStore | ModelStore


def _matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def rows_of_role(config: ModelConfig, linears: Sequence[Linear], at: int, *, transposed: bool = False) -> Slice:
    """What takes the rows of one linear out of those of the matrix in which they are fused; transposed: out of its columns."""
    if config.files.grouped and len(linears) == 3:
        return _group_slice(config, linears[at].role)
    start = sum(linear.out_features for linear in linears[:at])
    return _row_slice(start, start + linears[at].out_features, transposed)


def row_order(config: ModelConfig, linears: Sequence[Linear]) -> Tensor:
    """Rows of the matrix in which the linears are fused, role by role: int64 `(N,)`."""
    total = torch.arange(sum(linear.out_features for linear in linears))
    return total if len(linears) == 1 else torch.cat([rows_of_role(config, linears, at)(total) for at in range(len(linears))])


def fused_linears(config: ModelConfig) -> dict[str, list[Linear]]:
    """Full key of each fused matrix -> what it holds."""
    found = {}
    for layer in range(config.num_layers if config.files.fused else 0):
        linears = layer_linears(config, layer)
        for key, roles in config.files.fused:
            found[f"{config.names.layer.format(layer)}.{key}"] = [linears[role] for role in roles]
    return found


def _stacked_tensors(config: ModelConfig) -> dict[str, tuple[list[Linear], bool]]:
    """Full name of each tensor that holds one role of all experts -> what it holds, and whether the blocks are transposed."""
    found = {}
    for layer in range(config.num_layers if config.files.stacked else 0):
        linears, moe = layer_linears(config, layer), config.experts(layer)
        for key, role, transposed in config.files.stacked if moe is not None else ():
            mine = [linear for name, linear in linears.items() if name.partition(".")[0] == role]
            found[f"{config.names.layer.format(layer)}.{key}"] = (mine, transposed)
    return found


def _block_slice(block: tuple[int, int], transposed: bool) -> Slice:
    return lambda tensor: tensor.view(block).T if transposed else tensor.view(block)


def _row_slice(start: int, end: int, transposed: bool) -> Slice:
    return lambda tensor: (tensor.T if transposed else tensor)[start:end]


def _group_slice(config: ModelConfig, role: str) -> Slice:
    """The rows of one role out of `(kv_heads, q_per_kv + 2, head_dim)`."""
    per_kv = config.q_per_kv
    part = {"q": slice(0, per_kv), "k": slice(per_kv, per_kv + 1), "v": slice(per_kv + 1, per_kv + 2)}[role]
    return lambda tensor: tensor.view(config.num_kv_heads, per_kv + 2, config.head_dim, *tensor.shape[1:])[:, part].flatten(0, 2)


def open_store(config: ModelConfig, directory: str | os.PathLike[str]) -> ModelStore:
    """Open the weights of a model directory.

    Raises:
        ModelNotFound, FormatError: as `io.shards.TensorStore`. FormatError: as `ModelStore`.
    """
    store = TensorStore(directory)
    try:
        return ModelStore(config, store)
    except BaseException:
        store.close()
        raise
