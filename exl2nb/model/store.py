"""A checkpoint under our names: renamed, fused matrices cut apart, transposed ones turned. Knows nothing of what they are used for."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from exl2nb.core.errors import FormatError
from exl2nb.io.safetensors import TensorInfo
from exl2nb.io.shards import TensorStore
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, layer_linears
from exl2nb.quant.gptq import SUFFIXES

Cut = Callable[[Tensor], Tensor]
GPTQ_SUFFIXES = (*SUFFIXES, "g_idx")


@dataclasses.dataclass(frozen=True)
class _Piece:
    """source: name in the files; shape after `cut`, None for its own. rows: first and last + 1 of those that are read, None for all."""

    source: str
    cut: Cut | None = None
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
        self._pieces: dict[str, _Piece] = {}
        self._untouched: dict[str, str] = {}
        self._fused_gptq: dict[str, tuple[str, list[Linear]]] = {}
        fused, stacked = _fused(config), _stacked(config)
        for source in store.names():
            name = source
            for old, new in config.files.renames:
                name = name.replace(old, new)
            if _matches(name, config.files.passed):
                self._untouched[name] = source
                continue
            if _matches(name, config.files.ignored):
                continue
            stem, _, suffix = name.rpartition(".")
            if name in stacked:
                self._add_stacked(source, *stacked[name])
            elif stem in fused and suffix in ("weight", "bias"):
                self._add_fused(source, suffix, fused[stem])
            elif stem in fused and suffix in GPTQ_SUFFIXES:
                for linear in fused[stem]:
                    self._add(f"{linear.key}.{suffix}", _Piece(source))
                    self._fused_gptq[linear.key] = (source.rpartition(".")[0], fused[stem])
            else:
                self._add(name, self._plain(source, name))

    @property
    def files(self) -> list[Path]:
        """The files that count, sorted by name."""
        return self._store.files

    def names(self) -> list[str]:
        """All names, in the order of the files."""
        return list(self._pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def info(self, name: str) -> TensorInfo:
        """Header entry of one tensor; of a piece of a fused one, with the piece's shape."""
        piece = self._pieces.get(name)
        if piece is None:
            return self._store.info(name)
        info = self._store.info(piece.source)
        return info if piece.shape is None else dataclasses.replace(info, name=name, shape=piece.shape)

    def read(self, name: str, *, rows: tuple[int, int] | None = None, into: Tensor | None = None) -> Tensor:
        """Copy one tensor into memory, or its rows from the first to the last + 1 of `rows`; `into` as of SafetensorsFile.read."""
        piece = self._pieces.get(name)
        if piece is None or (piece.cut is None and piece.rows is None):
            return self._store.read(name if piece is None else piece.source, rows=rows, into=into)
        tensor = self._store.read(piece.source, rows=piece.rows, into=into)
        tensor = tensor if piece.cut is None else piece.cut(tensor).contiguous()
        return tensor if rows is None else tensor[rows[0] : rows[1]]

    @property
    def nbytes(self) -> int:
        """Data bytes of all tensors that are ours, a fused GPTQ matrix counted once."""
        shared = {piece.source: self._store.info(piece.source).nbytes for piece in self._pieces.values() if piece.shape is None}
        return sum(shared.values()) + sum(self.info(name).nbytes for name, piece in self._pieces.items() if piece.shape is not None)

    def fused_gptq(self, key: str) -> FusedGptq | None:
        """The fused GPTQ matrix that holds linear `key`, whose pieces cannot be read one by one; None: it is not fused."""
        if key not in self._fused_gptq:
            return None
        prefix, linears = self._fused_gptq[key]
        total = sum(linear.out_features for linear in linears)
        at = next(i for i, linear in enumerate(linears) if linear.key == key)
        return FusedGptq(self._store, prefix, total, self._cut(linears, at, turned=False)(torch.arange(total)))

    def untouched(self) -> list[str]:
        """Names, after the renames, of tensors that are not the decoder's (a vision tower's): the converter passes them on."""
        return list(self._untouched)

    def read_untouched(self, name: str) -> Tensor:
        """Copy one of them into memory, as it is."""
        return self._store.read(self._untouched[name])

    def close(self) -> None:
        """Close all files."""
        self._store.close()

    def __enter__(self) -> ModelStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ModelStore({str(self.directory)!r}, {len(self.files)} files, {len(self)} tensors)"

    def _add(self, name: str, piece: _Piece) -> None:
        if name in self._pieces:
            first, info = self._pieces[name].source, self._store.info(piece.source)
            raise FormatError(f"{info.path}: tensor {piece.source!r}: found {first!r} too, which is the same one; expected one of them")
        self._pieces[name] = piece

    def _plain(self, source: str, name: str) -> _Piece:
        files, info = self._config.files, self._store.info(source)
        if files.unit_head and name == f"{self._config.names.head}.weight":
            return _Piece(source, lambda w: torch.nn.functional.normalize(w.float(), dim=-1).to(w.dtype))
        layer = self._config.names.layer.partition("{}")[0]
        if files.transposed and name.startswith(layer) and name.endswith(".weight") and len(info.shape) == 2 and not self.is_exl2:
            return _Piece(source, lambda w: w.T, info.shape[::-1])
        return _Piece(source)

    def _add_fused(self, source: str, suffix: str, linears: list[Linear]) -> None:
        info, turned = self._store.info(source), self._config.files.transposed and suffix == "weight"
        rows = sum(linear.out_features for linear in linears)
        inner = (linears[0].in_features,) if suffix == "weight" else ()
        want = (*inner, rows) if turned else (rows, *inner)
        if info.shape != want:
            raise FormatError(f"{info.path}: tensor {source!r}: found shape {info.shape}, expected {want} for this config.json")
        for at, linear in enumerate(linears):
            piece = _Piece(source, self._cut(linears, at, turned=turned), (linear.out_features, *inner))
            self._add(f"{linear.key}.{suffix}", piece)

    def _cut(self, linears: list[Linear], at: int, *, turned: bool) -> Cut:
        """What takes the rows of one linear out of the fused ones."""
        if self._config.files.grouped and len(linears) == 3:
            return _group_cut(self._config, linears[at].role)
        start = sum(linear.out_features for linear in linears[:at])
        return _row_cut(start, start + linears[at].out_features, turned)

    def _add_stacked(self, source: str, linears: list[Linear], turned: bool) -> None:
        info, config = self._store.info(source), self._config
        outputs, inputs = linears[0].shape
        block = (inputs, outputs) if turned else (outputs, inputs)
        if info.shape not in ((len(linears) * block[0], block[1]), (len(linears), *block)):
            raise FormatError(
                f"{info.path}: tensor {source!r}: found shape {info.shape}, expected {(len(linears) * block[0], block[1])} for this "
                f"config.json's {config.moe.num_experts if config.moe else 0} experts"
            )
        for i, linear in enumerate(linears):
            rows = info.shape[0] // len(linears)
            self._add(f"{linear.key}.weight", _Piece(source, _block_cut(block, turned), linear.shape, (i * rows, (i + 1) * rows)))


