"""The chain of one request, worked out once: which links, in which order, and where `narrow` can save work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from exl2nb.sampling.filters import CUTS, LAST_TEMPERATURE, MASKS, PENALTIES, Filter
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
class Plan:
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


def plan(params: SamplingParams) -> Plan:
    """The chain that `params` ask for; the cuts do not apply to a greedy request."""
    return _plan(replace(params, post_sampling=(), seed=None))  # kept by neither: functions may hold whole models


@lru_cache(maxsize=1024)
def _plan(params: SamplingParams) -> Plan:
    first = tuple(f for f in MASKS + _ordered(PENALTIES, params) if f.active(params))
    if params.greedy:
        return Plan(first, (), (), None, -1, (0.0, 0.0, 1.0, 0.0))
    cuts = [f for f in _ordered(CUTS, params) if f.active(params)]
    start = next((i for i, f in enumerate(cuts) if f.name in NARROWING), None)
    if start is None:
        return Plan(first, (), tuple(cuts), None, -1, _plain(cuts, params))
    run = start
    while run < len(cuts) and cuts[run].name in NARROWING[_place(cuts[run - 1], default=-1) + 1 if run > start else 0 :]:
        run += 1
    names = {f.name for f in cuts[start:run]}
    folded = start > 0 and cuts[start - 1].name == "temperature"
    bounds = Bounds(**{name: getattr(params, name) for name in names}, temperature=params.temperature if folded else 1.0)
    lead = start - folded
    return Plan(first, tuple(cuts[:lead]), tuple(cuts[lead:]), bounds, int(folded), _plain(cuts, params))


def _plain(cuts: Sequence[Filter], params: SamplingParams) -> tuple[float, float, float, float] | None:
    names = [link.name for link in cuts]
    if names != [name for name in PLAIN if name in names]:
        return None
    return params.temperature, float(params.top_k), params.top_p, params.min_p


def _place(link: Filter, default: int) -> int:
    return NARROWING.index(link.name) if link.name in NARROWING else default


def _ordered(links: tuple[Filter, ...], params: SamplingParams) -> tuple[Filter, ...]:
    if params.order is not None:
        known = {f.name: f for f in links}
        return tuple(known[name] for name in params.order if name in known)
    if params.temperature_last:
        moved = [f for f in links if f.name != "temperature"]
        at = next((i for i, f in enumerate(moved) if f.name == LAST_TEMPERATURE), None)
        if at is not None:
            moved.insert(at, next(f for f in links if f.name == "temperature"))
        return tuple(moved)
    return links
