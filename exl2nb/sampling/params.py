"""The options of sampling, as frozen, checked data. Holds no state: random numbers and history belong to the request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_flag, check_range, make, shown
from exl2nb.core.show import facts

if TYPE_CHECKING:
    from exl2nb.sampling.replay import Draw

MAX_SEED = 2**64 - 1
MAX_ID = 2**31 - 1
DRY_BREAKERS = (".", ",", "!", "?", "<", ">", "[", "]", "(", ")", "{", "}", "\n", "\t", '"')
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "min_temp": (0.0, 100.0),
    "max_temp": (0.0, 100.0),
    "temp_exponent": (0.01, 100.0),
    "smoothing_factor": (0.0, 100.0),
    "smoothing_curve": (1.0, 3.0),
    "top_p": (0.0, 1.0),
    "top_a": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "tfs": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 10.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "skew": (-10.0, 10.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 10.0),
}
INTEGERS: dict[str, tuple[int, int]] = {
    "top_k": (0, 2**31 - 1),
    "penalty_range": (0, 2**31 - 1),
    "penalty_decay": (0, 2**31 - 1),
    "dry_allowed_length": (1, 1000),
    "dry_range": (0, 2**31 - 1),
    "dry_max_ngram": (1, 1000),
    "min_tokens": (0, 2**31 - 1),
}
# What a device can draw by itself; all else is applied to rows on the host. logit_bias is a plain sum on the row before it.
DEVICE_FIELDS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed"}
)
PRESETS: dict[str, dict[str, Any]] = {
    "neutral": {},
    "greedy": {"temperature": 0.0},
    "precise": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "balanced": {"temperature": 0.8, "top_p": 0.9},
    "open": {"min_p": 0.08},
    "creative": {"min_p": 0.02, "temperature": 1.1, "xtc_probability": 0.5, "dry_multiplier": 0.8},
    "exllamav2": {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.025},
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; every default is neutral, so `SamplingParams()` draws from the model's own distribution.

    Filters apply in the order of `filters.CHAIN`, which extends that of Transformers; `filters.active_filters` lists those of a request.
    Definitions: `filters.py` and `penalties.py`.

    Masks and penalties, which a greedy request has too:
        allowed_tokens, banned_tokens: ids; only these, and not these. min_tokens: the text cannot end before this many new tokens.
        repetition_penalty: logits of tokens of prompt and text are divided (positive) or multiplied (negative) by it; 1 = none.
        presence_penalty, frequency_penalty: subtracted once, and once per occurrence, from logits of tokens of the new text; 0 = none.
        penalty_prompt: presence and frequency penalties count the tokens of the prompt, too, as exllamav2 and text-generation-webui do;
        OpenAI's, and the default here, are about the new text alone.
        penalty_range: the three count the last tokens only (0 = all); penalty_decay: over this many earlier ones they fade to nothing.
        dry_multiplier (0 = off), dry_base, dry_allowed_length, dry_range (0 = all), dry_max_ngram, dry_breakers (texts or ids):
        tokens that would repeat a sequence lose multiplier * base ** (its length - allowed length). logit_bias: id -> number added.

    Cuts, which need a random number:
        smoothing_factor (0 = off), smoothing_curve: logits bent around the best one. temperature: logits are divided by it; 0 = greedy.
        top_k (0 = all), top_p (1), top_a (0), min_p (0), tfs (1), typical_p (1): each removes improbable or untypical tokens.
        mirostat, mirostat_tau, mirostat_eta: hold the surprise of the text at tau bits. min_temp, max_temp (0 = off), temp_exponent:
        temperature by entropy, instead of `temperature`. temperature_last: divide by the temperature after the cuts. xtc_probability
        (0 = off), xtc_threshold, xtc_ignore (ids; None = end of text and line breaks): leave out the most obvious choices.
        skew: draw towards the less (positive) or more probable.

    seed: fixes the random numbers of the request, whatever else runs; None = a fresh one, reported in the completion.
    order: names of filters, to apply them in another order; must hold every one that is switched on. Masks stay first.
    post_sampling: functions that see each `Draw` and may return another id.

    Raises:
        OptionError: a value out of range, or two that contradict each other.

    Example:
        >>> SamplingParams(temperature=0.7, top_p=0.9).greedy
        False
    """

    temperature: float = 1.0
    temperature_last: bool = False
    min_temp: float = 0.0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    smoothing_factor: float = 0.0
    smoothing_curve: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_a: float = 0.0
    min_p: float = 0.0
    tfs: float = 1.0
    typical_p: float = 1.0
    mirostat: bool = False
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_ignore: tuple[int, ...] | None = None
    skew: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_range: int = 0
    penalty_decay: int = 0
    penalty_prompt: bool = False
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_max_ngram: int = 50
    dry_breakers: tuple[str | int, ...] = DRY_BREAKERS
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_tokens: tuple[int, ...] = ()
    allowed_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    order: tuple[str, ...] | None = None
    post_sampling: tuple[Callable[[Draw], int | None], ...] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            check_range(name, getattr(self, name), low, high)
        for name, (low, high) in INTEGERS.items():
            check_integer(name, getattr(self, name), low, high)
        for name in ("temperature_last", "mirostat", "penalty_prompt"):
            check_flag(name, getattr(self, name))
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED)
        self._normalise()
        self._check_together()

    def _normalise(self) -> None:
        put, given = object.__setattr__, self.allowed_tokens
        for name in ("banned_tokens", "allowed_tokens", *(("xtc_ignore",) if self.xtc_ignore is not None else ())):
            put(self, name, _ids(name, getattr(self, name)))
        if not isinstance(given, tuple) and not self.allowed_tokens:
            raise OptionError("allowed_tokens is empty, which leaves nothing to choose from; expected token ids, or leave it out")
        put(self, "logit_bias", _bias(self.logit_bias))
        put(self, "dry_breakers", _breakers(self.dry_breakers))
        hooks = (self.post_sampling,) if callable(self.post_sampling) else self.post_sampling
        if not isinstance(hooks, (tuple, list)) or not all(map(callable, hooks)):
            raise OptionError(f"post_sampling is {str(hooks)[:80]}; expected a function of a Draw, or several")
        put(self, "post_sampling", tuple(hooks))
        if self.order is not None:
            from exl2nb.sampling.filters import checked_order

            put(self, "order", checked_order(self))

    def _check_together(self) -> None:
        for name in ("top_p", "tfs", "typical_p"):
            if getattr(self, name) == 0.0:
                hint = "for the most probable token use temperature=0" if name == "top_p" else "leave it out to switch it off"
                raise OptionError(f"{name} is 0; expected more than 0 and at most 1 (1 = off); {hint}")
        if self.min_temp > self.max_temp:
            raise OptionError(f"min_temp is {self.min_temp} and max_temp {self.max_temp}; expected min_temp <= max_temp (0 and 0 = off)")
        if self.max_temp > 0 and self.temperature not in (0.0, 1.0):
            raise OptionError(
                f"temperature is {self.temperature} and max_temp {self.max_temp}; dynamic temperature takes the place of temperature: "
                "set one of them"
            )
        if self.temperature_last and self.order is not None:
            raise OptionError("temperature_last and order are both given; put 'temperature' into order, where it should apply")
        if self.penalty_decay and not self.penalty_range:
            raise OptionError(f"penalty_decay is {self.penalty_decay} and penalty_range 0 (all tokens); set the range after which it fades")
        if both := set(self.banned_tokens) & set(self.allowed_tokens):
            raise OptionError(f"tokens {sorted(both)[:8]} are both allowed and banned; take them out of one of the two")

    @classmethod
    def of(cls, *, where: str = "SamplingParams", **kwargs: Any) -> SamplingParams:
        """Build from keywords; an unknown one is an OptionError that names the nearest known one."""
        return make(cls, kwargs, where=where)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> SamplingParams:
        """A set of settings by name, with changes.

        "greedy", "neutral" (the defaults), "precise", "balanced", "open" (min_p alone), "creative" (min_p, XTC and DRY), "exllamav2" (what
        its unset settings mean).

        Example:
            >>> SamplingParams.preset("balanced", seed=1).top_p
            0.9
        """
        if name not in PRESETS:
            raise OptionError(f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}")
        return cls.of(where=f"preset {name!r}", **{**PRESETS[name], **changes})

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.changed.items())})"

    def _repr_html_(self) -> str:
        from exl2nb.sampling.filters import active_filters

        rows = {"seed": "a fresh one for each answer" if self.seed is None else str(self.seed)}
        for used in active_filters(self):
            set_fields = {name: str(getattr(self, name))[:60] for name in used.fields if getattr(self, name) != _DEFAULTS[name]}
            rows[used.name] = ", ".join(value if name == used.name else f"{name} {value}" for name, value in set_fields.items()) or "on"
        rows["draw"] = "greedy: the most probable token" if self.greedy else "by a random number"
        return facts("sampling, in the order in which it applies", rows)

    @property
    def greedy(self) -> bool:
        """True where no random number is drawn."""
        return self.temperature == 0.0

    @cached_property
    def changed(self) -> dict[str, Any]:
        """The fields that differ from their neutral defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def device_ready(self) -> bool:
        """True where temperature, top_k, top_p, min_p, the three penalties and logit_bias, in their own order, are all there is."""
        return DEVICE_FIELDS.issuperset(self.changed)

    def check_vocabulary(self, vocab_size: int, *, where: str = "SamplingParams") -> None:
        """Raise OptionError for an id that a model of `vocab_size` tokens does not have."""
        ids = (*self.banned_tokens, *self.allowed_tokens, *(self.xtc_ignore or ()), *(i for i, _ in self.logit_bias))
        breakers = (i for i in self.dry_breakers if isinstance(i, int))
        wrong = next((i for i in (*ids, *breakers) if i >= vocab_size), None)
        if wrong is not None:
            raise OptionError(f"{where}: token {wrong} is not in the model's vocabulary; expected ids from 0 to {vocab_size - 1}")


_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise OptionError unless `value` is an integer (a bool is none) with `low <= value <= high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name} is {shown(value)}; expected an integer from {low} to {high}")


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise OptionError(f"{name} is {str(value)[:80]!r}; expected a list of token ids")
    ids = tuple(value)
    for one in ids:
        check_integer(name, one, 0, MAX_ID)
    return tuple(sorted(set(ids)))


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(i, b) for i, b in (value.items() if isinstance(value, Mapping) else value)]
    except (TypeError, ValueError):
        raise OptionError(f"logit_bias is {str(value)[:80]!r}; expected a dict from token id to the number added to its logit") from None
    for one, bias in pairs:
        check_integer("logit_bias", one, 0, MAX_ID)
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or abs(bias) > 1000 or not math.isfinite(bias):
            raise OptionError(f"logit_bias of token {one} is {shown(bias)}; expected -1000 to 1000 (to exclude it: banned_tokens)")
    if len({i for i, _ in pairs}) < len(pairs):
        raise OptionError("logit_bias holds a token twice; give each token one number")
    return tuple(sorted((int(i), float(b)) for i, b in pairs))


def _breakers(value: Any) -> tuple[str | int, ...]:
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise OptionError(f"dry_breakers is {str(value)[:80]!r}; expected texts or token ids")
    values: tuple[str | int, ...] = (value,) if isinstance(value, str) else tuple(value)
    for one in values:
        if not (isinstance(one, str) and one) and (isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MAX_ID):
            raise OptionError(f"dry_breakers holds {one!r}; expected texts (none of them empty) or token ids")
    return values
