"""Sampling on the device, as the CUDA engine runs it: from logits to the next step's inputs without the host."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import define_op

MAX_ALTERNATIVES = 20
"""Alternatives that can be reported."""
_ROW_FORMAT = struct.Struct("<6fiI2Q")
ROW_BYTES, pack_row = _ROW_FORMAT.size, _ROW_FORMAT.pack
"""Size of a row's settings; their bytes from numbers in the order of `Row`, where `report` stands for `top` and `columns`."""
_U64_MASK = 2**64 - 1
_SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row's settings (SampleRow of `cuda/sampling/sample.h`), neutral by default.

    top: alternatives to report. columns: ids from here on are never drawn; 0 = off. counter: of the draw.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: int = 0
    top: int = 0
    columns: int = 0
    seed: int = 0
    counter: int = 0

    def pack(self) -> bytes:
        """The 48 bytes that the kernel reads."""
        *numbers, top, columns, seed, counter = (getattr(self, name) for name in self.__dataclass_fields__)
        return _ROW_FORMAT.pack(*numbers, pack_report(top, columns), seed, counter)

    @classmethod
    def unpack(cls, packed: bytes) -> Row:
        """From the bytes that the kernel reads."""
        *numbers, both, seed, counter = _ROW_FORMAT.unpack(packed)
        return cls(**dict(zip(cls.__dataclass_fields__, (*numbers, both & 0xFF, both >> 8, seed, counter))))


def pack_report(top: int, columns: int) -> int:
    """`Row.top` and `Row.columns` in one number: 8 and 24 bits."""
    return top | columns << 8


def pack_rows(rows: list[Row]) -> Tensor:
    """Settings as uint8 `(R, 48)`."""
    return torch.frombuffer(bytearray(b"".join(row.pack() for row in rows)), dtype=torch.uint8).view(len(rows), _ROW_FORMAT.size)


def pack_cuts(rows: list[list[float]], columns: int = 0) -> bytes:
    """Settings of greedy rows and rows with cuts, as `ops.draw_rows` takes them, for the kernel; each with the same random number.

    columns: as in `Row`, for all rows.
    """
    packed, reported = list[bytes](), pack_report(0, columns)
    for temperature, top_k, top_p, min_p, uniform in rows:
        seed = _seed_of(uniform) if temperature else 0
        packed.append(pack_row(temperature, top_p, min_p, 1.0, 0.0, 0.0, int(top_k), reported, seed, 0))
    return b"".join(packed)


def _seed_of(uniform: float) -> int:
    """A seed whose first random number is `uniform`: the way back from it, as every step of `_draw_row` can be undone."""
    return _unmix_bits((_unmix_bits(int(uniform * 2.0**53) << 11) - _SEED_STRIDE) & _U64_MASK)


