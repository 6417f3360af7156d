"""The chain of one request, prepared once: which filters in which order, and which tokens can be left out before they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from exl2nb.sampling.draw import weights_of
from exl2nb.sampling.filters import CUTS, MASKS, PENALTIES, Filter, ordered
from exl2nb.sampling.params import SamplingParams

NARROWING = ("top_k", "top_p", "top_a", "min_p")  # in this order `narrow` knows what they leave


PLAIN = ("temperature", "top_k", "top_p", "min_p")  # what `ops.draw_rows` does, in its order


class Bounds(NamedTuple):
    """What `narrow` may count on: these cuts follow each other, on logits still to be divided by `temperature`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_a: float = 0.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """Links in order.

    first: masks and penalties, on whole rows. lead: cuts on whole rows. rest: cuts on what `bounds` leaves, None = on everything.
    consumer: the place in `rest` of the link that is told what was left out.
    cuts: temperature, top_k, top_p and min_p where these, following each other, are all the cuts there are; then one op draws the row.
    """

    first: tuple[Filter, ...]
    lead: tuple[Filter, ...]
    rest: tuple[Filter, ...]
    bounds: Bounds | None
    consumer: int
    cuts: tuple[float, float, float, float] | None = None

    @property
    def links(self) -> tuple[Filter, ...]:
        """All of them, in order."""
        return self.first + self.lead + self.rest


def recipe(params: SamplingParams) -> Recipe:
    """The chain that `params` ask for; the cuts do not apply to a greedy request."""
    return _recipe(replace(params, post_sampling=(), seed=None))  # kept by neither: functions may hold whole models


@lru_cache(maxsize=1024)
def _recipe(params: SamplingParams) -> Recipe:
    first = tuple(f for f in MASKS + ordered(PENALTIES, params) if f.active(params))
    if params.greedy:
        return Recipe(first, (), (), None, -1, (0.0, 0.0, 1.0, 0.0))
    cuts = [f for f in ordered(CUTS, params) if f.active(params)]
    start = next((i for i, f in enumerate(cuts) if f.name in NARROWING), None)
    if start is None:
        return Recipe(first, (), tuple(cuts), None, -1, _plain(cuts, params))
    run = start
    while run < len(cuts) and cuts[run].name in NARROWING[_place(cuts[run - 1], default=-1) + 1 if run > start else 0 :]:
        run += 1
    names = {f.name for f in cuts[start:run]}
    folded = start > 0 and cuts[start - 1].name == "temperature"
    bounds = Bounds(**{name: getattr(params, name) for name in names}, temperature=params.temperature if folded else 1.0)
    lead = start - folded
    return Recipe(first, tuple(cuts[:lead]), tuple(cuts[lead:]), bounds, int(folded), _plain(cuts, params))


def _plain(cuts: Sequence[Filter], params: SamplingParams) -> tuple[float, float, float, float] | None:
    names = [link.name for link in cuts]
    if names != [name for name in PLAIN if name in names]:
        return None
    return params.temperature, float(params.top_k), params.top_p, params.min_p


def _place(link: Filter, default: int) -> int:
    return NARROWING.index(link.name) if link.name in NARROWING else default


SLACK = 1e-4  # of a logit: larger than the rounding by which the cuts themselves may differ from the bounds below
SMALL = 256  # candidates; narrowing costs more than it saves below this


def narrow(row: np.ndarray, bounds: Bounds | SamplingParams) -> tuple[np.ndarray | None, float]:
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
    if size <= SMALL:
        return None, 0.0
    if bounds.top_k > 0:
        if bounds.top_k >= size:
            return None, 0.0
        floor = float(np.partition(row, size - bounds.top_k)[size - bounds.top_k])
        return np.flatnonzero(row >= np.float32(floor - SLACK * max(1.0, abs(floor)))), 0.0
    if bounds.top_p >= 1.0 and bounds.min_p <= 0.0 and bounds.top_a <= 0.0:
        return None, 0.0
    highest, heat = float(row.max()), bounds.temperature
    weights = weights_of(row, highest, min(1.0 / heat, 1e30))
    total = float(weights.sum())
    floor = max(bounds.min_p, bounds.top_a / total if total > 0 else 0.0) * (1.0 - SLACK)  # as a share of the highest weight, which is 1
    if bounds.top_p < 1.0:
        if bounds.top_a > 0.0:  # it counts what top_p leaves: tokens that top_p would have kept must not be missing
            floor = 0.0
        floor = max(floor, (1.0 - bounds.top_p) / size * total * (1.0 - SLACK))
    ids = np.flatnonzero(weights >= np.float32(floor))
    if not len(ids) or not math.isfinite(total):
        return None, 0.0
    return ids, max(0.0, 1.0 - float(weights[ids].sum()) / total)
