"""The filters of a chain: one pure function per cut, and the table of all filters in the order in which they apply.

To add one: a pure function here (a penalty: in `penalties.py`), one row in the table, and its field in `SamplingParams`. Every
function takes f32 `(V,)` logits, where -inf means removed, and returns a new row of them; every cut leaves at least one token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from exl2nb.core.errors import OptionError
from exl2nb.sampling.penalties import allow, ban, dry, logit_bias, mask_ends, repetition_penalty, subtract

if TYPE_CHECKING:
    from exl2nb.sampling.params import SamplingParams
    from exl2nb.sampling.sampler_state import SamplerState

COLD_TEMPERATURE = 1e-30  # below this temperature quotients overflow f32
MIN_TEMPERATURE = 1e-3  # of dynamic temperature, which may not divide by 0


def smoothing(logits: np.ndarray, factor: float, curve: float = 1.0) -> np.ndarray:
    """Replace a logit that lies d >= 0 below the highest by `-factor * (k * d**2 + s * d**3)`, k = (3 - curve) / 2, s = (curve - 1) / 2.

    Ranks do not change, and the best token becomes 0.

    Args:
        factor: more than 0; larger is sharper.
        curve: 1 (a pure parabola) to 3 (a pure cubic).

    Source: smoothing_factor and smoothing_curve of text-generation-webui.

    Example:
        >>> smoothing(np.float32([3, 2, 1]), 0.5).tolist()
        [-0.0, -0.5, -2.0]
    """
    depth = logits.max() - logits
    k, s = np.float32(factor * (3.0 - curve) / 2.0), np.float32(factor * (curve - 1.0) / 2.0)
    bent = depth * depth
    bent *= k + s * depth if s else k
    return np.negative(bent, out=bent)


def temperature(logits: np.ndarray, value: float) -> np.ndarray:
    """Divide by the temperature `value`, more than 0: below 1 sharpens, above 1 flattens. Where f32 overflows, the largest becomes 0."""
    assert value > 0, value
    highest = logits.max().astype(np.float64)
    if value >= COLD_TEMPERATURE and abs(highest) / value <= np.finfo(np.float32).max:
        return logits / np.float32(value)
    with np.errstate(over="ignore", invalid="ignore"):
        apart = np.where(logits == highest, 0.0, (logits - highest) / value)
    return np.where(np.isneginf(logits), -np.inf, np.maximum(apart, np.finfo(np.float32).min)).astype(np.float32)


def top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Remove every token whose logit is below the k-th largest; tokens equal to it stay, so ties may keep more than k.

    Args:
        k: at least 1; more than V keeps all.

    Example:
        >>> top_k(np.float32([1, 3, 3, 0]), 1).tolist()
        [-inf, 3.0, 3.0, -inf]
    """
    assert k >= 1, k
    at = max(0, logits.shape[0] - k)
    return np.where(logits < np.partition(logits, at)[at], np.float32(-np.inf), logits)


def top_p(logits: np.ndarray, p: float, *, left_out: float = 0.0) -> np.ndarray:
    """Remove the least probable tokens as long as their total stays at or below 1 - p; the token that crosses p is kept.

    Tokens as probable as the last one kept stay too, so the order of the vocabulary does not matter.

    Args:
        p: more than 0, at most 1.
        left_out: probability of less probable tokens that `preselect` has taken away already; counts as removed.

    Example:
        >>> np.isfinite(top_p(np.log(np.float32([0.05, 0.5, 0.15, 0.3])), 0.6)).tolist()
        [False, True, False, True]
    """
    values = np.sort(logits)
    weights = np.exp(values - values[-1])
    below = weights.cumsum(dtype=np.float64)
    limit = (1.0 - p - left_out) / (1.0 - left_out) * below[-1]
    removed = min(int(below.searchsorted(limit, side="right")), len(values) - 1)
    return np.where(logits < values[removed], np.float32(-np.inf), logits)


