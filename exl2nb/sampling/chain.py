"""From logits to tokens: the chain of filters and one draw per row. Knows no pages and no threads.

A chain of the usual cuts is one op (`ops.draw_rows`) for all rows at once: each row has its own settings, and its token does not depend on
its neighbours. Every other chain runs row by row in NumPy, on the few hundred candidates that `preselect` leaves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from exl2nb.ops.cpu_sample import NO_DISTRIBUTION, draw_rows
from exl2nb.sampling.draw import Sampled, check_left, highest_logit, inverse_cdf, prob_of, report, uniform, weights_of
from exl2nb.sampling.filters import ALL_TOKENS, PADDING_FILTER, Candidates, filters_of, is_padded
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.sampler_state import Bounds, SamplerState

_new = tuple.__new__  # half the time of `Sampled(...)`


def filtered(logits: np.ndarray, state: SamplerState) -> np.ndarray:
    """The logits a token is drawn from: every active filter in order, nothing skipped.

    Returns:
        f32 `(V,)`, -inf where a token is removed.
    """
    for step in filters_of(state, len(logits)):
        logits = step.apply(logits, state, ALL_TOKENS)
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
    chain = state.chain
    return chain.fused is not None and not chain.penalties and state.constraint is None and not state.params.post_sampling


def draw_batch(logits: Tensor, draws: Sequence[tuple[SamplerState, int, int]]) -> list[Sampled | np.ndarray]:
    """`sample_row` for many rows at once, without pushing the tokens.

    Args:
        logits: f32 `(R, V)` on the host, raw.
        draws: R times state, number of the draw (`SamplerState.count` before it), alternatives to report.

    Returns:
        As `drawn_rows`.
    """
    settings, top, columns = draw_settings(draws)
    return drawn_rows(draw_rows(logits, settings, None, min(top, logits.shape[1]), columns), draws, logits)


def draw_settings(draws: Sequence[tuple[SamplerState, int, int]]) -> tuple[Tensor, int, int | None]:
    """Arguments of `draw_rows` for a batch of requests with one tokenizer.

    Returns:
        The settings of each row, f64 `(R, 5)`; how many alternatives to report; `SamplerState.columns`.
    """
    settings: list[float] = []  # one list: NumPy takes a microsecond for every row that is written by itself
    most, greedy = 0, True
    for state, number, top in draws:
        cuts = state.chain.fused
        assert cuts is not None, "`batches` is False for this request"
        settings += cuts
        if cuts[0]:
            settings.append(uniform(state.seed, number))
            greedy = False
        else:
            settings.append(0.0)
        if top > most:
            most = top
    rows = _greedy_settings(len(draws)) if greedy else torch.from_numpy(np.array(settings, np.float64).reshape(-1, 5))
    return rows, most, draws[0][0].columns if draws else None


def drawn_rows(found: Tensor, draws: Sequence[tuple[SamplerState, int, int]], logits: Tensor) -> list[Sampled | np.ndarray]:
    """Turn the result of `draw_rows` into choices; a row without a distribution is its logits: `sample_row` says what is wrong with it."""
    rows: list[Sampled | np.ndarray] = []
    for row, (one, (_, _, top)) in enumerate(zip(found.tolist(), draws)):
        if one[0] < 0:
            rows.append(logits[row].numpy())
        else:
            rows.append(_new(Sampled, (int(one[0]), one[1], int(one[2]), _best(one, top) if top else ())))
    return rows


@functools.lru_cache(maxsize=64)
def _greedy_settings(rows: int) -> Tensor:
    """Greedy rows have the same settings at every step."""
    return torch.tensor([(0.0, 0.0, 1.0, 0.0, 0.0)] * rows, dtype=torch.float64)


def sample_row(row: np.ndarray, state: SamplerState, *, top: int = 0) -> Sampled:
    """`sample` for one row, f32 `(V,)`."""
    chain = state.chain
    if chain.fused is not None and not chain.penalties and not state.params.post_sampling:
        found = _draw_fused(row, state, top)
        chosen = Sampled(int(found[0]), found[1], int(found[2]), _best(found, top))
        state.push(chosen.id)
        return chosen
    highest = highest_logit(row)
    token = _draw(row, state)
    if state.params.post_sampling:
        from exl2nb.sampling.replay import after_draw

        token = after_draw(token, row, state)
    chosen = report(row, highest, token, top)
    state.push(chosen.id)
    return chosen


def _draw(row: np.ndarray, state: SamplerState) -> int:
    """`filtered`, then one draw; the cuts run on the few tokens that they can leave."""
    chain = state.chain
    for step in chain.penalties:
        row = step.apply(row, state, ALL_TOKENS)
    if chain.fused is not None:
        return int(_draw_fused(row, state)[0])
    ids: np.ndarray | None = None
    if is_padded(state, len(row)):
        row = PADDING_FILTER.apply(row, state, ALL_TOKENS)
    if state.constraint is not None:  # adding -inf may as well come last: then a grammar that allows few tokens leaves the cuts a short row
        allowed = state.allowed()
        ids = allowed.few()
        state.forced = ids is not None and len(ids) == 1
        row = allowed.masked(row) if ids is None else row[ids]
    if chain.penalties:
        check_left(row.max())  # what cuts do counts from the best
    candidates = ALL_TOKENS if ids is None else Candidates(ids)
    for step in chain.early_cuts:
        row = step.apply(row, state, candidates)
    first = candidates
    if chain.bounds is not None:
        few, left_out = preselect(row, chain.bounds)
        if few is not None:
            row, candidates = row[few], Candidates(few if ids is None else ids[few])
            first = candidates._replace(left_out=left_out)
    for place, step in enumerate(chain.late_cuts):
        row = step.apply(row, state, first if place == chain.left_out_at else candidates)
    index = inverse_cdf(row, state.uniform())
    if state.params.mirostat:
        state.drawn(prob_of(row, index))
    return index if candidates.ids is None else int(candidates.ids[index])


def _draw_fused(row: np.ndarray, state: SamplerState, top: int = 0) -> list[float]:
    """The result of `draw_rows` for one row, with the grammar's mask as bits."""
    cuts, bits = state.chain.fused, None
    assert cuts is not None, "a chain with other cuts"
    if state.constraint is not None:
        bits = torch.from_numpy(state.allowed().bits).unsqueeze(0)
    settings = torch.tensor([(*cuts, 0.0 if state.params.greedy else state.uniform())], dtype=torch.float64)
    row = np.require(row, np.float32, ("C", "W"))
    found = draw_rows(torch.from_numpy(row).unsqueeze(0), settings, bits, min(top, len(row)), state.columns)[0].tolist()
    if found[0] == NO_DISTRIBUTION and not state.chain.penalties:
        highest_logit(row)  # raises
    if found[0] < 0:
        check_left(np.float32(-np.inf))
    state.forced = bits is not None and found[3] == 1
    return found


