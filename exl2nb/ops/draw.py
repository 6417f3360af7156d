"""One token for each row of logits, as the CPU engine draws it: greedy, or temperature, top_k, top_p, min_p and one random number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check, define

NO_DISTRIBUTION, NOTHING_LEFT = -1, -2
"""Instead of an id: the row's largest logit is not finite; no token may be chosen."""

_LEAST = torch.tensor([0.0, 0.0, 1e-300, 0.0, 0.0], dtype=torch.float64)
_MOST = torch.tensor([math.inf, math.inf, 1.0, 1.0, 1.0 - 2.0**-53], dtype=torch.float64)


def _draw_rows(logits: Tensor, settings: Tensor, bits: Tensor | None, top: int = 0, columns: int | None = None) -> Tensor:
    fits = logits.dtype == torch.float32 and logits.dim() == 2
    check(fits, "draw_rows", "logits", (logits.dtype, tuple(logits.shape)), "f32 (R, V)")
    R, V = logits.shape
    check(0 <= top <= V, "draw_rows", "top", top, f"0 to {V}, the columns of logits")
    fits = settings.dtype == torch.float64 and tuple(settings.shape) == (R, 5)
    check(fits, "draw_rows", "settings", (settings.dtype, tuple(settings.shape)), f"f64 ({R}, 5)")
    if bits is not None:
        fits = bits.dtype == torch.int32 and tuple(bits.shape) == (R, -(-V // 32))
        check(fits, "draw_rows", "bits", (bits.dtype, tuple(bits.shape)), f"int32 ({R}, {-(-V // 32)})")
    within = ((settings >= _LEAST) & (settings <= _MOST)).all()
    check(
        bool(within), "draw_rows", "settings", "out of range", "temperature, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, 0 <= uniform < 1"
    )
    check(columns is None or columns >= 1, "draw_rows", "columns", columns, "at least 1")
    rows = [_row(x, settings[r].tolist(), None if bits is None else bits[r], columns) for r, x in enumerate(logits)]
    drawn = torch.tensor(rows, dtype=torch.float64).view(R, 4)
    return torch.cat([drawn, *([_best(logits, drawn, top)] if top else [])], 1)


def _best(logits: Tensor, drawn: Tensor, top: int) -> Tensor:
    ids = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :top]
    pairs = torch.stack([ids.double(), logits.double().log_softmax(1).gather(1, ids)], 2).flatten(1)
    return torch.where(drawn[:, :1] < 0, -1.0, pairs)


def _row(x: Tensor, settings: list[float], bits: Tensor | None, columns: int | None) -> tuple[float, float, float, float]:
    if not bool(x.max().isfinite()):
        return NO_DISTRIBUTION, math.nan, 0, 0
    z, free = x[:columns], torch.zeros_like(x)
    if bits is not None:
        z, free = reference.mask_logits(x, bits)[:columns], reference.mask_logits(free, bits)
    choices = int((free[:columns] == 0).sum())
    if not bool(z.max() > -math.inf):
        return NOTHING_LEFT, math.nan, 0, choices
    temperature, top_k, top_p, min_p, uniform = settings
    token = reference.draw(z, temperature, int(top_k), top_p, min_p, uniform)
    return token, float(x.double().log_softmax(0)[token]), int((x > x[token]).sum()) + 1, choices


draw_rows = define(
    "draw_rows(Tensor logits, Tensor settings, Tensor? bits, int top=0, int? columns=None) -> Tensor",
    fake=lambda logits, settings, bits, top=0, columns=None: settings.new_empty(logits.shape[0], 4 + 2 * top),
    reference=_draw_rows,
)
"""One token for each row of logits f32 `(R, V)`: `csrc/cpu/draw.h`. A row's result does not depend on the others.

settings: f64 `(R, 5)`: temperature (0 = greedy), top_k (0 = off), top_p (1), min_p (0), a random number in [0, 1). bits: int32
`(R, ceil(V / 32))` or None: which tokens may be chosen, token i is bit i % 32, the lowest first, of word i // 32. top: alternatives
to report. columns: only the first so many tokens may be chosen; None, or more than V, is all. Returns f64 `(R, 4 + 2 * top)`: the id, or
`NO_DISTRIBUTION` or `NOTHING_LEFT`; its log probability and rank under the raw row; how many tokens may be chosen; then id and log
probability of the `top` most probable tokens, ties in order of id (-1 where there is no distribution or no choice).
"""
