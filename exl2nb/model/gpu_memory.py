"""Where a model's weights lie on the GPU: in one tensor, whose size follows from the headers of the files. Knows no kernels.

A tensor for each matrix would leave holes: torch takes segments of 2 or 20 MiB from the device and what lay beside a matrix while it was
packed is lost between others. With one tensor, `kept_bytes` is what a model takes, for the plan before it is loaded and for the loader.
Layouts are those of csrc/cuda/blob/blob.h and layout.cu, followed step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from exl2nb.model.config import ModelConfig
from exl2nb.model.inspect import Inspection, Matrix
from exl2nb.model.layout import Linear, layer_linears, modules, vectors

ALIGN = 256  # where sections of a blob begin
TILE, UNIT, BLOCK, WARPS, SLOT, SET = 16, 64, 32, 16, 2688, 64  # kStripColumns, kUnitRows, rows of a half unit, kWarps, kSlot, kGptqSet
ITEM_UNITS = 10  # kItemUnits


class Arena:
    """One tensor on a device that takes in others, one behind the other.

    Args:
        size: bytes. device: where. memory: uint8, in place of new memory of that size.
    """

    def __init__(self, size: int, device: str, memory: Tensor | None = None) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device) if memory is None else memory
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """The same numbers inside the arena; the tensor itself where there is no room for it."""
        start, size = self._used, tensor.nbytes
        if start + size > self._memory.numel():
            return tensor
        self._used = min(self._memory.numel(), start + aligned(size))
        place = self._memory[start : start + size].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        return place


def aligned(size: int) -> int:
    """Rounded up to where the next tensor may begin."""
    return -(-size // ALIGN) * ALIGN


def kept_bytes(config: ModelConfig, found: Inspection) -> int:
    """Bytes of a model's weights on the GPU, as the loader keeps them; a few thousandths too much where matrices share a permutation."""
    return sum(map(aligned, _kept(config, {matrix.key: matrix for matrix in found.matrices}, found)))


def _kept(config: ModelConfig, matrices: dict[str, Matrix], found: Inspection) -> Iterator[int]:
    """Every tensor's bytes."""
    names, routers = config.names, ("router", "shared_router")
    routed = {f"{names.at(layer, part)}.weight" for layer in range(config.num_layers) for part in routers if config.experts(layer)}
    tables = (names.embed, names.positions)
    for name, shape in vectors(config).items():
        key = name.rpartition(".")[0]
        if name in routed:
            yield blob_bytes([_dense(key, shape[1], shape[0])])
        elif key in tables:
            yield matrices[key].nbytes if key in matrices else 2 * prod(shape)
        else:
            yield 4 * prod(shape)
    for layer in range(config.num_layers):
        if config.parallel and config.pre_norm:  # attention and MLP each hold the norm that they share
            yield from [4 * config.hidden_size] * (2 if config.norm_bias else 1)
        roles = layer_linears(config, layer)
        for module in modules(roles):
            last = [role for role in module if role == "o" or role.startswith(("down", "shared_down"))]
            for stack in ([role for role in module if role not in last], last):
                yield blob_bytes([_matrix(matrices, roles[role]) for role in stack])
                yield sum(4 * roles[role].out_features for role in stack if roles[role].bias)
    head = found.head or found.embedding
    yield blob_bytes([head if head is not None else _dense("", config.hidden_size, config.vocab_size)])


def _matrix(matrices: dict[str, Matrix], linear: Linear) -> Matrix:
    return matrices.get(linear.key) or _dense(linear.key, linear.in_features, linear.out_features)


def _dense(key: str, in_features: int, out_features: int) -> Matrix:
    return Matrix(key, None, key, "float16", in_features, out_features, (), 16.0, 2 * in_features * out_features)


# ---- blobs