def _mix_bits(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64_MASK
    return z ^ (z >> 31)


def _unmix_bits(z: int) -> int:
    z = ((z ^ (z >> 31) ^ (z >> 62)) * pow(0x94D049BB133111EB, -1, 1 << 64)) & _U64_MASK
    z = ((z ^ (z >> 27) ^ (z >> 54)) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & _U64_MASK
    return z ^ (z >> 30) ^ (z >> 60)


def _apply_penalties(x: Tensor, row: Row, counts: Tensor | None) -> Tensor:
    if counts is None:
        return x
    bits = counts.to(torch.int32)
    seen, times = bits != 0, (bits & 0x7FFF).double()
    y = torch.where(seen, torch.where(x < 0, x * row.repetition_penalty, x / row.repetition_penalty), x)
    y = torch.where(times > 0, y - row.presence_penalty, y)
    return y - (times * row.frequency_penalty).float()


def _draw_row(z: Tensor, row: Row) -> int:
    uniform = (_mix_bits((_mix_bits(row.seed) + (row.counter + 1) * _SEED_STRIDE) & _U64_MASK) >> 11) * 2.0**-53
    return reference.draw(z, row.temperature, row.top_k, row.top_p, row.min_p, uniform)


def _sample_reference(
    logits: Tensor, params: Tensor, counts: Tensor | None, step: Tensor | None, ids: Tensor | None, positions: Tensor | None,
    context_lens: Tensor | None, slots: Tensor | None, block_table: Tensor | None, ring: int, pdl: bool,
    bias: Tensor | None = None, into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    results = torch.zeros(ring, len(logits), 4, dtype=torch.int32) if into is None else into
    top_ids = torch.full((len(logits), MAX_ALTERNATIVES), -1, dtype=torch.int32)
    top_logprobs = torch.full((len(logits), MAX_ALTERNATIVES), float("-inf"))
    for r, x in enumerate(logits):
        row = Row.unpack(bytes(params[r].tolist()))
        fine = bool(x.max().isfinite())
        z = _apply_penalties(x, row, None if counts is None else counts[r])
        z = z if bias is None else z + bias[r]
        token = _draw_row(z[: row.columns] if row.columns else z, row) if fine else 0
        logprobs = x.log_softmax(0)
        at = 0 if step is None else int(step[r])
        rank, logprob = int((x > x[token]).sum()) + 1 if fine else 1, logprobs[token : token + 1].view(torch.int32)
        results[at % ring, r] = torch.tensor([token if fine else -1, rank, int(logprob), at], dtype=torch.int32)
        if step is not None:
            step[r] += 1
        if fine and row.top:
            best = (-x).argsort(stable=True)[: row.top]
            top_ids[r, : row.top], top_logprobs[r, : row.top] = best.int(), logprobs[best]
        params[r, 40:48] = torch.tensor(list(struct.pack("<Q", (row.counter + 1) & _U64_MASK)), dtype=torch.uint8)
        if counts is not None and fine and int(counts[r, token]) & 0x7FFF != 0x7FFF:
            counts[r, token] += 1
        if context_lens is None or context_lens[r] > 0:
            _advance_row(r, token, ids, positions, context_lens, slots, block_table)
    return results if into is None else results[:0].clone(), top_ids, top_logprobs


def _advance_row(
    r: int, token: int, ids: Tensor | None, positions: Tensor | None, lens: Tensor | None, slots: Tensor | None, table: Tensor | None
) -> None:
    if ids is not None:
        ids[r] = token
    if lens is not None:
        lens[r] += 1
    if positions is None:
        return
    positions[r] += 1
    if slots is not None and table is not None:
        page, offset = divmod(int(positions[r]), 256)
        slots[r] = table[r, page] * 256 + offset if page < table.shape[1] else -1


def _sample_fake(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    R = logits.shape[0]
    new = logits.new_empty
    ring = 0 if rest[11:] and rest[11] is not None else rest[8]
    return new(ring, R, 4, dtype=torch.int32), new(R, MAX_ALTERNATIVES, dtype=torch.int32), new(R, MAX_ALTERNATIVES)  # type: ignore[arg-type, call-overload]


sample_rows = define_op(
    "sample_rows(Tensor logits, Tensor(a!) params, Tensor(b!)? counts, Tensor(c!)? step, Tensor(d!)? ids, Tensor(e!)? positions, "
    "Tensor(f!)? context_lens, Tensor(g!)? slots, Tensor? block_table, int ring, bool pdl, Tensor? bias=None, "
    "Tensor(h!)? into=None) -> (Tensor, Tensor, Tensor)",
    fake=_sample_fake,
    reference=_sample_reference,
)
"""One token for each row of logits f32 `(R, V)`: `csrc/cuda/sampling/sample.h`.

params: `pack_rows`, counters move on. counts: int16 `(R, V)`, how often each token was generated, lowest number (-32768) added for tokens
of the prompt; the drawn one is counted. bias: f32 `(R, V)`, added after penalties; -inf takes a token out. step, ids, positions,
context_lens, slots: int32 `(R,)`, updated in place. Returns results int32 `(ring, R, 4)`: id (-1: the row has no distribution), rank, bits
of the log probability, step; written at step % ring; then ids and log probabilities of the most probable tokens, `(R, 20)` each.
into: pinned memory of the host for the results, which are then returned empty; synchronise with the stream before reading it.
"""
