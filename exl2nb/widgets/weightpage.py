"""One unit of a matrix where no script runs: words, scale and weights as an HTML table, the codes as a picture. No Jupyter."""

from __future__ import annotations

import html
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from exl2nb.core.show import diverging, ink
from exl2nb.widgets import static

BIT_PX = 10


def table(title: str, key: str, shown: Mapping[str, Any]) -> str:
    """The words, the scale, and one line per weight."""
    bits, zero = shown["bits"], shown["zero"]
    mono = "font-family:monospace"
    words = " ".join(f"{word:08X}" for word in shown["words"])
    largest = f"{shown['scale_max']:.6g} ({half(shown['scale_max'])})"
    head = ["stored row", "row", "code", "level", "weight", *(["original", "error"] if shown["original"] else [])]
    lines = [
        f"{shown['bits']}-bit codes in words {shown['first_word']} to {shown['first_word'] + bits - 1} of column {shown['column']}: "
        f'<span style="{mono}">{words}</span>',
        f"scale: word {shown['scale_word']:08X}, index {shown['scale_index']}; largest step {largest}; "
        f"step = ({shown['scale_index']} + 1)² × fp16(largest / 256) = {shown['step']:.6g} ({half(shown['step'])})",
    ]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in _rows(shown, zero))
    return (
        f"<div><b>{html.escape(title)}</b> {html.escape(key)}, group {shown['group']}, column {shown['column']}"
        f"{''.join(f'<div>{line}</div>' for line in lines)}"
        f'<table style="font-size:12px;font-variant-numeric:tabular-nums"><tr>{"".join(f"<th>{name}</th>" for name in head)}</tr>{body}'
        "</table></div>"
    )


def _rows(shown: Mapping[str, Any], zero: int) -> list[list[str]]:
    found = []
    for i, (row, code, weight) in enumerate(zip(shown["rows"], shown["codes"], shown["weights"])):
        level = code - zero
        back = diverging(2 * level / zero)
        chip = f'<span style="background:rgb{back};color:rgb{ink(back)};padding:0 .4em">{code}</span>'
        cells = [str(shown["first_row"] + i), str(row), chip, f"{level:+d}" if level else "0", f"{weight:.5g}"]
        if shown["original"]:
            cells += [f"{shown['original'][i]:.5g}", f"{weight - shown['original'][i]:+.2g}"]
        found.append(cells)
    return found


def picture(shown: Mapping[str, Any]) -> bytes:
    """PNG: the words, bit 31 on the left, each field in the colour of its code."""
    colours = field_colours(shown["codes"], shown["bits"], shown["zero"])
    rows = []
    for word in range(shown["bits"]):
        bits = [colours[32 * word + bit] for bit in range(31, -1, -1)]
        line = [dot for colour in bits for dot in (colour,) * BIT_PX]
        rows += [line] * (BIT_PX - 1) + [[(255, 255, 255)] * len(line)]
    return static.png(rows)


def field_colours(codes: Sequence[int], bits: int, zero: int) -> list[static.RGB]:
    """Colour of each of the 32 * bits bits of a unit, in the order of the stream."""
    return [diverging(2 * (code - zero) / zero) for code in codes for _ in range(bits)]


def half(value: float) -> str:
    """The sixteen bits of an fp16 value: "0x3800"."""
    return f"0x{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