def top_a(logits: np.ndarray, a: float, *, left_out: float = 0.0) -> np.ndarray:
    """Remove tokens less probable than `a` times the square of the highest probability.

    Args:
        a: 0 to 1.
        left_out: as of `top_p`.

    Source: KoboldAI's top-a sampling, after BlinkDL.

    Example: the floor is 0.5 * 0.5**2 = 0.125.
        >>> np.isfinite(top_a(np.log(np.float32([0.5, 0.3, 0.15, 0.05])), 0.5)).tolist()
        [True, True, True, False]
    """
    relative = np.exp(logits - logits.max())
    total = float(relative.sum(dtype=np.float64)) / (1.0 - left_out)
    return np.where(relative < np.float32(a / total), np.float32(-np.inf), logits)


def min_p(logits: np.ndarray, share: float) -> np.ndarray:
    """Remove tokens less probable than `share` (0 to 1) times the most probable one."""
    relative = np.exp(logits - logits.max())  # the sum of softmax cancels
    return np.where(relative < np.float32(share), np.float32(-np.inf), logits)


def tail_free(logits: np.ndarray, z: float) -> np.ndarray:
    """Keep the tokens before the share `z` of the curvature of the sorted probabilities is used up.

    With probabilities p sorted from high to low, the curvature at i is `|p[i] - 2 p[i + 1] + p[i + 2]|`, normalised to a sum of 1. Token 0
    stays, token i + 1 stays while the sum up to curvature i is at most z. Fewer than three tokens, or a straight line, are left alone; so
    are tokens as probable as the last one kept.

    Args:
        z: more than 0, at most 1.

    Source: Bricken, "Tail Free Sampling", 2019, with the cut centred as in its reference code.
    """
    values = np.sort(logits[logits > -np.inf])[::-1]
    if len(values) < 3:
        return logits.copy()
    probs = np.exp(values.astype(np.float64) - values[0])
    curvature = np.abs(np.diff(probs, 2))
    total = float(curvature.sum())
    if total <= 1e-12 * probs[0]:
        return logits.copy()
    kept = 1 + int((curvature.cumsum() / total).searchsorted(z, side="right"))
    return np.where(logits < values[min(kept, len(values) - 1) - 1], np.float32(-np.inf), logits)


def typical(logits: np.ndarray, mass: float) -> np.ndarray:
    """Sort tokens by `| -log p - H |`, H the entropy, and keep them until their probability reaches `mass`, the crossing one included.

    Tokens as far away as the last one kept stay too, so the order of the vocabulary does not matter. The most probable token may go.

    Args:
        mass: more than 0, at most 1.

    Source: Meister et al., "Locally Typical Sampling", 2022; TypicalLogitsWarper of Transformers.

    Example: the entropy is 1.14 nats, that of a token of probability 0.32.
        >>> np.isfinite(typical(np.log(np.float32([0.5, 0.3, 0.15, 0.05])), 0.6)).tolist()
        [True, True, False, False]
    """
    alive = np.flatnonzero(logits > -np.inf)
    shifted = logits[alive].astype(np.float64)
    shifted -= shifted.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    entropy = np.log(total) - float((weights * shifted).sum()) / total
    probs = weights / total
    # Tokens this improbable lie further from H than any probable one and weigh less than 1 - mass together: no need to sort them.
    few = np.flatnonzero(probs >= min((1.0 - mass) / len(probs), np.exp(-2.0 * entropy)) * 0.999)
    distance = np.abs(np.log(total) - shifted[few] - entropy)
    order = distance.argsort(kind="stable")
    reached = int(probs[few][order].cumsum().searchsorted(mass, side="left"))
    limit = distance[order[min(reached, len(order) - 1)]]
    out = np.full_like(logits, -np.inf)
    kept = alive[few[distance <= limit]]
    out[kept] = logits[kept]
    return out


