"""From logits to tokens: the filters in their order and one draw per row. Knows no pages and no threads.

Rows are drawn one at a time in NumPy: a request has its own settings, its tokens must not depend on its neighbours, and on a row that was
narrowed to a few hundred candidates NumPy takes a microsecond per operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exl2nb.sampling.min_p import min_p
from exl2nb.sampling.narrow import narrow
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.repetition_penalty import repetition_penalty
from exl2nb.sampling.report import Sampled, highest_logit, report
from exl2nb.sampling.state import SamplerState
from exl2nb.sampling.temperature import temperature
from exl2nb.sampling.top_k import top_k
from exl2nb.sampling.top_p import top_p

BLOCK = 512  # tokens; one cumulative sum over the blocks and one inside the block that was hit


class Filter(NamedTuple):
    """One link.

    active: whether a request's params ask for it. apply: (f32 `(n,)` logits, state, probability that was left out before) -> f32 `(n,)`,
    -inf where a token is removed.
    """

    name: str
    active: Callable[[SamplingParams], bool]
    apply: Callable[[np.ndarray, SamplerState, float], np.ndarray]


# The order of Transformers: penalties on the raw logits, then temperature, then the cuts. Greedy takes the best token after the penalties.
PENALTIES: tuple[Filter, ...] = (
    Filter(
        "repetition_penalty",
        lambda p: p.repetition_penalty != 1.0,
        lambda x, s, _: repetition_penalty(x, s.seen, s.params.repetition_penalty),
    ),
)
CUTS: tuple[Filter, ...] = (
    Filter("temperature", lambda p: p.temperature != 1.0, lambda x, s, _: temperature(x, s.params.temperature)),
    Filter("top_k", lambda p: p.top_k > 0, lambda x, s, _: top_k(x, s.params.top_k)),
    Filter("top_p", lambda p: p.top_p < 1.0, lambda x, s, left_out: top_p(x, s.params.top_p, left_out=left_out)),
    Filter("min_p", lambda p: p.min_p > 0.0, lambda x, s, _: min_p(x, s.params.min_p)),
)
CHAIN = PENALTIES + CUTS


def active_filters(params: SamplingParams) -> tuple[Filter, ...]:
    """The filters a request goes through, in order; the cuts do not apply to a greedy one."""
    return tuple(f for f in (PENALTIES if params.greedy else CHAIN) if f.active(params))


def filtered(logits: np.ndarray, state: SamplerState) -> np.ndarray:
    """The logits a token is drawn from: every active filter in order, nothing skipped.

    Args:
        logits: f32 `(V,)`, raw.
        state: of the request.

    Returns:
        f32 `(V,)`, -inf where a token is removed.
    """
    for step in active_filters(state.params):
        logits = step.apply(logits, state, 0.0)
    return logits


def sample(logits: Tensor, states: Sequence[SamplerState], *, top: Sequence[int] | None = None) -> list[Sampled]:
    """Choose one token per row and push it to the row's state. Rows do not influence each other, not even in the last bit.

    Args:
        logits: f32 `(R, V)`, raw, on any device.
        states: R of them.
        top: for each row, how many of the most probable tokens to report; None = none.

    Returns:
        R choices. Log probabilities and ranks are those of the unfiltered distribution.

    Raises:
        GenerationError: a row holds NaN or +inf.
    """
    assert logits.shape[0] == len(states), (logits.shape, len(states))
    rows = logits.detach().to("cpu", torch.float32).numpy()
    return [sample_row(row, state, top=top[i] if top is not None else 0) for i, (row, state) in enumerate(zip(rows, states))]


def sample_row(row: np.ndarray, state: SamplerState, *, top: int = 0) -> Sampled:
    """`sample` for one row, f32 `(V,)`."""
    highest = highest_logit(row)
    chosen = report(row, highest, _draw(row, state), top)
    state.push(chosen.id)
    return chosen


def _draw(row: np.ndarray, state: SamplerState) -> int:
    """`filtered`, then one draw; the cuts run on the few tokens that they can leave."""
    params = state.params
    for step in PENALTIES:
        if step.active(params):
            row = step.apply(row, state, 0.0)
    if params.greedy:
        return int(row.argmax())
    ids, left_out = narrow(row, params)
    logits = row if ids is None else row[ids]
    for step in CUTS:
        if step.active(params):
            logits = step.apply(logits, state, left_out)
    index = inverse_cdf(logits, state.uniform())
    return index if ids is None else int(ids[index])


def inverse_cdf(logits: np.ndarray, uniform: float) -> int:
    """The index at which the cumulative probability of softmax(logits), in order of ids, passes `uniform` in [0, 1)."""
    weights = np.exp(logits - logits.max())
    first, before = 0, 0.0
    if len(weights) > BLOCK:
        sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64).cumsum()
        target = uniform * float(sums[-1])
        block = min(int(sums.searchsorted(target, side="right")), len(sums) - 1)
        first, before = block * BLOCK, float(sums[block - 1]) if block else 0.0
        inner = weights[first : first + BLOCK].cumsum(dtype=np.float64)
    else:
        inner = weights.cumsum(dtype=np.float64)
        target = uniform * float(inner[-1])
    index = int(inner.searchsorted(target - before, side="right"))
    if index == len(inner):  # rounding points past the end: the last token that has any probability
        index = int(inner.searchsorted(inner[-1]))
    return first + index
