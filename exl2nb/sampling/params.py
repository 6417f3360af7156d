"""The options of sampling, as frozen, checked data. Holds no state: random numbers and history belong to the request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_integer, check_options, documented, make, option, options_of, shown
from exl2nb.core.show import facts

if TYPE_CHECKING:
    from exl2nb.sampling.replay import Draw

MAX_SEED = 2**64 - 1
MAX_ID = 2**31 - 1
DRY_BREAKERS = (".", ",", "!", "?", "<", ">", "[", "]", "(", ")", "{", "}", "\n", "\t", '"')
LEAVE_OUT = "leave it out to switch it off"
MAX_COUNT = 2**31 - 1
# What a device can draw by itself; all else is applied to rows on the host. logit_bias is a plain sum on the row before it.
DEVICE_FIELDS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed"}
)
SAMPLING_PRESETS: dict[str, dict[str, Any]] = {
    "neutral": {},
    "greedy": {"temperature": 0.0},
    "precise": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "balanced": {"temperature": 0.8, "top_p": 0.9},
    "open": {"min_p": 0.08},
    "creative": {"min_p": 0.02, "temperature": 1.1, "xtc_probability": 0.5, "dry_multiplier": 0.8},
    "exllamav2": {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.025},
}


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords, with the types that are accepted, for type checkers and editors."""

    temperature: float
    temperature_last: bool
    min_temp: float
    max_temp: float
    temp_exponent: float
    smoothing_factor: float
    smoothing_curve: float
    top_k: int
    top_p: float
    top_a: float
    min_p: float
    tfs: float
    typical_p: float
    mirostat: bool
    mirostat_tau: float
    mirostat_eta: float
    xtc_probability: float
    xtc_threshold: float
    xtc_ignore: Sequence[int] | None
    skew: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_range: int
    penalty_decay: int
    penalty_prompt: bool
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_range: int
    dry_max_ngram: int
    dry_breakers: str | Sequence[str | int]
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    banned_tokens: Sequence[int]
    allowed_tokens: Sequence[int]
    min_tokens: int
    seed: int | None
    order: Sequence[str] | None
    post_sampling: Callable[[Draw], int | None] | Sequence[Callable[[Draw], int | None]]