Store = TensorStore | ModelStore


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _fused(config: ModelConfig) -> dict[str, list[Linear]]:
    """Full key of each fused matrix -> what it holds."""
    found = {}
    for layer in range(config.num_layers if config.files.fused else 0):
        linears = layer_linears(config, layer)
        for key, roles in config.files.fused:
            found[f"{config.names.layer.format(layer)}.{key}"] = [linears[role] for role in roles]
    return found


def _stacked(config: ModelConfig) -> dict[str, tuple[list[Linear], bool]]:
    """Full name of each tensor that holds one role of all experts -> what it holds, and whether the blocks are turned."""
    found = {}
    for layer in range(config.num_layers if config.files.stacked else 0):
        linears, moe = layer_linears(config, layer), config.experts(layer)
        for key, role, turned in config.files.stacked if moe is not None else ():
            mine = [linear for name, linear in linears.items() if name.partition(".")[0] == role]
            found[f"{config.names.layer.format(layer)}.{key}"] = (mine, turned)
    return found


def _block_cut(block: tuple[int, int], turned: bool) -> Cut:
    return lambda tensor: tensor.view(block).T if turned else tensor.view(block)


def _row_cut(start: int, end: int, turned: bool) -> Cut:
    return lambda tensor: (tensor.T if turned else tensor)[start:end]


def _group_cut(config: ModelConfig, role: str) -> Cut:
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