def mirostat(logits: np.ndarray, mu: float) -> np.ndarray:
    """Remove tokens whose surprise `-log2 p` is above `mu` bits, which belongs to the request's state, see `next_mu`.

    Source: Basu et al., "Mirostat", 2021; version 2 of the authors' code.
    """
    relative = np.exp(logits - logits.max())
    floor = min(2.0**-mu * float(relative.sum(dtype=np.float64)), 1.0)
    return np.where(relative < np.float32(floor), np.float32(-np.inf), logits)


def next_mu(mu: float, prob: float, tau: float, eta: float) -> float:
    """The limit after a token whose probability, among those it was drawn from, was `prob`: `mu - eta * (-log2(prob) - tau)`.

    Example:
        >>> next_mu(10.0, 0.25, 5.0, 0.1)
        10.3
    """
    return mu - eta * (-float(np.log2(max(prob, 1e-300))) - tau)


def dynamic_temperature(logits: np.ndarray, low: float, high: float, exponent: float) -> np.ndarray:
    """Divide by `entropy_temperature` of the tokens that are left.

    Args:
        low: temperature where one token has all the probability.
        high: temperature where all tokens left are equally probable.
        exponent: of the share of entropy between the two.
    """
    return logits / np.float32(entropy_temperature(logits, low, high, exponent))


def entropy_temperature(logits: np.ndarray, low: float, high: float, exponent: float) -> float:
    """`low + (high - low) * (H / log n) ** exponent` with the entropy H of the n tokens left, at least `MIN_TEMPERATURE`.

    Source: dynamic temperature sampling as in KoboldCpp and text-generation-webui.

    Example:
        >>> entropy_temperature(np.float32([0, 0, -np.inf]), 0.5, 1.5, 1.0)
        1.5
    """
    alive = logits[logits > -np.inf].astype(np.float64)
    if len(alive) < 2:
        return max(low, MIN_TEMPERATURE)
    shifted = alive - alive.max()
    weights = np.exp(shifted)
    total = weights.sum()
    entropy = np.log(total) - float((weights * shifted).sum() / total)
    share = min(1.0, max(0.0, float(entropy / np.log(len(alive)))))
    return max(low + (high - low) * share**exponent, MIN_TEMPERATURE)


def xtc(logits: np.ndarray, probability: float, threshold: float, protected: np.ndarray | None = None) -> np.ndarray:
    """Mix two distributions: with `probability` the one without the top choices, otherwise the given one.

    The top choices are the tokens of at least `threshold`, except the least probable of them. Flipping a coin per token and drawing from
    one of the two is the same as drawing from their mixture, which needs no second random number and can be looked at.

    Args:
        probability: of leaving them out, 0 to 1.
        threshold: probability from which on a token is a top choice; above 0.5 there is never more than one, so nothing happens.
        protected: ids that are never left out (end of text, line breaks).

    Returns:
        Logits of the mixture, up to a constant; -inf where a token is removed for certain.

    Source: "Exclude Top Choices", text-generation-webui, 2024.

    Example:
        >>> mixed = xtc(np.log(np.float32([0.05, 0.5, 0.15, 0.3])), 1.0, 0.1)
        >>> (np.exp(mixed) / np.exp(mixed).sum()).round(3).tolist()
        [0.25, 0.0, 0.75, 0.0]
    """
    weights = np.exp((logits - logits.max()).astype(np.float64))
    probs = weights / weights.sum()
    top = (probs >= threshold) & (logits > -np.inf)
    if protected is not None and len(protected):
        top[protected] = False
    if np.count_nonzero(top) < 2:
        return logits
    removed = top & (probs > probs[top].min())
    if not removed.any():
        return logits
    with np.errstate(divide="ignore"):
        less = np.float32(np.log(1.0 - probability))
    more = np.float32(np.log(1.0 - probability + probability / float(probs[~removed].sum())))
    return logits + np.where(removed, less, more)


