"""GPTQ with EXL2's scales: one matrix, quantised with error compensation. Knows nothing of models, files or where Hessians come from.

On a GPU in blocks of rows: kernels inside a block, one matrix product for all later rows. Columns are independent except for a
group's shared maximum, so several ways to cut one matrix into groups ("options") are more columns of the same problem: measuring every
width is one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from exl2nb.ops import _load, bf16x3
from exl2nb.ops._library import REFERENCE_OPS, TORCH_LIBRARY, check_argument, define_op, dynamic_size

SCALE_GRID_STEPS = 16  # as in csrc/cpu/gptq.h
SCALE_CANDIDATES = 24
CODE_SPAN = 4
_MIN_SCALE_FACTOR = 0.5
_MAX_SCALE_FACTOR = 1.3


class Quantized(NamedTuple):
    """Codes uint8 `(K, N)` in stored order, scale_index uint8 `(G, N)`, scale_max f16 `(G,)`, loss f32 `(G, N)`."""

    codes: Tensor
    scale_index: Tensor
    scale_max: Tensor
    loss: Tensor


def _gptq_quantize(
    weight: Tensor, factor: Tensor, column_weight: Tensor, groups: Tensor, coupling: Tensor | None = None, spread: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = groups.view(-1, 2).tolist()
    total = sum(rows for _, rows in table)
    check_argument(total == weight.shape[0], "gptq_quantize", "rows of all groups", groups.tolist(), f"{weight.shape[0]} in all")
    check_argument((coupling is None) == (spread is None), "gptq_quantize", "coupling and spread", "one of them", "both or neither")
    w, row_weight = weight.float().clone(), factor.diagonal().float().square().reciprocal()
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    indices, maxima, losses, first = [], [], [], 0
    for bits, rows in table:
        part = slice(first, first + rows)
        index, scale_max = _choose_scales(w[part], row_weight[part], bits, column_weight)
        step = _scale_steps(index, _scale_unit(scale_max))
        codes[part], loss, _ = _quantize_rows(w, factor, first, first + rows, w.shape[0], bits, step, coupling, spread)
        indices.append(index.to(torch.uint8))
        maxima.append(scale_max)
        losses.append(loss)
        first += rows
    return codes, torch.stack(indices), torch.stack(maxima).half(), torch.stack(losses)


def _quantize_rows(
    w: Tensor, factor: Tensor, first: int, end: int, stop: int, bits: int, step: Tensor, coupling: Tensor | None, spread: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise rows [first, end) of w, compensate what follows up to row `stop`: codes `(rows, N)`, loss `(N,)`, errors `(rows, N)`."""
    low = -(1 << (bits - 1))
    codes, errors, loss = [], [], torch.zeros_like(step)
    for r in range(first, end):
        if coupling is None or spread is None:
            q = _nearest_codes(w[r], step, bits)
            left = hat_error = w[r] - (q * step).half().float()
        else:
            q, left, hat_error = _quantize_coupled_row(w[r], step, bits, coupling, spread)
        error = hat_error / factor[r, r]
        w[r + 1 : end] -= torch.outer(factor[r, r + 1 : end], error)
        codes.append((q - low).to(torch.uint8))
        errors.append(error)
        loss += (left / factor[r, r]).square()
    error = torch.stack(errors)
    w[end:stop] -= factor[first:end, end:stop].T @ error
    return torch.stack(codes), loss, error


def _nearest_codes(w: Tensor, step: Tensor, bits: int) -> Tensor:
    return (w / step).clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).round()


