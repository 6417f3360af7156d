"""Draw tokens from logits as the CPU engine does: bit masks, one draw for each row, and engine steps that draw their own tokens.

`draw_rows` draws greedily, or by temperature, top_k, top_p, min_p and one random number. `step_draw` runs a step to its end and draws.
`draw_ahead` begins a step and returns at once; its result is written when `join_ahead` has returned, which takes part in the step instead
of waiting for it. Steps run in the order in which they were begun, so a step may ask for what the one before it draws. The torch
reference, which has no threads, runs the step at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import REFERENCE_OPS, check_argument, define_op, dynamic_size

NO_DISTRIBUTION, NOTHING_LEFT = -1, -2
"""Instead of an id: the row's largest logit is not finite; no token may be chosen."""
MOST_ROWS = 32
"""Tokens of a step of `draw_ahead` at most."""


def _mask_logits(logits: Tensor, bits: Tensor) -> Tensor:
    check_argument(
        logits.dtype == torch.float32 and logits.dim() == 1, "mask_logits", "logits", (logits.dtype, tuple(logits.shape)), "f32 (V,)"
    )
    wanted = (-(-logits.shape[0] // 32),)
    fits = bits.dtype == torch.int32 and tuple(bits.shape) == wanted
    check_argument(fits, "mask_logits", "bits", (bits.dtype, tuple(bits.shape)), f"int32 {wanted}")
    return reference.mask_logits(logits, bits)


_mask_logits_op = define_op(
    "mask_logits(Tensor logits, Tensor bits) -> Tensor",
    fake=lambda logits, bits: torch.empty_like(logits),
    reference=_mask_logits,
)


def mask_logits(logits: Tensor, bits: Tensor) -> Tensor:
    """Logits f32 `(V,)` with -inf for every token whose bit is not set -> f32 `(V,)`.

    Args:
        logits: not changed.
        bits: int32 `(ceil(V / 32),)`: token i is bit i % 32, the lowest first, of word i // 32.

    Example:
        >>> mask_logits(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0b101], dtype=torch.int32)).tolist()
        [1.0, -inf, 3.0]
    """
    return _mask_logits_op(logits, bits)


_MIN_SETTINGS = torch.tensor([0.0, 0.0, 1e-300, 0.0, 0.0], dtype=torch.float64)
_MAX_SETTINGS = torch.tensor([math.inf, math.inf, 1.0, 1.0, 1.0 - 2.0**-53], dtype=torch.float64)


def _draw_rows(logits: Tensor, settings: Tensor, bits: Tensor | None, top: int = 0, columns: int | None = None) -> Tensor:
    fits = logits.dtype == torch.float32 and logits.dim() == 2
    check_argument(fits, "draw_rows", "logits", (logits.dtype, tuple(logits.shape)), "f32 (R, V)")
    R, V = logits.shape
    check_argument(0 <= top <= V, "draw_rows", "top", top, f"0 to {V}, the columns of logits")
    fits = settings.dtype == torch.float64 and tuple(settings.shape) == (R, 5)
    check_argument(fits, "draw_rows", "settings", (settings.dtype, tuple(settings.shape)), f"f64 ({R}, 5)")
    if bits is not None:
        fits = bits.dtype == torch.int32 and tuple(bits.shape) == (R, -(-V // 32))
        check_argument(fits, "draw_rows", "bits", (bits.dtype, tuple(bits.shape)), f"int32 ({R}, {-(-V // 32)})")
    within = ((settings >= _MIN_SETTINGS) & (settings <= _MAX_SETTINGS)).all()
    check_argument(
        bool(within), "draw_rows", "settings", "out of range", "temperature, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, 0 <= uniform < 1"
    )
    check_argument(columns is None or columns >= 1, "draw_rows", "columns", columns, "at least 1")
    rows = [_draw_row(x, settings[r].tolist(), None if bits is None else bits[r], columns) for r, x in enumerate(logits)]
    drawn = torch.tensor(rows, dtype=torch.float64).view(R, 4)
    return torch.cat([drawn, *([_best_alternatives(logits, drawn, top)] if top else [])], 1)


def _best_alternatives(logits: Tensor, drawn: Tensor, top: int) -> Tensor:
    ids = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :top]
    pairs = torch.stack([ids.double(), logits.double().log_softmax(1).gather(1, ids)], 2).flatten(1)
    return torch.where(drawn[:, :1] < 0, -1.0, pairs)


def _draw_row(x: Tensor, settings: list[float], bits: Tensor | None, columns: int | None) -> tuple[float, float, float, float]:
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


draw_rows = define_op(
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


_BATCH_ARGUMENTS = (
    "Tensor program, Tensor ids, Tensor positions, Tensor slots, Tensor block_table, Tensor cu_seqlens, Tensor context_lens, "
    "Tensor logit_rows, Tensor(a!)[] k_pools, Tensor(b!)[] v_pools, Tensor settings, int top"
)
_OPTIONAL_ARGUMENTS = "Tensor? lora=None, Tensor? adapters=None, int? columns=None"


def _step_draw(*arguments: Any) -> tuple[Tensor, Tensor]:
    batch, (settings, top, *options) = arguments[:10], arguments[10:]
    logits = REFERENCE_OPS["decode_step"](*batch, *options[:2])
    return REFERENCE_OPS["draw_rows"](logits, settings, None, min(top, logits.shape[1]), *options[2:]), logits


def _draw_ahead(program: Tensor, ids: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    batch, (settings, top, feed, previous, *options) = arguments[:8], arguments[8:]  # batch: as `decode_step` takes it
    check_argument(len(ids) <= MOST_ROWS, "draw_ahead", "tokens", len(ids), f"at most {MOST_ROWS}")
    check_argument((feed is None) == (previous is None), "draw_ahead", "feed and previous", "one of them", "both or none")
    if feed is not None and previous is not None:
        check_argument(bool((feed < len(previous)).all()), "draw_ahead", "feed", feed.tolist(), f"-1 to {len(previous) - 1}")
        drawn = previous[:, 0].clamp(min=0).to(torch.int32)
        ids = torch.where(feed >= 0, drawn[feed.clamp(min=0).long()], ids)
    logits = REFERENCE_OPS["decode_step"](program, ids, *batch, *options[:2])
    return REFERENCE_OPS["draw_rows"](logits, settings, None, top, *options[2:]), logits


def _fake_step(*arguments: Any) -> tuple[Tensor, Tensor]:
    rows, settings, top = arguments[7].shape[0], arguments[10], arguments[11]
    return settings.new_empty(rows, 4 + 2 * top), torch.empty(rows, dynamic_size())


step_draw = define_op(f"step_draw({_BATCH_ARGUMENTS}, {_OPTIONAL_ARGUMENTS}) -> (Tensor, Tensor)", fake=_fake_step, reference=_step_draw)
"""`decode_step`, then `draw_rows` of its logits with at most `top` alternatives: what that returns, and the logits.

columns: as `draw_rows` takes it.
"""

draw_ahead = define_op(
    f"draw_ahead({_BATCH_ARGUMENTS}, Tensor? feed, Tensor? previous, {_OPTIONAL_ARGUMENTS}) -> (Tensor, Tensor)",
    fake=_fake_step,
    reference=_draw_ahead,
)
"""Begin a `decode_step` whose tokens are drawn as `draw_rows` draws them: what that returns, and the logits.

feed: int32 `(T,)` or None. feed[t] = r: the token is the one of row r of `previous`, what the step begun before this one returned; -1: it
is `ids[t]`. columns: as `draw_rows` takes it. The batch's tensors may change as soon as this returns; what the program's addresses lead
to must live until `join_ahead`.
"""

join_ahead = define_op("join_ahead(Tensor(a!) drawn) -> ()", fake=lambda drawn: None, reference=lambda drawn: None)
"""Wait until the step that returned `drawn` is complete; harmless when repeated."""