def _best(found: list[float], top: int) -> tuple[tuple[int, float], ...]:
    """The first `top` alternatives in a row of the result of `draw_rows`."""
    return tuple([(int(found[i]), found[i + 1]) for i in range(4, min(4 + 2 * top, len(found)), 2)])


ROUNDING_SLACK = 1e-4  # of a logit: larger than the rounding by which the cuts themselves may differ from the bounds below
MIN_PRESELECT_CANDIDATES = 256  # candidates; preselection costs more than it saves below this


def preselect(row: np.ndarray, bounds: Bounds | SamplingParams) -> tuple[np.ndarray | None, float]:
    """Find a superset of the tokens that temperature, top_k, top_p, top_a and min_p, following each other, keep.

    top_k keeps logits from the k-th largest on. n tokens of at most (1 - top_p) / V each weigh at most 1 - top_p together, so top_p removes
    them all. min_p keeps what lies within `-temperature * log(min_p)` of the largest. top_a keeps nothing below `top_a` times the square of
    the largest probability, which cuts before it can only raise.

    Args:
        row: f32 `(V,)` logits before temperature.
        bounds: the settings of these cuts; not greedy.

    Returns:
        Ids in ascending order, or None for all; and the probability at `temperature` of what was left out, as top_p counts it: top_k comes
        before top_p and renormalises, so after top_k it is 0.
    """
    size = row.shape[0]
    if size <= MIN_PRESELECT_CANDIDATES:
        return None, 0.0
    if bounds.top_k > 0:
        if bounds.top_k >= size:
            return None, 0.0
        floor = float(np.partition(row, size - bounds.top_k)[size - bounds.top_k])
        return np.flatnonzero(row >= np.float32(floor - ROUNDING_SLACK * max(1.0, abs(floor)))), 0.0
    if bounds.top_p >= 1.0 and bounds.min_p <= 0.0 and bounds.top_a <= 0.0:
        return None, 0.0
    highest, heat = float(row.max()), bounds.temperature
    weights = weights_of(row, highest, min(1.0 / heat, 1e30))
    total = float(weights.sum())
    floor = max(bounds.min_p, bounds.top_a / total if total > 0 else 0.0) * (
        1.0 - ROUNDING_SLACK
    )  # as a share of the highest weight, which is 1
    if bounds.top_p < 1.0:
        if bounds.top_a > 0.0:  # it counts what top_p leaves: tokens that top_p would have kept must not be missing
            floor = 0.0
        floor = max(floor, (1.0 - bounds.top_p) / size * total * (1.0 - ROUNDING_SLACK))
    ids = np.flatnonzero(weights >= np.float32(floor))
    if not len(ids) or not math.isfinite(total):
        return None, 0.0
    return ids, max(0.0, 1.0 - float(weights[ids].sum()) / total)
