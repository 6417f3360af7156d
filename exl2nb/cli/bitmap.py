"""Bit-allocation map of a model: layers across, matrices down, the bits each got. Knows nothing of files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from exl2nb.core.show import colour, ink

_KEY = re.compile(r"\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class BitMap:
    """matrices: names of the rows; layers: numbers of the columns; bits[row][column] is None where a layer has no such matrix."""

    matrices: tuple[str, ...]
    layers: tuple[int, ...]
    bits: tuple[tuple[float | None, ...], ...]

    @classmethod
    def of(cls, bits: Mapping[str, float]) -> BitMap:
        """Arrange module keys such as `model.layers.3.self_attn.q_proj` -> bits per weight; other keys (the head) are left out."""
        cells: dict[tuple[str, int], float] = {}
        for key, value in bits.items():
            if match := _KEY.search(key):
                cells[match[2].split(".")[-1], int(match[1])] = value
        matrices = tuple(dict.fromkeys(name for name, _ in cells))
        layers = tuple(sorted({layer for _, layer in cells}))
        return cls(matrices, layers, tuple(tuple(cells.get((name, layer)) for layer in layers) for name in matrices))


def render_text(map_: BitMap, *, colours: bool = False, columns: int = 100) -> str:
    """The map for a terminal: one decimal a cell where the width allows, else whole bits; coloured cells with `colours`."""
    label = max([6, *(len(name) for name in map_.matrices)])
    fine = label + 1 + 4 * len(map_.layers) <= columns
    cell = 4 if fine else 2
    per_line = max(1, (columns - label - 1) // cell)
    blocks = []
    for first in range(0, len(map_.layers), per_line):
        span = range(first, min(first + per_line, len(map_.layers)))
        numbers = (str(map_.layers[c] if cell > 2 else map_.layers[c] % 10).rjust(cell) for c in span)
        lines = ["layer".ljust(label) + " " + "".join(numbers)]
        for name, row in zip(map_.matrices, map_.bits):
            lines.append(name.ljust(label) + " " + "".join(_cell(row[c], cell, fine, colours) for c in span))
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def _cell(bits: float | None, cell: int, fine: bool, colours: bool) -> str:
    if bits is None:
        return " " * cell
    text = (f"{bits:.1f}" if fine else f"{bits:.0f}").rjust(cell)
    if not colours:
        return text
    rgb = colour(bits)
    return "\033[48;2;{};{};{}m\033[38;2;{};{};{}m{}\033[0m".format(*rgb, *ink(rgb), text)