def blob_bytes(parts: Sequence[Matrix]) -> int:
    """Bytes of the blob of matrices with one input, side by side; each with a permutation of its own."""
    if not parts:
        return 0
    plans = [_strip(part.format if part.format in ("exl2", "gptq") else "", part.groups, part.in_features) for part in parts]
    coded, width = any(part.groups for part in parts), parts[0].in_features
    stored = max(width, *(sum(-(-rows // BLOCK) * BLOCK for _, rows in part.groups) for part in parts)) if coded else 0
    items, units = sum(plan.items for plan in plans), sum(plan.units for plan in plans)
    image = 16 * items + (units + 3) // 4 * 16 + 48 * len(parts)
    perms = 4 * len(parts) * (stored + width) if coded else 0
    strips = sum(aligned(-(-part.out_features // TILE) * plan.size) for part, plan in zip(parts, plans))
    return aligned(64 + 128 * len(parts)) + aligned(perms) + aligned(image) + strips


class _Strip(NamedTuple):
    """Of one matrix: bytes of sixteen columns, and what they are cut into."""

    size: int
    items: int
    units: int


class _Piece(NamedTuple):
    """What no warp shares with another: a unit, or the two units of a scale set."""

    bits: int
    units: int
    one: bool
    lone: bool
    scales: int

    def size(self, count: int) -> int:
        """Bytes of so many of them in one item."""
        codes = count * self.units * self.bits * 128
        if self.bits == 16:
            return codes
        if self.scales:
            return codes + count * (1 if self.one else 2) * SET
        return codes + (count * (8 if self.one else 16) + 15) // 16 * 16


@lru_cache(maxsize=4096)
def _strip(kind: str, groups: tuple[tuple[int, int], ...], in_features: int) -> _Strip:
    """kind: "exl2", "gptq" or "" for plain numbers."""
    if not kind:
        pieces = [_Piece(16, 1, True, False, 0)] * -(-in_features // UNIT)
    else:
        blocks = [(bits, number) for number, (bits, rows) in enumerate(groups) for _ in range(0, rows, BLOCK)]
        pieces = _exl2_pieces(blocks) if kind == "exl2" else _gptq_pieces(blocks)
    size, items = _items(pieces)
    return _Strip(size, items, sum(piece.units for piece in pieces))


def _exl2_pieces(blocks: list[tuple[int, int]]) -> list[_Piece]:
    pieces, at = [], 0
    while at < len(blocks):
        lone = at + 1 == len(blocks) or blocks[at + 1][0] != blocks[at][0]
        pieces.append(_Piece(blocks[at][0], 1, at % 2 == 0 and not lone and blocks[at + 1] == blocks[at], lone, 0))
        at += 1 if lone else 2
    return pieces


def _gptq_pieces(blocks: list[tuple[int, int]]) -> list[_Piece]:
    pieces, at = [], 0
    while at < len(blocks):
        two, four = (at + count <= len(blocks) and blocks[at + count - 1] == blocks[at] for count in (2, 4))
        pieces.append(_Piece(blocks[at][0], 2 if four else 1, two, at + 1 == len(blocks), 2 if four else 1))
        at += 4 if four else 2
    return pieces


def _items(pieces: list[_Piece]) -> tuple[int, int]:
    """Bytes and number of the items: equal neighbours in as few as hold them, and then so many more that the warps have equally many."""
    runs: list[_Run] = []
    for piece in pieces:
        if runs and piece == runs[-1].piece and not piece.lone:
            runs[-1].pieces += 1
        else:
            runs.append(_Run(piece))
    for run in runs:
        run.items = -(-run.pieces // run.most)
    for _ in range(-sum(run.items for run in runs) % WARPS):
        largest = max(runs, key=lambda run: run.size if run.items < run.pieces else 0)
        if largest.items == largest.pieces:
            break
        largest.items += 1
    return sum(size for run in runs for size in run.sizes()), sum(run.items for run in runs)


class _Run:
    """Equal pieces that follow one another."""

    def __init__(self, piece: _Piece) -> None:
        self.piece, self.pieces, self.items = piece, 1, 1

    @property
    def most(self) -> int:
        """Pieces of an item."""
        count = 1
        while (count + 1) * self.piece.units <= ITEM_UNITS and self.piece.size(count + 1) <= SLOT:
            count += 1
        return count

    @property
    def size(self) -> int:
        """Bytes of its largest item."""
        return self.piece.size(-(-self.pieces // self.items))

    def sizes(self) -> Iterator[int]:
        """Bytes of every item."""
        for item in range(self.items):
            yield self.piece.size((item + 1) * self.pieces // self.items - item * self.pieces // self.items)
