"""Names of cache modes: how K and how V are stored. Allocates nothing."""

from __future__ import annotations

import re

from exl2nb.core.errors import OptionError

MODES: dict[str, tuple[str, str]] = {
    "fp32": ("fp32", "fp32"),
    "fp16": ("fp16", "fp16"),
    "fp8": ("fp8", "fp8"),
    "q8": ("q8", "q8"),
    "q6": ("q8", "q4"),
    "q4": ("q4", "q4"),
}
"""Mode -> (storage of K, storage of V). q6 is no 6-bit code: keys lose more accuracy at few bits than values, so K has 8 bits and V 4."""

_WIDTHS = {"4": "q4", "8": "q8", "16": "fp16"}


def parse_mode(mode: object, *, where: str = "cache") -> str:
    """The name of a mode as `MODES` has it, or as "k8v4" where it has none.

    Args:
        mode: a name in `MODES`, or "k<bits>v<bits>" with 4, 8 or 16 bits each, in any case.
        where: the public call, named in the message.

    Raises:
        OptionError: anything else.

    Example:
        >>> parse_mode("k8v4"), parse_mode("K16V8")
        ('q6', 'k16v8')
    """
    name = mode.lower() if isinstance(mode, str) else ""
    if name in MODES:
        return name
    widths = re.fullmatch(r"k(4|8|16)v(4|8|16)", name)
    if not widths:
        known = f"{', '.join(MODES)}, or bits of K and V apart as in k8v4 (4, 8 or 16 each)"
        raise OptionError(f"{where}: unknown cache mode {mode!r}; known: {known}")
    pair = (_WIDTHS[widths[1]], _WIDTHS[widths[2]])
    return next((known for known, stored in MODES.items() if stored == pair), name)


def storages_of(mode: str) -> tuple[str, str]:
    """Storage of K and of V for any name that `parse_mode` takes."""
    name = parse_mode(mode)
    if name in MODES:
        return MODES[name]
    k, v = name[1:].split("v")
    return _WIDTHS[k], _WIDTHS[v]
