"""From logits to tokens: the filters in their order and one draw per row. Knows no pages and no threads.

A chain of the usual cuts is one op (`ops.draw_rows`), for one row or for many: a request has its own settings, and its tokens do not depend
on its neighbours. Everything else runs row by row in NumPy, which takes a microsecond per operation on a row that was narrowed to a few
hundred candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from exl2nb.core.errors import GenerationError
from exl2nb.ops.draw import NO_DISTRIBUTION, draw_rows
from exl2nb.sampling.draw import after_draw
from exl2nb.sampling.filters import CHAIN, CONSTRAINT, CUTS, PENALTIES, WHOLE, Filter, View
from exl2nb.sampling.narrow import narrow
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.plan import plan
from exl2nb.sampling.report import Sampled, highest_logit, report
from exl2nb.sampling.rng import uniform
from exl2nb.sampling.scratch import weights_of
from exl2nb.sampling.state import SamplerState

__all__ = ["CHAIN", "CUTS", "PENALTIES", "WHOLE", "Filter", "View", "active_filters", "filtered", "inverse_cdf", "sample", "sample_row"]

_new = tuple.__new__  # half the time of `Sampled(...)`
BLOCK = 512  # tokens; one cumulative sum over the blocks and one inside the block that was hit


def active_filters(params: SamplingParams) -> tuple[Filter, ...]:
    """The filters a request goes through, in order; the cuts do not apply to a greedy one. A grammar's mask comes before all of them."""
    return plan(params).links


