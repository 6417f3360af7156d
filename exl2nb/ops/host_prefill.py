"""Prompts through layers whose weights are the CPU's: a layer's tensors are copied to a device as they are, and torch unpacks them there.

The walk over a layer is that of `gpu_prefill`, with the same numbers: an EXL2 matrix becomes fp16 as the format says. Runs on any device,
on the CPU as a reference. Knows nothing about when what is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl2nb.ops import blob as layout
from exl2nb.ops import gpu_prefill
from exl2nb.ops.interpreter import Inputs
from exl2nb.ops.program import Program
from exl2nb.ops.records import Op, ResidualOp

UNPACK_CHUNK_WEIGHTS = 1 << 24  # weights that are unpacked at a time: what is between words and fp16 numbers stays in a GPU's cache


@dataclass(frozen=True)
class Stretch:
    """Consecutive groups of one width. offset: bytes from the start of a tile. units: of 32 rows. unit_groups: int64 `(units,)`.

    shifts: int32 `(codes in a half, 1)`, where they begin.
    """

    bits: int
    offset: int
    first_row: int
    units: int
    unit_groups: Tensor
    shifts: Tensor


@dataclass(frozen=True)
class HostMatrix:
    """A matrix of a blob. data, tables: where they begin, in bytes. rows: int64 `(S,)` on the device, original row of each stored one."""

    kind: int
    outputs: int
    first_output: int
    tiles: int
    tile_bytes: int
    data: int
    tables: int
    groups: int
    flags: int
    rows: Tensor | None
    runs: tuple[Stretch, ...]


@dataclass(frozen=True)
class Packed:
    """A blob of the CPU's layout on a device. memory: uint8 1-D, its bytes, there when it is used."""

    memory: Tensor
    K: int
    N: int
    parts: tuple[HostMatrix, ...]

    @classmethod
    def of(cls, blob: Tensor, memory: Tensor) -> Packed:
        """blob: on the CPU, whose header and groups are read. memory: where its bytes will be."""
        K, parts = layout.read_blob(blob)
        _, N = layout.shape(blob)
        raw = np.frombuffer(blob.numpy(), layout.PART_DTYPE, len(parts), layout.HEADER_DTYPE.itemsize)
        return cls(memory, K, N, tuple(_host_matrix(part, row, memory.device) for part, row in zip(parts, raw)))

    def unpack_into(self, out: Tensor) -> None:
        """The matrix f16 `(K, N)`, rows in original order."""
        for part in self.parts:
            columns = out[:, part.first_output : part.first_output + part.outputs]
            whole = part.outputs == part.tiles * layout.TILE_ROWS
            target = columns if whole else out.new_empty(self.K, part.tiles * layout.TILE_ROWS)
            self._fill(part, target.unflatten(1, (part.tiles, layout.TILE_ROWS)))
            if not whole:
                columns.copy_(target[:, : part.outputs])

    def _fill(self, part: HostMatrix, out: Tensor) -> None:
        """out: f16 `(K, tiles, 16)`."""
        tiles = self.memory[part.data : part.data + part.tiles * part.tile_bytes].view(part.tiles, part.tile_bytes)
        if part.kind not in (layout.EXL2_PART, layout.GPTQ_PART):
            out.copy_(tiles.view(layout.DENSE_DTYPES[part.kind]).view(part.tiles, self.K, layout.TILE_ROWS).transpose(0, 1))
            return
        count = max(1, UNPACK_CHUNK_WEIGHTS // (self.K * layout.TILE_ROWS))
        every_zero, every_step = _unpack_scales(part, tiles, self.memory)
        for first in range(0, part.tiles, count):
            chosen = slice(first, first + count)
            some, place, steps = tiles[chosen], out[:, chosen], every_step[chosen]
            zeros = None if every_zero is None else every_zero[chosen]
            for run in part.runs:
                values, here = _unpack_codes(run, some).half(), run.unit_groups
                values.sub_(1 << run.bits - 1) if zeros is None else values.sub_(zeros[:, here, None, :, None])
                if steps.dtype == torch.float32:
                    values = values.float()
                values.mul_(steps[:, here, None, :, None])  # exact before: rounded once
                rows = values.permute(1, 2, 4, 0, 3).half().reshape(-1, len(some), layout.TILE_ROWS)  # a copy, so that rows are contiguous
                _put_rows(place, rows, part.rows, run, self.K)


def _host_matrix(part: layout.BlobPart, row: Any, device: torch.device) -> HostMatrix:
    runs: list[tuple[int, int, int, list[int]]] = []
    for number, group in enumerate(part.groups):
        bits, offset, first, count = (int(group[name]) for name in ("bits", "offset", "first_row", "rows"))
        units = [number] * (count // layout.ROW_UNIT)
        if runs and runs[-1][0] == bits:
            runs[-1][3].extend(units)
        else:
            runs.append((bits, offset, first, units))
    rows = None if part.perm is None else torch.from_numpy(part.perm.astype(np.int64)).to(device)
    found = tuple(
        Stretch(bits, offset, first, len(units), torch.tensor(units).to(device), _word_shifts(0, bits, 16 // bits, device))
        for bits, offset, first, units in runs
    )
    places = {name: int(row[name]) for name in ("first_output", "tile_bytes", "data", "tables")}
    return HostMatrix(
        part.kind, part.outputs, tiles=len(part.data), groups=len(part.groups), flags=part.flags, rows=rows, runs=found, **places
    )


def _unpack_scales(part: HostMatrix, tiles: Tensor, memory: Tensor) -> tuple[Tensor | None, Tensor]:
    """Zeros, None where they are the middle of the codes, and steps of every group: `(tiles, G, 16)`."""
    count, groups = len(tiles), part.groups
    if part.kind == layout.EXL2_PART:
        table = memory[part.tables : part.tables + groups * 64].view(torch.float32).view(groups, 16).half()  # they are fp16 numbers
        nibbles = tiles[:, : groups * layout.SCALE_BYTES].reshape(count, groups, layout.SCALE_BYTES)
        index = torch.stack([nibbles & 15, nibbles >> 4], -1).flatten(2).long()
        return None, table.expand(count, -1, -1).gather(2, index)
    wide = torch.float32 if part.flags & layout.HAS_WIDE_SCALES else torch.float16
    at = groups * layout.TILE_ROWS * wide.itemsize
    steps = tiles[:, :at].contiguous().view(wide).view(count, groups, layout.TILE_ROWS)
    if not part.flags & layout.HAS_ZEROS:
        return None, steps
    zeros = tiles[:, at : at + groups * layout.TILE_ROWS * 2].contiguous().view(torch.int16).view(count, groups, layout.TILE_ROWS)
    return zeros, steps


def _unpack_codes(run: Stretch, tiles: Tensor) -> Tensor:
    """Codes int16 `(tiles, units, 16 pairs, 16 columns, 2 rows)`; csrc/format/blob.h has the drawing. Both rows of a pair at once."""
    bits, count, device = run.bits, len(tiles), tiles.device
    data = tiles[:, run.offset : run.offset + run.units * bits * 64]
    words = data.view(torch.int32).unflatten(1, (run.units, bits, layout.TILE_ROWS))
    pairs = torch.empty(count, run.units, 16, layout.TILE_ROWS, dtype=torch.int32, device=device)
    each = 16 // bits
    main = pairs[:, :, : bits * each].unflatten(2, (bits, each))
    torch.bitwise_right_shift(words.unsqueeze(3), run.shifts, out=main)
    main.bitwise_and_(_both_halves((1 << bits) - 1))
    if bits in (3, 5):  # a bit of the last pair in every word
        pairs[:, :, 15] = ((words >> 15) & _both_halves(1)).bitwise_left_shift_(_word_shifts(0, 1, bits, device)).sum(2, dtype=torch.int32)
    if bits == 6:
        high = ((words[:, :, 4:].unsqueeze(3) >> _word_shifts(12, 2, 2, device)) & _both_halves(3)).flatten(2, 3)
        pairs[:, :, 12:] = ((words[:, :, :4] >> 12) & _both_halves(15)) | (high << 4)
    return pairs.view(torch.int16).unflatten(3, (layout.TILE_ROWS, 2))


def _word_shifts(first: int, step: int, number: int, device: torch.device) -> Tensor:
    return torch.arange(first, first + step * number, step, dtype=torch.int32, device=device).unsqueeze(1)


def _both_halves(mask: int) -> int:
    """For both halves of a word."""
    return mask << 16 | mask


def _put_rows(out: Tensor, values: Tensor, rows: Tensor | None, run: Stretch, K: int) -> None:
    """values: `(rows, tiles, 16)` of stored rows."""
    last = run.first_row + run.units * layout.ROW_UNIT
    if rows is None:
        out[run.first_row : min(last, K)] = values[: K - run.first_row]
        return
    places = rows[run.first_row : last]
    if len(rows) > K:  # padding rows of GPTQ
        values, places = values[places < K], places[places < K]
    out.index_copy_(0, places, values)


# ---- a layer


def move_steps(op: Op, move: Callable[[Tensor], Tensor]) -> Op:
    """An op with tensors elsewhere, blobs as `Packed`. move: gives the place of a tensor of the CPU."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Packed.of(value, move(value)) if value.dtype == torch.uint8 else move(value)
        return tuple(of(one) for one in value) if isinstance(value, (tuple, list)) else value

    return replace(op, **{field.name: of(getattr(op, field.name)) for field in fields(op) if field.init})


class LayerBackend(gpu_prefill.GpuBackend):
    """The ops of a layer that `move_steps` gave, on any device; on the CPU as a reference.

    Args:
        room: for the largest matrix f16, used by one layer after the other. The others as in `GpuBackend`; pools by layer.
    """

    def __init__(
        self,
        program: Program,
        room: Tensor,
        inputs: Inputs,
        sequences: gpu_prefill.Sequences | None = None,
        k_pools: Mapping[int, Tensor] | None = None,
        v_pools: Mapping[int, Tensor] | None = None,
    ) -> None:
        sequences = sequences or gpu_prefill.Sequences([], [])
        super().__init__(program, inputs, sequences, k_pools or {}, v_pools or {})  # pyright: ignore[reportArgumentType] - only looked up
        self._unpacked_half = room

    def add(self, x: Tensor, y: Tensor, op: ResidualOp) -> Tensor:
        """As in `gpu_prefill`, with the CPU too."""
        if x.device.type != "cpu":
            return super().add(x, y, op)
        z = self.product(y.half(), op.blob, op.bias)
        return x.add_(z if op.norm is None else torch.nn.functional.rms_norm(z, (z.shape[1],), op.norm, op.eps), alpha=op.scale)

    def product(self, x: Tensor, blob: Tensor | Packed, bias: Tensor | None, *, half: bool = False) -> Tensor:
        """As in `gpu_prefill`, for any number of rows."""
        weight = self.weight(blob, x.device)
        if x.device.type == "cpu":
            y = x.float() @ weight.float()
            y = y.half() if half else y
        else:
            y = torch.mm(x, weight) if half else torch.mm(x, weight, out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)

    def weight(self, blob: Tensor | Packed, device: torch.device) -> Tensor:
        """The matrix of a `Packed`, or of a blob of a streamed layer on the GPU."""
        if isinstance(blob, Tensor):
            return super().weight(blob, device)
        weight = self.room(blob.K, blob.N, device)
        blob.unpack_into(weight)
        return weight
