"""From logits to tokens: the filters in their order and one draw per row. Knows no pages and no threads."""

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
from exl2nb.sampling.report import Sampled, report
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
    apply: Callable[[Tensor, SamplerState, float], Tensor]


# The order of Transformers: penalties on the raw logits, then temperature, then the cuts. Greedy takes the best token after the penalties
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
    Filter("top_p", lambda p: p.top_p < 1.0, lambda x, s, removed: top_p(x, s.params.top_p, removed=removed)),
    Filter("min_p", lambda p: p.min_p > 0.0, lambda x, s, _: min_p(x, s.params.min_p)),
)
CHAIN = PENALTIES + CUTS


def active_filters(params: SamplingParams) -> tuple[Filter, ...]:
    """The filters a request goes through, in order; the cuts do not apply to a greedy one."""
    return tuple(f for f in (PENALTIES if params.greedy else CHAIN) if f.active(params))


def filtered(logits: Tensor, state: SamplerState) -> Tensor:
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
    rows = logits.detach().to("cpu", torch.float32)
    return [sample_row(rows[i], state, top=top[i] if top is not None else 0) for i, state in enumerate(states)]


def sample_row(row: Tensor, state: SamplerState, *, top: int = 0) -> Sampled:
    """`sample` for one row: f32 `(V,)` on the CPU."""
    token = _draw(row, state)
    chosen = report(row.numpy(), token, top)
    state.push(token)
    return chosen


def _draw(row: Tensor, state: SamplerState) -> int:
    """`filtered`, then one draw; the cuts run on the few tokens they can leave."""
    params = state.params
    for step in PENALTIES:
        if step.active(params):
            row = step.apply(row, state, 0.0)
    if params.greedy:
        return int(row.numpy().argmax())
    ids, left_out = narrow(row.numpy(), params)
    logits = row if ids is None else torch.from_numpy(row.numpy()[ids])
    for step in CUTS:
        if step.active(params):
            logits = step.apply(logits, state, left_out)
    index = inverse_cdf(logits.numpy(), state.uniform())
    return index if ids is None else int(ids[index])


def inverse_cdf(logits: np.ndarray, uniform: float) -> int:
    """The index at which the cumulative probability of softmax(logits), in order of ids, passes `uniform` in [0, 1)."""
    weights = np.exp(logits - logits.max())
    starts = np.arange(0, len(weights), BLOCK)
    sums = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
    target = uniform * sums[-1]
    block = min(int(sums.searchsorted(target, side="right")), len(sums) - 1)
    before = sums[block - 1] if block else 0.0
    inner = weights[starts[block] : starts[block] + BLOCK]
    index = int(inner.cumsum(dtype=np.float64).searchsorted(target - before, side="right"))
    # rounding may point past the last token that has any probability
    return int(starts[block]) + min(index, int(np.flatnonzero(inner)[-1]))
