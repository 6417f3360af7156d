"""GPTQ with EXL2's scales: one matrix, quantised with error compensation. Knows nothing of models, files or where Hessians come from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from exl2nb.ops._library import check, define

STEP_GRID, CANDIDATES, CODE_SPAN = 16, 24, 4  # as in csrc/cpu/gptq.h
_LOW, _HIGH = 0.5, 1.3


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
    check(
        sum(rows for _, rows in table) == weight.shape[0],
        "gptq_quantize",
        "rows of all groups",
        groups.tolist(),
        f"{weight.shape[0]} in all",
    )
    check((coupling is None) == (spread is None), "gptq_quantize", "coupling and spread", "one of them", "both or neither")
    w, row_weight = weight.float().clone(), factor.diagonal().float().square().reciprocal()
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    indices, maxima, losses, first = [], [], [], 0
    for bits, rows in table:
        part = slice(first, first + rows)
        index, scale_max = _scales(w[part], row_weight[part], bits, column_weight)
        step = _steps(index, _unit(scale_max))
        codes[part], loss, _ = _rows(w, factor, first, first + rows, w.shape[0], bits, step, coupling, spread)
        indices.append(index.to(torch.uint8))
        maxima.append(scale_max)
        losses.append(loss)
        first += rows
    return codes, torch.stack(indices), torch.stack(maxima).half(), torch.stack(losses)


def _rows(
    w: Tensor, factor: Tensor, first: int, end: int, stop: int, bits: int, step: Tensor, coupling: Tensor | None, spread: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise rows [first, end) of w, compensate what follows up to row `stop`: codes `(rows, N)`, loss `(N,)`, errors `(rows, N)`."""
    low = -(1 << (bits - 1))
    codes, errors, loss = [], [], torch.zeros_like(step)
    for r in range(first, end):
        if coupling is None or spread is None:
            q = _nearest(w[r], step, bits)
            left = hat_error = w[r] - (q * step).half().float()
        else:
            q, left, hat_error = _coupled(w[r], step, bits, coupling, spread)
        error = hat_error / factor[r, r]
        w[r + 1 : end] -= torch.outer(factor[r, r + 1 : end], error)
        codes.append((q - low).to(torch.uint8))
        errors.append(error)
        loss += (left / factor[r, r]).square()
    error = torch.stack(errors)
    w[end:stop] -= factor[first:end, end:stop].T @ error
    return torch.stack(codes), loss, error


def _nearest(w: Tensor, step: Tensor, bits: int) -> Tensor:
    return (w / step).clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).round()


def _coupled(row: Tensor, step: Tensor, bits: int, coupling: Tensor, spread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One row, column by column, each column's error pushed onto the columns of its block that are still to come.

    Returns:
        Levels, what each column was off from its own target times `spread`, and the row minus what a loader computes.
    """
    size = coupling.shape[-1]
    target, q = row.clone().view(-1, size), torch.empty_like(row).view(-1, size)
    hat, steps, left = torch.empty_like(q), step.view(-1, size), torch.empty_like(q)
    for m in range(size):
        q[:, m] = _nearest(target[:, m], steps[:, m], bits)
        hat[:, m] = (q[:, m] * steps[:, m]).half().float()
        left[:, m] = target[:, m] - hat[:, m]
        target -= left[:, m, None] * coupling[:, m]
    return q.flatten(), left.flatten() * spread, row - hat.flatten()


def _unit(scale_max: Tensor) -> Tensor:
    return (scale_max.half().float() / 256).half().float()


def _steps(index: Tensor, unit: Tensor) -> Tensor:
    """Steps as the loader computes them: fp16((index + 1)^2 * fp16(max / 256)), as f32."""
    return ((index.float() + 1).square() * unit).half().float()


def _grid_loss(w: Tensor, row_weight: Tensor, bits: int, step: Tensor) -> Tensor:
    """`sum_r row_weight[r] * (w - grid(w))^2` per column, w `(rows, N)`, step `(N,)`."""
    q = (w / step.clamp_min(1e-30)).clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).round()
    return ((w - q * step).square() * row_weight[:, None]).sum(0)


def _scales(w: Tensor, row_weight: Tensor, bits: int, column_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scale codes `(N,)` (0..15) and the shared maximum of one group."""
    top = w.abs().amax(0) / ((1 << (bits - 1)) - 0.5)
    low = 0.35 if bits <= 3 else 0.45 if bits == 4 else 0.6
    factors = low + (1.1 - low) * torch.arange(STEP_GRID, device=w.device) / (STEP_GRID - 1)
    tried = torch.stack([_grid_loss(w, row_weight, bits, top * f) for f in factors])
    best = top * factors[tried.argmin(0)]
    largest = 65504.0 / (1 << (bits - 1)) * 0.999
    spread = _LOW * (_HIGH / _LOW) ** (torch.arange(CANDIDATES, device=w.device) / (CANDIDATES - 1))
    maxima = (best.max() * spread).clamp(2.0**-16, largest).half().float()
    total, codes = [], []
    for candidate in maxima:
        start = (best / _unit(candidate)).sqrt().floor()
        options = torch.stack([(start + j - 1).clamp(1, 16) for j in range(CODE_SPAN)])
        losses = torch.stack([_grid_loss(w, row_weight, bits, _steps(k - 1, _unit(candidate))) for k in options])
        pick = losses.argmin(0, keepdim=True)
        codes.append(options.gather(0, pick)[0] - 1)
        total.append((losses.gather(0, pick)[0].double() * column_weight.double()).sum())
    winner = int(torch.stack(total).argmin())
    return codes[winner], maxima[winner]


def _fake(
    weight: Tensor, factor: Tensor, column_weight: Tensor, groups: Tensor, coupling: Tensor | None = None, spread: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (k, n), g = weight.shape, groups.shape[0] // 2
    new = weight.new_empty
    return new(k, n, dtype=torch.uint8), new(g, n, dtype=torch.uint8), new(g, dtype=torch.float16), new(g, n, dtype=torch.float32)


_gptq_op = define(
    "gptq_quantize(Tensor weight, Tensor factor, Tensor column_weight, Tensor groups, Tensor? coupling=None, Tensor? spread=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
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