def skew(logits: np.ndarray, value: float) -> np.ndarray:
    """Raise the cumulative distribution over tokens sorted from high to low to the power `exp(value)`.

    That is the distribution one gets from drawing with `u ** exp(-value)` in place of a uniform u from the sorted tokens, written as
    probabilities, so that the draw itself stays what it is. Positive values favour the less probable. Tokens of the same probability
    count in order of id.

    Args:
        value: 0 changes nothing.

    Example:
        >>> np.exp(skew(np.log(np.float32([0.5, 0.5])), np.log(2))).round(3).tolist()
        [0.25, 0.75]
    """
    alive = np.flatnonzero(logits > -np.inf)
    order = alive[np.argsort(-logits[alive], kind="stable")]
    weights = np.exp((logits[order] - logits[order[0]]).astype(np.float64))
    power = np.exp(value)
    total = weights.sum()
    below = np.concatenate(([0.0], weights.cumsum() / total))
    below[-1] = 1.0
    # F**k - (F - p)**k, by way of p / F: exact also where the two are nearly equal
    share = np.minimum(weights / total / below[1:], 1.0)
    with np.errstate(divide="ignore"):
        new = power * np.log(below[1:]) + np.log(-np.expm1(power * np.log1p(-share)))
    out = np.full_like(logits, -np.inf)
    out[order] = new
    return out


class Candidates(NamedTuple):
    """The tokens whose logits a filter gets. ids: int64 ascending, None = the whole vocabulary. left_out: probability of the others."""

    ids: np.ndarray | None = None
    left_out: float = 0.0

    def indices_of(self, ids: np.ndarray) -> np.ndarray:
        """Indices into the row of those of `ids` that are among the candidates."""
        if self.ids is None:
            return ids
        at = self.ids.searchsorted(ids).clip(max=len(self.ids) - 1)
        return at[self.ids[at] == ids]


ALL_TOKENS = Candidates()


class Filter(NamedTuple):
    """One filter of the chain.

    name: also in `SamplingParams.order`. apply: (f32 `(n,)` logits, state, candidates) -> f32 `(n,)`, -inf where a token is removed;
    penalties always get the whole vocabulary. fields: of SamplingParams, that it reads. about: what it does, in one line. switched_by: the
    field that turns it on where it differs from its neutral default; "" = the first of `fields`.
    """

    name: str
    apply: Callable[[np.ndarray, SamplerState, Candidates], np.ndarray]
    fields: tuple[str, ...]
    about: str = ""
    switched_by: str = ""

    @property
    def switch(self) -> str:
        """The field that turns the filter on."""
        return self.switched_by or self.fields[0]

    def active(self, params: SamplingParams) -> bool:
        """Whether a request's params switch it on."""
        return getattr(params, self.switch) != params.__dataclass_fields__[self.switch].default


def _dry(x: np.ndarray, s: SamplerState, _: Candidates) -> np.ndarray:
    p, history = s.params, s.history.ids
    lengths = {"allowed_length": p.dry_allowed_length, "max_ngram": p.dry_max_ngram}
    ids = history[-p.dry_range :] if p.dry_range else history
    return dry(x, ids, multiplier=p.dry_multiplier, base=p.dry_base, breakers=s.breakers, **lengths)


def without_padding(logits: np.ndarray, columns: int) -> np.ndarray:
    """A copy with -inf from place `columns` on."""
    out = logits.copy()
    out[columns:] = -np.inf
    return out


# Before every chain of a model with more logits than its tokenizer has tokens. Ops that draw take `columns` instead.
PADDING_FILTER = Filter("padding", lambda x, s, _: without_padding(x, s.columns), ())

# The grammar's mask, before every chain of a request that has a grammar.
CONSTRAINT_FILTER = Filter("constraint", lambda x, s, _: s.allowed().masked(x), (), "keeps the tokens that the grammar allows here")