@documented
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; every default is neutral, so `SamplingParams()` draws from the model's own distribution.

    Filters apply in the order of `filters.CHAIN`, which extends that of Transformers; `filters.active_filters` lists those of a request.
    Masks and penalties apply to a greedy request, too. Cuts need a random number. Definitions: `filters.py` and `penalties.py`.

    Raises:
        OptionError: a value out of range, or two that contradict each other.

    Example:
        >>> SamplingParams(temperature=0.7, top_p=0.9).greedy
        False
    """

    temperature: float = option(
        1.0,
        "0 = always the most probable token (default 1; of a chat: as generation_config.json says, else 0.7)",
        about="logits are divided by it",
        range=(0, 100),
        label="Temperature",
        hint="0 = greedy",
        slider=(0, 2, 0.05),
        common=True,
    )
    temperature_last: bool = option(
        False, "divide by the temperature after the cuts", label="Temperature last", hint="applied after the filters", one_row=False
    )
    min_temp: float = option(
        0.0,
        "dynamic temperature: where the model is sure",
        range=(0, 100),
        label="Min temperature",
        hint="dynamic, at low entropy",
        slider=(0, 4, 0.05),
        one_row=False,
        aliases=("dynatemp_low",),
    )
    max_temp: float = option(
        0.0,
        "dynamic temperature: where it is not; 0 = off",
        about="by the entropy of the distribution, in place of `temperature`",
        range=(0, 100),
        label="Max temperature",
        hint="dynamic, at high entropy; 0 = off",
        slider=(0, 4, 0.05),
        one_row=False,
        aliases=("dynatemp_high",),
    )
    temp_exponent: float = option(
        1.0,
        "dynamic temperature: exponent of the share of entropy",
        range=(0.01, 100),
        label="Temperature exponent",
        hint="dynamic, of the entropy",
        slider=(0.1, 5, 0.1),
        one_row=False,
        aliases=("dynatemp_exponent",),
    )
    smoothing_factor: float = option(
        0.0,
        "quadratic smoothing; 0 = off",
        about="logits are bent around the best one",
        range=(0, 100),
        label="Smoothing factor",
        hint="0 = off",
        slider=(0, 10, 0.1),
    )
    smoothing_curve: float = option(
        1.0,
        "1 = parabola to 3 = cubic",
        range=(1, 3),
        label="Smoothing curve",
        hint="1 = quadratic",
        slider=(1, 3, 0.1),
        one_row=False,
    )
    top_k: int = option(
        0,
        "keep the k most probable tokens; 0 = all",
        range=(0, MAX_COUNT),
        label="Top-k",
        hint="0 = off",
        slider=(0, 200, 1),
        common=True,
    )
    top_p: float = option(
        1.0,
        "keep the most probable tokens up to this probability; 1 = all",
        range=(0, 1),
        not_zero="for the most probable token use temperature=0",
        label="Top-p",
        hint="1 = off",
        slider=(0.05, 1, 0.01),
        common=True,
    )
    top_a: float = option(
        0.0,
        "keep tokens with this share of the best one's probability squared; 0 = all",
        range=(0, 1),
        label="Top-a",
        hint="0 = off",
        slider=(0, 1, 0.01),
    )
    min_p: float = option(
        0.0,
        "keep tokens with this share of the best one's probability; 0 = all",
        range=(0, 1),
        label="Min-p",
        hint="0 = off",
        slider=(0, 0.5, 0.01),
        common=True,
    )
    tfs: float = option(
        1.0,
        "tail-free sampling; 1 = off",
        range=(0, 1),
        not_zero=LEAVE_OUT,
        label="Tail-free",
        hint="1 = off",
        slider=(0.05, 1, 0.01),
        aliases=("tfs_z",),
    )
    typical_p: float = option(
        1.0,
        "keep the tokens of typical surprise up to this probability; 1 = all",
        range=(0, 1),
        not_zero=LEAVE_OUT,
        label="Typical-p",
        hint="1 = off",
        slider=(0.05, 1, 0.01),
        aliases=("typical",),
    )
    mirostat: bool = option(
        False,
        "hold the surprise of the text at mirostat_tau",
        label="Mirostat",
        hint="holds surprise at a target",
        one_row=False,
        server=False,
        flag=False,
    )
    mirostat_tau: float = option(
        5.0,
        "target surprise of the text in bits per token",
        flag_help="target surprise of the text in bits per token; switches mirostat on",
        range=(0, 100),
        label="Mirostat tau",
        hint="target surprise, bits",
        slider=(0, 10, 0.1),
        one_row=False,
    )
    mirostat_eta: float = option(
        0.1,
        "how fast mirostat learns (default 0.1)",
        range=(0, 10),
        label="Mirostat eta",
        hint="learning rate",
        slider=(0, 1, 0.01),
        one_row=False,
    )
    xtc_probability: float = option(
        0.0,
        "leave out the most obvious tokens this often; 0 = never",
        range=(0, 1),
        label="XTC probability",
        hint="chance to exclude top choices; 0 = off",
        slider=(0, 1, 0.05),
    )
    xtc_threshold: float = option(
        0.1,
        "probability from which on a token is obvious (default 0.1)",
        range=(0, 1),
        label="XTC threshold",
        hint="minimum probability of a top choice",
        slider=(0, 0.5, 0.01),
    )
    xtc_ignore: tuple[int, ...] | None = option(
        None, "ids that XTC never leaves out; None = end of text and line breaks", flag=False, server=False
    )
    skew: float = option(
        0.0,
        "over 0: towards the less probable tokens",
        range=(-10, 10),
        label="Skew",
        hint="0 = off; > 0 favours unlikely tokens",
        slider=(-5, 5, 0.1),
    )
    repetition_penalty: float = option(
        1.0,
        "over 1: tokens already seen become less likely",
        about="logits of tokens of prompt and text are divided (positive) or multiplied (negative) by it; 1 = off",
        range=(0.01, 100),
        label="Repetition penalty",
        hint="1 = off",
        slider=(1, 2, 0.05),
        common=True,
        aliases=("rep_pen", "repeat_penalty"),
    )
    presence_penalty: float = option(
        0.0,
        "subtracted once from tokens of the new text",
        range=(-100, 100),
        label="Presence penalty",
        hint="0 = off",
        slider=(-2, 2, 0.1),
    )
    frequency_penalty: float = option(
        0.0,
        "subtracted from them for every occurrence",
        range=(-100, 100),
        label="Frequency penalty",
        hint="0 = off",
        slider=(-2, 2, 0.1),
    )
    penalty_range: int = option(
        0,
        "last tokens that the penalties count; 0 = all",
        range=(0, MAX_COUNT),
        label="Penalty range",
        hint="window in tokens; 0 = all",
        slider=(0, 4096, 1),
        one_row=False,
        aliases=("repetition_range", "repetition_penalty_range", "rep_pen_range", "repeat_last_n"),
    )
    penalty_decay: int = option(
        0,
        "further tokens over which they fade",
        range=(0, MAX_COUNT),
        label="Penalty decay",
        hint="fade-out in tokens after the range",
        slider=(0, 4096, 1),
        one_row=False,
        aliases=("repetition_decay",),
    )
    penalty_prompt: bool = option(
        False,
        "presence and frequency penalties count the prompt, too",
        about="as in exllamav2 and text-generation-webui; OpenAI's, and the default, are about the new text alone",
    )
    dry_multiplier: float = option(
        0.0,
        "penalty for repeating a sequence; 0 = off",
        about="tokens that would repeat a sequence lose multiplier * base ** (its length - allowed length)",
        range=(0, 100),
        label="DRY multiplier",
        hint="penalises repeated sequences; 0 = off",
        slider=(0, 5, 0.1),
        one_row=False,
    )
    dry_base: float = option(
        1.75,
        "its growth per token (default 1.75)",
        range=(1, 10),
        label="DRY base",
        hint="growth per repeated token",
        slider=(1, 4, 0.05),
        one_row=False,
    )
    dry_allowed_length: int = option(
        2,
        "repetitions up to this length are free (default 2)",
        range=(1, 1000),
        label="DRY allowed length",
        hint="longest repeat not penalised",
        slider=(1, 20, 1),
        one_row=False,
    )
    dry_range: int = option(
        0,
        "last tokens that DRY searches for repetitions; 0 = all",
        range=(0, MAX_COUNT),
        label="DRY range",
        hint="window in tokens; 0 = all",
        slider=(0, 4096, 1),
        one_row=False,
        aliases=("dry_penalty_last_n",),
    )
    dry_max_ngram: int = option(
        50,
        "longest repetition that DRY follows (default 50)",
        range=(1, 1000),
        label="DRY max n-gram",
        hint="longest repeat tracked, in tokens",
        slider=(1, 100, 1),
        one_row=False,
    )
    dry_breakers: tuple[str | int, ...] = option(DRY_BREAKERS, "texts or ids that end a repeated sequence", flag=False)
    logit_bias: tuple[tuple[int, float], ...] = option((), "id -> number added to its logit", flag=False)
    banned_tokens: tuple[int, ...] = option((), "ids that are never chosen", flag=False)
    allowed_tokens: tuple[int, ...] = option((), "ids; no other token is chosen", flag=False)
    min_tokens: int = option(
        0,
        "least number of new tokens before the text may end",
        range=(0, MAX_COUNT),
        label="Min tokens",
        hint="no end token before this many",
        slider=(0, 512, 1),
        one_row=False,
        aliases=("min_length",),
    )
    seed: int | None = option(
        None,
        "the same seed gives the same text",
        about="whatever else runs; None = a fresh one, reported in the completion",
        range=(0, MAX_SEED),
        common=True,
        aliases=("sampler_seed",),
    )
    order: tuple[str, ...] | None = option(
        None,
        "names of filters, to apply them in another order",
        about="must hold every one that is switched on; masks stay first",
        flag=False,
        server=False,
    )
    post_sampling: tuple[Callable[[Draw], int | None], ...] = option(
        (), "functions that see each `Draw` and may return another id", flag=False, server=False
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._normalise()
        self._check_combined_values()

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

    def _check_combined_values(self) -> None:
        for name, instead in NOT_ZERO.items():
            if getattr(self, name) == 0.0:
                raise OptionError(f"{name} is 0; expected more than 0 and at most 1 (1 = off); {instead}")
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
        if name not in SAMPLING_PRESETS:
            raise OptionError(f"unknown preset {name!r}; known: {', '.join(sorted(SAMPLING_PRESETS))}")
        return cls.of(where=f"preset {name!r}", **{**SAMPLING_PRESETS[name], **changes})

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.changed.items())})"

    def _repr_html_(self) -> str:
        from exl2nb.sampling.filters import active_filters

        rows = {"seed": "a fresh one for each answer" if self.seed is None else str(self.seed)}
        for used in active_filters(self):
            set_fields = {name: str(getattr(self, name))[:60] for name in used.fields if getattr(self, name) != _PARAM_DEFAULTS[name]}
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


SAMPLING_OPTIONS = options_of(SamplingParams)
"""Everything that is known of each field."""
NOT_ZERO = {name: one.not_zero for name, one in SAMPLING_OPTIONS.items() if one.not_zero}
_PARAM_DEFAULTS = {name: one.default for name, one in SAMPLING_OPTIONS.items()}


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
