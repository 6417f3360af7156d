"""Values for sampling options that a request does not give, as frozen, checked data with their source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exl2nb.sampling.params import SamplingParams

LIBRARY_SOURCE = "exl2nb"
"""Source of the library's own defaults."""
NEEDS_DRAW = ("temperature", "top_p", "top_k", "min_p")
"""Options without effect on a greedy request."""
DEFAULT_NAMES = (*NEEDS_DRAW, "repetition_penalty")
"""Options that may have a default, in the order in which they are shown."""
NEUTRAL_VALUES: dict[str, float] = {name: getattr(SamplingParams, name) for name in DEFAULT_NAMES}
"""Values with which a request samples from the model's own distribution."""


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Values for sampling options that a request does not give.

    Args:
        temperature: as in `SamplingParams`; None = no default.
        top_p: as in `SamplingParams`; None = no default.
        top_k: as in `SamplingParams`; None = no default.
        min_p: as in `SamplingParams`; None = no default.
        repetition_penalty: as in `SamplingParams`; None = no default.
        source: where the values come from, such as "generation_config.json"; "exl2nb" for the library's own values, "" if unknown.

    Raises:
        OptionError: a value is out of range.

    Example:
        >>> defaults = SamplingDefaults(temperature=0.6, top_p=0.95, source="generation_config.json")
        >>> print(defaults.beside({"temperature": 0.3}))
        top_p 0.95 from generation_config.json
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        SamplingParams(**self.values)

    @property
    def values(self) -> dict[str, Any]:
        """The values by name of option; options without a default are missing."""
        return {name: value for name in DEFAULT_NAMES if (value := getattr(self, name)) is not None}

    def __bool__(self) -> bool:
        return bool(self.values)

    def beside(self, options: Mapping[str, Any]) -> SamplingDefaults:
        """Select the values that apply to a request with these options.

        A value does not apply if the request gives the option itself, or gives another option that excludes it: beam search, mirostat,
        a dynamic temperature, or an `order` of filters without it.

        Args:
            options: options of the request. They may be invalid; the request itself is checked later.
        """
        left_out = {name for name in DEFAULT_NAMES if name in options}
        if options.get("beams", 1) != 1:
            left_out.update(DEFAULT_NAMES)
        if options.get("mirostat") is True or _is_zero(options.get("temperature")):
            left_out.update(NEEDS_DRAW)
        if not _is_zero(options.get("max_temp", 0)):
            left_out.add("temperature")
        if isinstance(order := options.get("order"), (list, tuple)):
            left_out.update(name for name in DEFAULT_NAMES if name not in order)
        kept = {name: value for name, value in self.values.items() if name not in left_out}
        return SamplingDefaults(**kept, source=self.source) if kept else NO_DEFAULTS

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:g}" for name, value in self.values.items()) or "none"
        if not self or not self.source:
            return values
        return f"{values} (library default)" if self.source == LIBRARY_SOURCE else f"{values} from {self.source}"


def _is_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and value == 0


NO_DEFAULTS = SamplingDefaults()
CHAT_DEFAULTS = SamplingDefaults(temperature=0.7, top_p=0.95, source=LIBRARY_SOURCE)
"""Defaults of `llm.chat`, the server's chat routes and the Playground for a model that recommends no values."""
