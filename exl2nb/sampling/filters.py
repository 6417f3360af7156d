"""The table of filters: every link that a chain can have, in the order in which they apply by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from exl2nb.core.errors import OptionError
from exl2nb.sampling.banned_tokens import allow, ban
from exl2nb.sampling.constraint import constrain
from exl2nb.sampling.dry import dry
from exl2nb.sampling.dynamic_temperature import dynamic_temperature
from exl2nb.sampling.logit_bias import logit_bias
from exl2nb.sampling.min_p import min_p
from exl2nb.sampling.min_tokens import not_yet
from exl2nb.sampling.mirostat import mirostat
from exl2nb.sampling.presence_penalty import subtract
from exl2nb.sampling.repetition_penalty import repetition_penalty
from exl2nb.sampling.skew import skew
from exl2nb.sampling.smoothing import smoothing
from exl2nb.sampling.tail_free import tail_free
from exl2nb.sampling.temperature import temperature
from exl2nb.sampling.top_a import top_a
from exl2nb.sampling.top_k import top_k
from exl2nb.sampling.top_p import top_p
from exl2nb.sampling.typical import typical
from exl2nb.sampling.xtc import xtc

if TYPE_CHECKING:
    from exl2nb.sampling.params import SamplingParams
    from exl2nb.sampling.state import SamplerState


class View(NamedTuple):
    """Which part of the vocabulary a filter looks at. ids: int64 ascending, None = all of it. left_out: probability of the rest."""

    ids: np.ndarray | None = None
    left_out: float = 0.0

    def places(self, ids: np.ndarray) -> np.ndarray:
        """Where those of `ids` stand that are in view."""
        if self.ids is None:
            return ids
        at = self.ids.searchsorted(ids).clip(max=len(self.ids) - 1)
        return at[self.ids[at] == ids]


WHOLE = View()


class Filter(NamedTuple):
    """One link.

    name: also in `SamplingParams.order`. active: whether a request's params ask for it. apply: (f32 `(n,)` logits, state, view) -> f32
    `(n,)`, -inf where a token is removed; penalties always see the whole vocabulary. fields: of SamplingParams, that it reads.
    """

    name: str
    active: Callable[[SamplingParams], bool]
    apply: Callable[[np.ndarray, SamplerState, View], np.ndarray]
    fields: tuple[str, ...]


def _dry(x: np.ndarray, s: SamplerState, _: View) -> np.ndarray:
    p = s.params
    ids = s.history.ids[-p.dry_range :] if p.dry_range else s.history.ids
    return dry(
        x,
        ids,
        multiplier=p.dry_multiplier,
        base=p.dry_base,
        allowed_length=p.dry_allowed_length,
        max_ngram=p.dry_max_ngram,
        breakers=s.breakers,
    )


# The grammar's mask, in every chain of a request that has one.
CONSTRAINT = Filter("constraint", lambda p: False, lambda x, s, _: constrain(x, s.allowed()), ())

# What cannot be chosen at all. Always first, and always in force.
MASKS: tuple[Filter, ...] = (
    Filter("allowed_tokens", lambda p: bool(p.allowed_tokens), lambda x, s, _: allow(x, s.ids_of("allowed_tokens")), ("allowed_tokens",)),
    Filter("banned_tokens", lambda p: bool(p.banned_tokens), lambda x, s, _: ban(x, s.ids_of("banned_tokens")), ("banned_tokens",)),
    Filter("min_tokens", lambda p: p.min_tokens > 0, lambda x, s, _: not_yet(x, s.end_ids) if s.too_short else x, ("min_tokens",)),
)

# On raw logits; greedy takes the best token after them.
PENALTIES: tuple[Filter, ...] = (
    Filter(
        "repetition_penalty",
        lambda p: p.repetition_penalty != 1.0,
        lambda x, s, _: repetition_penalty(x, *s.repeated()),
        ("repetition_penalty", "penalty_range", "penalty_decay"),
    ),
    Filter(
        "presence_penalty",
        lambda p: p.presence_penalty != 0.0,
        lambda x, s, _: subtract(x, *s.present()),
        ("presence_penalty", "penalty_range", "penalty_decay"),
    ),
    Filter(
        "frequency_penalty",
        lambda p: p.frequency_penalty != 0.0,
        lambda x, s, _: subtract(x, *s.frequent()),
        ("frequency_penalty", "penalty_range", "penalty_decay"),
    ),
    Filter(
        "dry",
        lambda p: p.dry_multiplier > 0.0,
        _dry,
        ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "dry_max_ngram"),
    ),
    Filter("logit_bias", lambda p: bool(p.logit_bias), lambda x, s, _: logit_bias(x, s.ids_of("logit_bias"), s.bias), ("logit_bias",)),
)

# The order of Transformers, with its neighbours in the places where their authors had them.
CUTS: tuple[Filter, ...] = (
    Filter(
        "smoothing",
        lambda p: p.smoothing_factor > 0.0,
        lambda x, s, _: smoothing(x, s.params.smoothing_factor, s.params.smoothing_curve),
        ("smoothing_factor", "smoothing_curve"),
    ),
    Filter("temperature", lambda p: p.temperature != 1.0, lambda x, s, _: temperature(x, s.params.temperature), ("temperature",)),
    Filter("top_k", lambda p: p.top_k > 0, lambda x, s, _: top_k(x, s.params.top_k), ("top_k",)),
    Filter("top_p", lambda p: p.top_p < 1.0, lambda x, s, v: top_p(x, s.params.top_p, left_out=v.left_out), ("top_p",)),
    Filter("top_a", lambda p: p.top_a > 0.0, lambda x, s, v: top_a(x, s.params.top_a, left_out=v.left_out), ("top_a",)),
    Filter("min_p", lambda p: p.min_p > 0.0, lambda x, s, _: min_p(x, s.params.min_p), ("min_p",)),
    Filter("tail_free", lambda p: p.tfs < 1.0, lambda x, s, _: tail_free(x, s.params.tfs), ("tfs",)),
    Filter("typical", lambda p: p.typical_p < 1.0, lambda x, s, _: typical(x, s.params.typical_p), ("typical_p",)),
    Filter("mirostat", lambda p: p.mirostat, lambda x, s, _: mirostat(x, s.mu), ("mirostat_tau", "mirostat_eta")),
    Filter(
        "dynamic_temperature",
        lambda p: p.max_temp > 0.0,
        lambda x, s, _: dynamic_temperature(x, s.params.min_temp, s.params.max_temp, s.params.temp_exponent),
        ("min_temp", "max_temp", "temp_exponent"),
    ),
    Filter(
        "xtc",
        lambda p: p.xtc_probability > 0.0,
        lambda x, s, v: xtc(x, s.params.xtc_probability, s.params.xtc_threshold, v.places(s.protected)),
        ("xtc_probability", "xtc_threshold"),
    ),
    Filter("skew", lambda p: p.skew != 0.0, lambda x, s, _: skew(x, s.params.skew), ("skew",)),
)
CHAIN = MASKS + PENALTIES + CUTS
NAMES = tuple(f.name for f in PENALTIES + CUTS)
LAST_TEMPERATURE = "dynamic_temperature"  # `temperature_last` puts temperature here


def checked_order(params: SamplingParams) -> tuple[str, ...]:
    """`params.order` as a tuple.

    Raises:
        OptionError: an unknown or repeated name, a cut before a penalty, or an active filter that is missing.
    """
    order = params.order
    if isinstance(order, str) or not isinstance(order, (tuple, list)):
        raise OptionError(f"order is {order!r}; expected a list of names of filters: {', '.join(NAMES)}")
    for name in order:
        if name not in NAMES:
            raise OptionError(f"order holds {name!r}; known: {', '.join(NAMES)} (masks always come first)")
    if len(set(order)) < len(order):
        raise OptionError(f"order is {list(order)}; expected each filter once")
    penalties = {f.name for f in PENALTIES}
    if [n in penalties for n in order] != sorted((n in penalties for n in order), reverse=True):
        raise OptionError(f"order is {list(order)}; expected penalties ({', '.join(f.name for f in PENALTIES)}) before the others")
    missing = [f.name for f in PENALTIES + CUTS if f.active(params) and f.name not in order]
    if missing:
        raise OptionError(f"order leaves out {', '.join(missing)}, which the settings switch on; add it, or switch it off")
    return tuple(order)
