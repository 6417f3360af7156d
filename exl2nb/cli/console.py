"""Where a command writes: results to stdout, progress and errors to stderr, text laid out (tables, bit maps) or one JSON object."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from exl2nb.core.progress import SilentSink, Sink, TextSink
from exl2nb.core.show import colour, ink

MAX_ERROR_LINE = 2000
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # halves of a pair, which UTF-8 has no bytes for


class Console:
    """Args: `json_mode` prints one JSON object as the result; `quiet` silences progress."""

    def __init__(self, *, json_mode: bool = False, quiet: bool = False, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.json_mode, self.quiet = json_mode, quiet
        # a stream that was closed before Python began is None
        self.out: TextIO = out or sys.stdout or io.StringIO()
        self.err: TextIO = err or sys.stderr or io.StringIO()
        self.is_terminal = bool(getattr(self.out, "isatty", lambda: False)())
        self.colour = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        encoding = (getattr(self.out, "encoding", None) or "ascii").lower()
        self.unicode = encoding.startswith("utf")

    @property
    def sink(self) -> Sink:
        """Progress goes to stderr as text."""
        return SilentSink() if self.quiet else TextSink(self.err)

    def result(self, data: dict[str, Any], text: str) -> None:
        """Print the result of a command: `data` as JSON or `text`."""
        self.write((to_json(data) if self.json_mode else text.rstrip("\n")) + "\n")

    def say(self, text: str = "") -> None:
        """Print a line of the text form; nothing in JSON mode."""
        if not self.json_mode:
            self.write(text + "\n")

    def write(self, text: str) -> None:
        """Write to stdout and flush; characters the terminal cannot show become '?'."""
        try:
            self.out.write(text)
        except UnicodeEncodeError:
            encoding = self.out.encoding or "ascii"
            self.out.write(text.encode(encoding, "replace").decode(encoding))
        self.out.flush()

    def fail(self, kind: str, message: str, code: int) -> int:
        """Print one line on stderr (and the error object on stdout in JSON mode); returns `code`."""
        line = " ".join(message.split())[:MAX_ERROR_LINE]
        if self.json_mode:
            with suppress(OSError):  # stdout may be what failed
                self.write(to_json({"error": {"type": kind, "message": line, "exit_code": code}}) + "\n")
        self.err.write(f"exl2nb: {line}\n")
        self.err.flush()
        return code

    def bold(self, text: str) -> str:
        """Emphasis on a colour terminal."""
        return f"\033[1m{text}\033[0m" if self.colour else text


def to_json(value: Any) -> str:
    """Strict JSON on one line: paths become texts; infinities and NaN, which JSON lacks, become null."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {str(key): plain(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    text = json.dumps(plain(value), ensure_ascii=False, default=str, allow_nan=False)
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns: the first `left` to the left, the others to the right; a rule under the header."""
    widths = [max(width(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell + " " * (w - width(cell)) if i < left else " " * (w - width(cell)) + cell for i, (cell, w) in enumerate(zip(cells, widths))
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *(line(row) for row in rows)])


def width(text: str) -> int:
    """Columns a text takes in a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


_LAYER_KEY = re.compile(r"\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class BitTable:
    """matrices: names of the rows; layers: numbers of the columns; bits[row][column] is None where a layer has no such matrix."""

    matrices: tuple[str, ...]
    layers: tuple[int, ...]
    bits: tuple[tuple[float | None, ...], ...]

    @classmethod
    def of(cls, bits: Mapping[str, float]) -> BitTable:
        """Arrange module keys such as `model.layers.3.self_attn.q_proj` -> bits per weight; other keys (the head) are left out."""
        cells: dict[tuple[str, int], float] = {}
        for key, value in bits.items():
            if match := _LAYER_KEY.search(key):
                cells[match[2].split(".")[-1], int(match[1])] = value
        matrices = tuple(dict.fromkeys(name for name, _ in cells))
        layers = tuple(sorted({layer for _, layer in cells}))
        return cls(matrices, layers, tuple(tuple(cells.get((name, layer)) for layer in layers) for name in matrices))


def render_text(map_: BitTable, *, colours: bool = False, columns: int = 100) -> str:
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