def filtered(logits: np.ndarray, state: SamplerState) -> np.ndarray:
    """The logits a token is drawn from: every active filter in order, nothing skipped.

    Args:
        logits: f32 `(V,)`, raw.
        state: of the request.

    Returns:
        f32 `(V,)`, -inf where a token is removed.
    """
    for step in (CONSTRAINT, *state.plan.links) if state.constraint is not None else state.plan.links:
        logits = step.apply(logits, state, WHOLE)
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
        GenerationError: a row holds NaN or +inf, or no token is left.
    """
    assert logits.shape[0] == len(states), (logits.shape, len(states))
    rows = logits.detach().to("cpu", torch.float32).numpy()
    return [sample_row(row, state, top=top[i] if top is not None else 0) for i, (row, state) in enumerate(zip(rows, states))]


def batches(state: SamplerState) -> bool:
    """Whether `draw_batch` can draw for a request: the usual cuts on raw logits, and nothing else."""
    todo = state.plan
    return todo.cuts is not None and not todo.first and state.constraint is None and not state.params.post_sampling


def draw_batch(logits: Tensor, draws: Sequence[tuple[SamplerState, int, int]]) -> list[Sampled | None]:
    """What `sample_row` draws, for many rows at once; pushes nothing.

    Args:
        logits: f32 `(R, V)` on the host, raw.
        draws: R times state, number of the draw (`SamplerState.count` when its turn comes), alternatives to report.

    Returns:
        R choices; None for a row that has no distribution: `sample_row` says what is wrong with it.
    """
    rows, top = draw_settings(draws)
    return drawn_rows(draw_rows(logits, rows, None, min(top, logits.shape[1])), draws)


def draw_settings(draws: Sequence[tuple[SamplerState, int, int]]) -> tuple[Tensor, int]:
    """What `draw_rows` wants to know for `draw_batch`: the settings of each row, f64 `(R, 5)`, and how many alternatives."""
    cuts = [state.plan.cuts for state, _, _ in draws]
    changing = any([one is None or one[0] for one in cuts])  # greedy rows ask for the same at every step
    rows = _settings(draws) if changing else _greedy_rows(tuple(cuts))  # pyright: ignore[reportArgumentType]
    return rows, max([wanted for _, _, wanted in draws])


def drawn_rows(found: Tensor, draws: Sequence[tuple[SamplerState, int, int]]) -> list[Sampled | None]:
    """What `draw_batch` returns, of what `draw_rows` says."""
    return [_sampled(one, draw[2]) if one[0] >= 0 else None for one, draw in zip(found.tolist(), draws)]


def _settings(draws: Sequence[tuple[SamplerState, int, int]]) -> Tensor:
    """What `draw_rows` wants to know of each row: its cuts and its uniform number, f64 `(R, 5)`."""
    settings: list[float] = []  # one list: NumPy takes a microsecond for every row that is written by itself
    for state, number, _ in draws:
        cuts = state.plan.cuts
        assert cuts is not None, "`batches` said so"
        settings += cuts
        settings.append(uniform(state.seed, number) if cuts[0] else 0.0)
    return torch.from_numpy(np.array(settings, np.float64).reshape(-1, 5))


@functools.lru_cache(maxsize=64)
def _greedy_rows(cuts: tuple[tuple[float, ...], ...]) -> Tensor:
    return torch.tensor([(*one, 0.0) for one in cuts], dtype=torch.float64)


def sample_row(row: np.ndarray, state: SamplerState, *, top: int = 0) -> Sampled:
    """`sample` for one row, f32 `(V,)`."""
    todo = state.plan
    if todo.cuts is not None and not todo.first and not state.params.post_sampling:
        chosen = _sampled(_draw_plain(row, state, top), top)
        state.push(chosen.id)
        return chosen
    highest = highest_logit(row)
    token = _draw(row, state)
    if state.params.post_sampling:
        token = after_draw(token, row, state)
    chosen = report(row, highest, token, top)
    state.push(chosen.id)
    return chosen


def _draw(row: np.ndarray, state: SamplerState) -> int:
    """`filtered`, then one draw; the cuts run on the few tokens that they can leave."""
    todo = state.plan
    for step in todo.first:
        row = step.apply(row, state, WHOLE)
    if todo.cuts is not None:
        return int(_draw_plain(row, state)[0])
    ids: np.ndarray | None = None
    if state.constraint is not None:  # adding -inf may as well come last: then a narrow grammar leaves the cuts a short row
        allowed = state.allowed()
        ids = allowed.few()
        state.forced = ids is not None and len(ids) == 1
        row = allowed.masked(row) if ids is None else row[ids]
    if todo.first:
        check_left(row.max())  # what cuts do counts from the best
    view = WHOLE if ids is None else View(ids)
    for step in todo.lead:
        row = step.apply(row, state, view)
    told = view
    if todo.bounds is not None:
        few, left_out = narrow(row, todo.bounds)
        if few is not None:
            row, view = row[few], View(few if ids is None else ids[few])
            told = view._replace(left_out=left_out)
    for place, step in enumerate(todo.rest):
        row = step.apply(row, state, told if place == todo.consumer else view)
    index = inverse_cdf(row, state.uniform())
    if state.params.mirostat:
        state.drawn(prob_of(row, index))
    return index if view.ids is None else int(view.ids[index])


def _draw_plain(row: np.ndarray, state: SamplerState, top: int = 0) -> list[float]:
    """What `draw_rows` says of a row, the grammar's mask read as it is."""
    cuts, bits = state.plan.cuts, None
    assert cuts is not None, "a chain with other cuts"
    if state.constraint is not None:
        bits = torch.from_numpy(state.allowed().bits).unsqueeze(0)
    settings = torch.tensor([(*cuts, 0.0 if state.params.greedy else state.uniform())], dtype=torch.float64)
    row = np.require(row, np.float32, ("C", "W"))
    found = draw_rows(torch.from_numpy(row).unsqueeze(0), settings, bits, min(top, len(row)))[0].tolist()
    if found[0] == NO_DISTRIBUTION and not state.plan.first:
        highest_logit(row)  # raises
    if found[0] < 0:
        check_left(np.float32(-np.inf))
    state.forced = bits is not None and found[3] == 1
    return found


def _sampled(found: list[float], top: int) -> Sampled:
    """What `draw_rows` says of a row, with the first `top` of the alternatives."""
    best = tuple([(int(found[i]), found[i + 1]) for i in range(4, min(4 + 2 * top, len(found)), 2)]) if top else ()
    return _new(Sampled, (int(found[0]), found[1], int(found[2]), best))


def inverse_cdf(logits: np.ndarray, uniform: float) -> int:
    """The index at which the cumulative probability of softmax(logits), in order of ids, passes `uniform` in [0, 1)."""
    highest = logits.max()
    check_left(highest)
    weights = weights_of(logits, highest)
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


def prob_of(logits: np.ndarray, index: int) -> float:
    """The probability of one place under softmax(logits)."""
    weights = weights_of(logits, logits.max())
    return float(weights[index]) / float(weights.sum(dtype=np.float64))


def check_left(highest: np.floating) -> None:
    """Raise GenerationError where the best logit says that every token is excluded."""
    if highest == -np.inf:
        raise GenerationError(
            "no token is left to choose from: allowed_tokens, banned_tokens and the structure exclude every one; loosen one of them"
        )