# What cannot be chosen at all. Always first, and always in force.
MASK_FILTERS: tuple[Filter, ...] = (
    Filter("allowed_tokens", lambda x, s, _: allow(x, s.ids_of("allowed_tokens")), ("allowed_tokens",), "keeps the tokens of a list"),
    Filter("banned_tokens", lambda x, s, _: ban(x, s.ids_of("banned_tokens")), ("banned_tokens",), "removes the tokens of a list"),
    Filter(
        "min_tokens",
        lambda x, s, _: mask_ends(x, s.end_ids) if s.too_short else x,
        ("min_tokens",),
        "bans the end tokens up to the minimum length",
    ),
)

# On raw logits; greedy takes the best token after them.
_RANGE_PARAMS = ("penalty_range", "penalty_decay")
_DRY_PARAMS = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "dry_max_ngram")
PENALTY_FILTERS: tuple[Filter, ...] = (
    Filter(
        "repetition_penalty",
        lambda x, s, _: repetition_penalty(x, *s.repeated()),
        ("repetition_penalty", *_RANGE_PARAMS),
        "divides the logits of tokens already in the text",
    ),
    Filter(
        "presence_penalty",
        lambda x, s, _: subtract(x, *s.present()),
        ("presence_penalty", "penalty_prompt", *_RANGE_PARAMS),
        "subtracted once from tokens already generated",
    ),
    Filter(
        "frequency_penalty",
        lambda x, s, _: subtract(x, *s.frequent()),
        ("frequency_penalty", "penalty_prompt", *_RANGE_PARAMS),
        "subtracted for every occurrence in the generated text",
    ),
    Filter("dry", _dry, _DRY_PARAMS, "penalises tokens that would extend a repeated sequence; grows with its length"),
    Filter(
        "logit_bias",
        lambda x, s, _: logit_bias(x, s.ids_of("logit_bias"), s.bias),
        ("logit_bias",),
        "added to the logits of chosen tokens",
    ),
)

# The order of Transformers; other filters stand where their authors put them.
CUT_FILTERS: tuple[Filter, ...] = (
    Filter(
        "smoothing",
        lambda x, s, _: smoothing(x, s.params.smoothing_factor, s.params.smoothing_curve),
        ("smoothing_factor", "smoothing_curve"),
        "quadratic transform around the top logit",
    ),
    Filter(
        "temperature",
        lambda x, s, _: temperature(x, s.params.temperature),
        ("temperature",),
        "divides the logits: below 1 sharper, above 1 flatter",
    ),
    Filter("top_k", lambda x, s, _: top_k(x, s.params.top_k), ("top_k",), "keeps the k most likely tokens"),
    Filter(
        "top_p",
        lambda x, s, v: top_p(x, s.params.top_p, left_out=v.left_out),
        ("top_p",),
        "keeps the most likely tokens up to a total probability of p",
    ),
    Filter(
        "top_a",
        lambda x, s, v: top_a(x, s.params.top_a, left_out=v.left_out),
        ("top_a",),
        "keeps tokens above a × (top probability)²",
    ),
    Filter("min_p", lambda x, s, _: min_p(x, s.params.min_p), ("min_p",), "keeps tokens above p × the top probability"),
    Filter("tail_free", lambda x, s, _: tail_free(x, s.params.tfs), ("tfs",), "removes the flat tail of the distribution"),
    Filter("typical", lambda x, s, _: typical(x, s.params.typical_p), ("typical_p",), "keeps tokens whose surprise is near the entropy"),
    Filter(
        "mirostat",
        lambda x, s, _: mirostat(x, s.mu),
        ("mirostat_tau", "mirostat_eta"),
        "keeps the surprise of the text near a target",
        "mirostat",
    ),
    Filter(
        "dynamic_temperature",
        lambda x, s, _: dynamic_temperature(x, s.params.min_temp, s.params.max_temp, s.params.temp_exponent),
        ("min_temp", "max_temp", "temp_exponent"),
        "sets the temperature from the entropy",
        "max_temp",
    ),
    Filter(
        "xtc",
        lambda x, s, v: xtc(x, s.params.xtc_probability, s.params.xtc_threshold, v.indices_of(s.protected)),
        ("xtc_probability", "xtc_threshold"),
        "sometimes removes every token above the threshold but the least likely of them",
    ),
    Filter("skew", lambda x, s, _: skew(x, s.params.skew), ("skew",), "favours less (> 0) or more (< 0) likely tokens"),
)
CHAIN = MASK_FILTERS + PENALTY_FILTERS + CUT_FILTERS
FILTER_NAMES = tuple(f.name for f in PENALTY_FILTERS + CUT_FILTERS)
FILTER_SWITCHES = frozenset(f.switch for f in CHAIN)
"""The fields of `SamplingParams` that turn a filter on."""
FILTER_DESCRIPTIONS = {
    "logits": "the model's raw output",
    **{f.name: f.about for f in (CONSTRAINT_FILTER, *CHAIN)},
    "greedy": "the most likely token; no random number",
}
"""What each step of a chain does, in one line."""
LAST_TEMPERATURE = "dynamic_temperature"  # `temperature_last` puts temperature here


