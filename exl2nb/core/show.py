"""How results look: small HTML tables without scripts, sizes, and the colours of bit widths.

The page's colours and units are generated from the constants here.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise

SIZE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
BIT_COLOURS = (
    (2.0, (254, 240, 190)),
    (3.0, (190, 222, 150)),
    (4.0, (112, 190, 150)),
    (5.0, (52, 140, 150)),
    (6.0, (45, 90, 140)),
    (8.0, (58, 34, 102)),
)
"""Light to dark, readable with black text at the light end and white at the dark end."""
DIVERGING_COLOURS = ((186, 40, 50), (242, 242, 242), (30, 84, 170))
"""Of -2, 0 and 2."""


def facts(caption: str, rows: Mapping[str, str]) -> str:
    """A caption over one line per fact. All text is data, never HTML.

    Example:
        >>> facts("a <b>", {"layers": "12"})
        "<table><caption>a &lt;b&gt;</caption><tr><th style='text-align:left'>layers</th><td style='text-align:left'>12</td></tr></table>"
    """
    lines = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table><caption>{html.escape(caption)}</caption>{lines}</table>"


def size_text(count: int) -> str:
    """Readable bytes: 7.80 MiB."""
    for unit, scale in SIZE_UNITS:
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"


def colour(bits: float) -> tuple[int, int, int]:
    """RGB of a number of bits, interpolated between the anchors."""
    if bits <= BIT_COLOURS[0][0]:
        return BIT_COLOURS[0][1]
    for (low, a), (high, b) in pairwise(BIT_COLOURS):
        if bits <= high:
            t = (bits - low) / (high - low)
            r, g, blue = (round(x + t * (y - x)) for x, y in zip(a, b))
            return r, g, blue
    return BIT_COLOURS[-1][1]


def diverging(difference: float) -> tuple[int, int, int]:
    """RGB of a signed number: red below 0, light at 0, blue above; 2 away is full."""
    low, zero, high = DIVERGING_COLOURS
    share = min(1.0, abs(difference) / 2)
    r, g, blue = (round(x + share * (y - x)) for x, y in zip(zero, low if difference < 0 else high))
    return r, g, blue


def ink(rgb: Sequence[int]) -> tuple[int, int, int]:
    """Black or white, whichever contrasts more with `rgb` (WCAG relative luminance)."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else (255, 255, 255)


def bits_cell(bpw: float, title: str = "", style: str = "") -> str:
    """One cell of an HTML table: bits per weight in their colour. title: shown when pointed at."""
    back = colour(bpw)
    colours = f"background:rgb{back};color:rgb{ink(back)}".replace(" ", "")
    return f'<td title="{html.escape(title, quote=True)}" style="{style}{";" if style else ""}{colours}">{bpw:.1f}</td>'
