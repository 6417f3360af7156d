"""What a caller may ask of sampling, as frozen, checked data. Holds no state: random numbers and history belong to the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_range, make

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; every default is neutral, so `SamplingParams()` draws from the model's own distribution.

    temperature: logits are divided by it; 0 means greedy, the most probable token every time (top_k, top_p and min_p then have no effect).
    top_k: keep the k most probable tokens; 0 = all. top_p: keep the smallest set of most probable tokens whose probability reaches top_p;
    1 = all. min_p: keep tokens with at least min_p times the highest probability; 0 = all. repetition_penalty: logits of tokens that stand
    in the prompt or the text so far are divided (positive) or multiplied (negative) by it; 1 = none. seed: fixes the random numbers of
    the request, whatever else runs beside it; None = a fresh one, reported in the completion.

    The filters apply in the order of `chain.CHAIN`, which is the order and the definition of Transformers.

    Raises:
        OptionError: a value out of range.

    Example:
        >>> SamplingParams(temperature=0.7, top_p=0.9).greedy
        False
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 100.0)
        check_integer("top_k", self.top_k, 0, 2**31 - 1)
        check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise OptionError("top_p is 0; expected more than 0 and at most 1 (1 = off); for the most probable token use temperature=0")
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED)

    @classmethod
    def of(cls, *, where: str = "SamplingParams", **kwargs: Any) -> SamplingParams:
        """Build from keywords; an unknown one is an OptionError that names the nearest known one."""
        return make(cls, kwargs, where=where)

    @property
    def greedy(self) -> bool:
        """True where no random number is drawn."""
        return self.temperature == 0.0


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise OptionError unless `value` is an integer (a bool is none) with `low <= value <= high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name} is {value!r}; expected an integer from {low} to {high}")
