"""Typed reading of a config.json: a key of the wrong type, out of range or missing is a ConfigError that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from exl2nb.core.errors import ConfigError

REQUIRED: Any = object()


class Fields:
    """One JSON object with checked access.

    Every getter takes the key and a `default`; without a default the key must be present. `null` counts as absent.

    Args:
        raw: the parsed object; anything but a mapping is refused.
        where: the file (and path inside it) for messages.

    Raises:
        ConfigError: the value has the wrong type, is outside `low`..`high`, or is missing.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where}: is a {type(raw).__name__}; expected a JSON object")
        self.raw, self.where = raw, where

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ConfigError(f"{self.where}: key {key!r} is missing; this architecture needs it")
        return None

    def refuse(self, key: str, value: object, expected: str) -> ConfigError:
        """The error for a value that cannot be used (raise what this returns)."""
        return ConfigError(f"{self.where}: {key} is {shortened(value)}; expected {expected}")

    def integer(self, key: str, *, low: int, high: int, default: Any = REQUIRED) -> Any:
        """An int in `low`..`high`."""
        value = self._get(key, default)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, *, low: float, high: float, default: Any = REQUIRED) -> Any:
        """A finite number in `low`..`high`, as float."""
        value = self._get(key, default)
        if value is None:
            return default
        # the comparison stays in integers for an int that is too large for a float
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or not low <= value <= high:
            raise self.refuse(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, *, default: Any = REQUIRED) -> Any:
        """True or false."""
        value = self._get(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def text(self, key: str, *, default: Any = REQUIRED) -> Any:
        """A string."""
        value = self._get(key, default)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, value, "a string")
        return value

    def child(self, key: str) -> Fields | None:
        """A nested object, or None where the key is absent, null or empty."""
        value = self.raw.get(key)
        return Fields(value, f"{self.where}: {key}") if value is not None and value != {} else None


def shortened(value: object) -> str:
    """The value as a message shows it: at most 80 characters."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return f"an integer of {value.bit_length()} bits"  # repr of a huge int may itself raise
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