def _quantize_coupled_row(row: Tensor, step: Tensor, bits: int, coupling: Tensor, spread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One row, column by column, each column's error pushed onto the columns of its block that are still to come.

    Returns:
        Levels, what each column was off from its own target times `spread`, and the row minus what a loader computes.
    """
    size = coupling.shape[-1]
    target, q = row.clone().view(-1, size), torch.empty_like(row).view(-1, size)
    hat, steps, left = torch.empty_like(q), step.view(-1, size), torch.empty_like(q)
    for m in range(size):
        q[:, m] = _nearest_codes(target[:, m], steps[:, m], bits)
        hat[:, m] = (q[:, m] * steps[:, m]).half().float()
        left[:, m] = target[:, m] - hat[:, m]
        target -= left[:, m, None] * coupling[:, m]
    return q.flatten(), left.flatten() * spread, row - hat.flatten()


def _scale_unit(scale_max: Tensor) -> Tensor:
    return (scale_max.half().float() / 256).half().float()


def _scale_steps(index: Tensor, unit: Tensor) -> Tensor:
    """Steps as the loader computes them: fp16((index + 1)^2 * fp16(max / 256)), as f32."""
    return ((index.float() + 1).square() * unit).half().float()


def _grid_loss(w: Tensor, row_weight: Tensor, bits: int, step: Tensor) -> Tensor:
    """`sum_r row_weight[r] * (w - grid(w))^2` per column, w `(rows, N)`, step `(N,)`."""
    q = (w / step.clamp_min(1e-30)).clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).round()
    return ((w - q * step).square() * row_weight[:, None]).sum(0)


def _choose_scales(w: Tensor, row_weight: Tensor, bits: int, column_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scale codes `(N,)` (0..15) and the shared maximum of one group."""
    top = w.abs().amax(0) / ((1 << (bits - 1)) - 0.5)
    low = 0.35 if bits <= 3 else 0.45 if bits == 4 else 0.6
    factors = low + (1.1 - low) * torch.arange(SCALE_GRID_STEPS, device=w.device) / (SCALE_GRID_STEPS - 1)
    tried = torch.stack([_grid_loss(w, row_weight, bits, top * f) for f in factors])
    best = top * factors[tried.argmin(0)]
    largest = 65504.0 / (1 << (bits - 1)) * 0.999
    spread = _MIN_SCALE_FACTOR * (_MAX_SCALE_FACTOR / _MIN_SCALE_FACTOR) ** (
        torch.arange(SCALE_CANDIDATES, device=w.device) / (SCALE_CANDIDATES - 1)
    )
    maxima = (best.max() * spread).clamp(2.0**-16, largest).half().float()
    total, codes = [], []
    for candidate in maxima:
        start = (best / _scale_unit(candidate)).sqrt().floor()
        options = torch.stack([(start + j - 1).clamp(1, 16) for j in range(CODE_SPAN)])
        losses = torch.stack([_grid_loss(w, row_weight, bits, _scale_steps(k - 1, _scale_unit(candidate))) for k in options])
        pick = losses.argmin(0, keepdim=True)
        codes.append(options.gather(0, pick)[0] - 1)
        total.append((losses.gather(0, pick)[0].double() * column_weight.double()).sum())
    winner = int(torch.stack(total).argmin())
    return codes[winner], maxima[winner]


def _fake_quantize(weight: Tensor, factor: Tensor, column_weight: Tensor, groups: Tensor, *_: object) -> tuple[Tensor, ...]:
    (k, n), g = weight.shape, groups.shape[0] // 2
    new = weight.new_empty
    return new(k, n, dtype=torch.uint8), new(g, n, dtype=torch.uint8), new(g, dtype=torch.float16), new(g, n, dtype=torch.float32)


_gptq_op = define_op(
    "gptq_quantize(Tensor weight, Tensor factor, Tensor column_weight, Tensor groups, Tensor? coupling=None, Tensor? spread=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_quantize,
    reference=_gptq_quantize,
)


def gptq_quantize(
    weight: Tensor,
    factor: Tensor,
    column_weight: Tensor,
    groups: Tensor,
    coupling: Tensor | None = None,
    spread: Tensor | None = None,
) -> Quantized:
    """Quantise one matrix to EXL2 codes, row by row, pushing each row's error onto the rows that are still to come.

    Per group of rows the shared maximum is swept over representable fp16 values; for each, every column takes the best scale code under
    `sum_r (W - What)^2 / U_rr^2`, GPTQ's own local loss. Codes are chosen against the rounded fp16 steps that a loader computes.

    With a coupling, a row is quantised column by column, each column's error pushed onto the columns of its block that are still to come:
    the same greedy search, for the loss `tr(G dW^T H dW)` with G = inv(V^T V) over the outputs.

    Args:
        weight: f32 `(K, N)`, rows in stored (permuted) order.
        factor: f32 `(K, K)`, upper Cholesky factor U of the inverse damped Hessian in the same order: `inv(H) = U^T U`.
        column_weight: f32 `(N,)`, how much each column's loss counts when the columns of a group choose their shared maximum.
        groups: int32 `(2 * G,)`, pairs (bits, rows), top to bottom.
        coupling: f32 `(N / B, B, B)`, strictly upper V[m, j] / V[m, m] of each block of B outputs, B a multiple of 16.
        spread: f32 `(N,)`, 1 / V[m, m].

    Returns:
        Quantized. `loss[g, n]` is what group g adds to `dW_n^T H dW_n` (H damped), where dW = weight - what a loader will compute; with a
        coupling, column n's share of what it adds to `tr(G dW^T H dW)`.

    Cost: about 110 passes over the weights, and K * N * (K + B) / 2 multiply-adds. Source: Frantar et al., 2022; both sides' feedback as in
    Tseng et al., 2025 (YAQA).
    """
    return Quantized(*_gptq_op(weight, factor, column_weight, groups, coupling, spread))


BLOCK_ROWS = 128
SPAN_ROWS = 512  # whose errors update the later rows in one product: more rows mean fewer passes over the matrix
MAX_OPTIONS = 16  # as in csrc/cuda/gptq/gptq.h
COPIES_BYTES = 1 << 30  # of all options' weights at a time
Table = Sequence[tuple[int, int]]


def _gptq_block(
    w: Tensor,
    factor: Tensor,
    column_weight: Tensor,
    groups: Tensor,
    first: int,
    coupling: Tensor | None = None,
    spread: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (options, count, _), columns = groups.shape, column_weight.shape[0]
    rows = [int(part[:, 1].sum()) for part in groups]
    check_argument(len(set(rows)) == 1 and rows[0] > 0, "gptq_block", "rows of the options", rows, "the same for all, and more than 0")
    check_argument(first + rows[0] <= w.shape[0], "gptq_block", "rows of the block", (first, first + rows[0]), f"at most {w.shape[0]}")
    end, copies = first + rows[0], w.view(w.shape[0], options, columns)
    codes = torch.empty(rows[0], options, columns, dtype=torch.uint8, device=w.device)
    index = torch.zeros(count, options, columns, dtype=torch.uint8, device=w.device)
    maxima, loss, errors = w.new_zeros(count, options), w.new_zeros(count, options, columns), w.new_empty(rows[0], options, columns)
    row_weight = factor.diagonal().square().reciprocal()
    for p, table in enumerate(groups.tolist()):
        own, a = copies[:, p].clone(), first
        for s, (bits, length) in enumerate(table):
            if not length:
                continue
            part = slice(a, a + length)
            code, maxima[s, p] = _choose_scales(own[part], row_weight[part], bits, column_weight)
            made, loss[s, p], error = _quantize_rows(
                own, factor, a, a + length, end, bits, _scale_steps(code, _scale_unit(maxima[s, p])), coupling, spread
            )
            place = slice(a - first, a - first + length)
            index[s, p], codes[place, p], errors[place, p] = code.to(torch.uint8), made, error
            a += length
        copies[first:end, p] = own[first:end]
    return codes.flatten(1), index.flatten(1), maxima.half(), loss.flatten(1), errors.flatten(1)


def _fake_block(w: Tensor, factor: Tensor, column_weight: Tensor, groups: Tensor, *_: object) -> tuple[Tensor, ...]:
    columns, new = w.shape[1], w.new_empty
    rows, (options, count) = dynamic_size(), groups.shape[:2]
    codes, index = new(rows, columns, dtype=torch.uint8), new(count, columns, dtype=torch.uint8)
    return codes, index, new(count, options, dtype=torch.float16), new(count, columns), new(rows, columns)


_block_op = define_op(
    "gptq_block(Tensor(a!) w, Tensor factor, Tensor column_weight, Tensor groups, int first, Tensor? coupling=None, Tensor? spread=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_block,
    reference=_gptq_block,
)
"""Rows [first, first + R) of `gptq_quantize` for P options: w f32 `(K, P * N)`, in these rows changed; groups int32 `(P, S, 2)` on the CPU,
(bits, rows), rows 0 where an option has fewer. Returns codes `(R, P * N)`, scale_index `(S, P * N)`, scale_max f16 `(S, P)`, loss
`(S, P * N)` and the compensated errors f32 `(R, P * N)`, which change the later rows: `w[r] -= factor[block, r] @ errors`."""


def common_blocks(tables: Sequence[Table]) -> Iterator[tuple[int, int, Tensor]]:
    """Cut the rows where every option has a group's end: first row, end, groups int32 `(P, S, 2)` of the options in between.

    Blocks are the shortest of at least BLOCK_ROWS rows, the last one shorter.
    """
    ends = [list(accumulate(rows for _, rows in table)) for table in tables]
    common = sorted(set.intersection(*map(set, ends)))
    first, places = 0, [0] * len(tables)
    for end in common:
        if end - first < BLOCK_ROWS and end != common[-1]:
            continue
        parts = []
        for p, table in enumerate(tables):
            stop = ends[p].index(end, places[p]) + 1
            parts.append(list(table[places[p] : stop]))
            places[p] = stop
        longest = max(map(len, parts))
        yield first, end, torch.tensor([part + [(0, 0)] * (longest - len(part)) for part in parts], dtype=torch.int32)
        first = end


def _block_spans(tables: Sequence[Table]) -> Iterator[list[tuple[int, int, Tensor]]]:
    """The `common_blocks`, as few of them at a time as have SPAN_ROWS rows."""
    span: list[tuple[int, int, Tensor]] = []
    for block in common_blocks(tables):
        span.append(block)
        if span[-1][1] - span[0][0] >= SPAN_ROWS:
            yield span
            span = []
    if span:
        yield span


def _quantize_blocks(
    weight: Tensor, factor: Tensor, column_weight: Tensor, tables: Sequence[Table], coupling: Tensor | None, spread: Tensor | None
) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Per block: its groups, and codes, scale_index, scale_max and loss of all options."""
    w = weight.repeat(1, len(tables))
    for span in _block_spans(tables):
        begin, until, errors_of_span = span[0][0], span[-1][1], []
        for first, end, groups in span:
            *found, errors = _block_op(w, factor, column_weight, groups, first, coupling, spread)
            if end < until:
                w[end:until].addmm_(factor[first:end, end:until].T, errors, alpha=-1)
            errors_of_span.append(errors)
            yield groups, tuple(found)  # type: ignore[misc]
        if until < len(w):
            bf16x3.subtract_product(w[until:], factor[begin:until, until:].T, torch.cat(errors_of_span))


def quantize_in_blocks(
    weight: Tensor, factor: Tensor, column_weight: Tensor, groups: Tensor, coupling: Tensor | None = None, spread: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gptq_quantize` by way of `gptq_block`: what a GPU runs."""
    table = [(int(bits), int(rows)) for bits, rows in groups.view(-1, 2).tolist()]
    _check_tables([table], weight.shape[0])
    found = [parts for _, parts in _quantize_blocks(weight, factor, column_weight, [table], coupling, spread)]
    codes, index, maxima, loss = (torch.cat(parts) for parts in zip(*found))
    return codes, index, maxima[:, 0], loss


def _losses_in_blocks(weight: Tensor, factor: Tensor, column_weight: Tensor, groups: Tensor, counts: Sequence[int]) -> Tensor:
    tables = _split_groups(groups, counts)
    _check_tables(tables, weight.shape[0])
    at_once = max(1, min(MAX_OPTIONS, COPIES_BYTES // max(1, weight.nbytes)))
    at_once = math.ceil(len(tables) / math.ceil(len(tables) / at_once))
    made: list[Tensor] = []
    for start in range(0, len(tables), at_once):
        own = tables[start : start + at_once]
        parts: list[list[Tensor]] = [[] for _ in own]
        for table, (_, _, _, loss) in _quantize_blocks(weight, factor, column_weight, own, None, None):
            split = loss.view(loss.shape[0], len(own), -1)
            for p, used in enumerate((table[:, :, 1] > 0).sum(1).tolist()):
                parts[p].append(split[:used, p])
        made += [torch.cat(part) for part in parts]
    return torch.cat(made)


def _check_tables(tables: Sequence[Table], in_features: int) -> None:
    for table in tables:
        good = sum(rows for _, rows in table) == in_features and all(rows > 0 and 2 <= bits <= 8 for bits, rows in table)
        check_argument(good, "gptq_quantize", "rows of all groups", list(table), f"{in_features} in all, of 2 to 8 bits")


def _split_groups(groups: Tensor, counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    pairs = [(int(bits), int(rows)) for bits, rows in groups.view(-1, 2).tolist()]
    check_argument(sum(counts) == len(pairs), "gptq_losses", "counts", list(counts), f"{len(pairs)} groups in all")
    ends = list(accumulate(counts))
    return [pairs[end - count : end] for end, count in zip(ends, counts)]


def _gptq_losses(weight: Tensor, factor: Tensor, column_weight: Tensor, groups: Tensor, counts: Sequence[int]) -> Tensor:
    tables = [torch.tensor(table, dtype=torch.int32).flatten() for table in _split_groups(groups, counts)]
    return torch.cat([gptq_quantize(weight, factor, column_weight, table).loss for table in tables])


_losses_op = define_op(
    "gptq_losses(Tensor weight, Tensor factor, Tensor column_weight, Tensor groups, int[] counts) -> Tensor",
    fake=lambda weight, factor, column_weight, groups, counts: weight.new_empty(groups.shape[0] // 2, weight.shape[1]),
    reference=_gptq_losses,
)


def gptq_losses(weight: Tensor, factor: Tensor, column_weight: Tensor, tables: Sequence[Table]) -> list[Tensor]:
    """What quantising one matrix would lose, for several ways to cut it into groups.

    Args:
        weight, factor, column_weight: as of `gptq_quantize`.
        tables: per option its (bits, rows), top to bottom.

    Returns:
        Per option the loss f32 `(G, N)` that `gptq_quantize` would report.

    Cost: on a GPU the options run side by side, COPIES_BYTES of weights at a time; elsewhere one after the other.
    """
    pairs = torch.tensor([value for table in tables for pair in table for value in pair], dtype=torch.int32)
    counts = [len(table) for table in tables]
    return list(_losses_op(weight, factor, column_weight, pairs, counts).split(counts))


def _register_cuda(name: str, blockwise: object) -> None:
    """Register `blockwise` for CUDA tensors; the reference answers where the kernels of a block are missing."""

    def run(*arguments: object) -> object:
        return (blockwise if "cuda" in _load.load_libraries().loaded else REFERENCE_OPS[name])(*arguments)  # type: ignore[operator]

    TORCH_LIBRARY.impl(name, run, "CUDA")


_register_cuda("gptq_quantize", quantize_in_blocks)
_register_cuda("gptq_losses", _losses_in_blocks)