def ordered(filters: tuple[Filter, ...], params: SamplingParams) -> tuple[Filter, ...]:
    """Penalties or cuts in the order of `params`."""
    if params.order is not None:
        known = {f.name: f for f in filters}
        return tuple(known[name] for name in params.order if name in known)
    if params.temperature_last:
        moved = [f for f in filters if f.name != "temperature"]
        at = next((i for i, f in enumerate(moved) if f.name == LAST_TEMPERATURE), None)
        if at is not None:
            moved.insert(at, next(f for f in filters if f.name == "temperature"))
        return tuple(moved)
    return filters


def active_filters(params: SamplingParams) -> tuple[Filter, ...]:
    """The filters a request goes through, in order; the cuts do not apply to a greedy one. A grammar's mask comes before all of them."""
    filters = MASK_FILTERS + ordered(PENALTY_FILTERS, params) + (() if params.greedy else ordered(CUT_FILTERS, params))
    return tuple(f for f in filters if f.active(params))


def checked_order(params: SamplingParams) -> tuple[str, ...]:
    """`params.order` as a tuple.

    Raises:
        OptionError: an unknown or repeated name, a cut before a penalty, or an active filter that is missing.
    """
    order = params.order
    if isinstance(order, str) or not isinstance(order, (tuple, list)):
        raise OptionError(f"order is {order!r}; expected a list of names of filters: {', '.join(FILTER_NAMES)}")
    for name in order:
        if name not in FILTER_NAMES:
            raise OptionError(f"order holds {name!r}; known: {', '.join(FILTER_NAMES)} (masks always come first)")
    if len(set(order)) < len(order):
        raise OptionError(f"order is {list(order)}; expected each filter once")
    penalties = {f.name for f in PENALTY_FILTERS}
    if [n in penalties for n in order] != sorted((n in penalties for n in order), reverse=True):
        raise OptionError(f"order is {list(order)}; expected penalties ({', '.join(f.name for f in PENALTY_FILTERS)}) before the others")
    missing = [f.name for f in PENALTY_FILTERS + CUT_FILTERS if f.active(params) and f.name not in order]
    if missing:
        raise OptionError(f"order leaves out {', '.join(missing)}, which the settings switch on; add it, or switch it off")
    return tuple(order)


def filters_of(state: SamplerState, vocab_size: int) -> tuple[Filter, ...]:
    """The filters of a request in order, masks of the model's padding and of the grammar included."""
    padding = (PADDING_FILTER,) if is_padded(state, vocab_size) else ()
    return (*padding, *((CONSTRAINT_FILTER,) if state.constraint is not None else ()), *state.chain.filters)


def is_padded(state: SamplerState, vocab_size: int) -> bool:
    """Whether a row of `vocab_size` logits ends in columns that have no token."""
    return state.columns is not None and state.columns < vocab_size
