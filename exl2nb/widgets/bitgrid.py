"""Bits per weight of layers x matrices, from anything that knows widths: the cells, an HTML table, a picture. Plain data; no Jupyter."""

from __future__ import annotations

import html
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from exl2nb.core.errors import OptionError
from exl2nb.core.show import bits_cell
from exl2nb.widgets.protocol import BitCell, BitPart, Run

PARTS_SHOWN = 16
"""Experts of one cell whose strips are sent to the page; the cell's average counts all."""
OUTSIDE_LAYERS = -1
_ROLE_NAMES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "v1": "up", "w2": "down", "lm_head": "head", "embed_tokens": "embedding",
}  # fmt: skip
_LAYER_KEY = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(.+)")


@dataclass(frozen=True)
class BitGrid:
    """matrices: names of the rows, top to bottom. layers: numbers of the columns; -1: matrices outside the layers."""

    title: str
    matrices: tuple[str, ...]
    layers: tuple[int, ...]
    cells: tuple[BitCell, ...]

    @property
    def bpw(self) -> float:
        """Stored bits of the layers' matrices over their weights."""
        inside = [cell for cell in self.cells if cell.layer != OUTSIDE_LAYERS]
        return mean(inside or list(self.cells))

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is known of every cell."""
        found = ["bpw"]
        found += ["error"] if any(cell.error is not None for cell in self.cells) else []
        found += ["share"] if any(cell.share is not None for cell in self.cells) else []
        return tuple(found)

    def to_rows(self) -> list[dict[str, Any]]:
        """One mapping per cell: layer, matrix, bpw, nbytes, experts, error, share."""
        return [
            {
                "layer": cell.layer, "matrix": cell.matrix, "bpw": cell.bpw, "nbytes": cell.nbytes,
                "experts": cell.experts, "error": cell.error, "share": cell.share,
            }
            for cell in self.cells
        ]  # fmt: skip


def mean(cells: Sequence[BitCell]) -> float:
    """Bits per weight of several cells together."""
    weights = sum(cell.weights for cell in cells)
    return sum(cell.bpw * cell.weights for cell in cells) / weights if weights else 0.0


def grid_of(source: Any, *, where: str = "BitMap") -> BitGrid:
    """Cells of a model directory or hub id, an `Inspection`, a `Conversion`, an `Allocation`, or plain data as their `to_dict` gives.

    Raises:
        OptionError: none of these, or an entry without what a cell needs.
        ModelNotFound, FormatError: the directory cannot be read.
    """
    if isinstance(source, BitGrid):
        return source
    if isinstance(source, (str, os.PathLike)):
        from exl2nb.llm.functions import inspect

        source = inspect(source)
    entries = _entries(source, where)
    title = _title(source)
    return _fold([_cell(entry, where) for entry in entries], title)


def _entries(source: Any, where: str) -> list[Any]:
    if isinstance(source, Mapping):
        entries = source.get("matrices", source.get("choices"))
    else:
        entries = getattr(source, "matrices", getattr(source, "choices", source))
    if isinstance(entries, (str, bytes, Mapping)) or not isinstance(entries, Sequence) or not entries:
        raise OptionError(
            f"{where}: got {type(source).__name__!r}; expected a model directory or hub id, the result of inspect or convert, "
            "a plan (measurement.solve), or a list of {'key': ..., 'bpw': ...}"
        )
    return list(entries)


def _reader(entry: Any) -> Callable[[str], Any]:
    return entry.get if isinstance(entry, Mapping) else lambda name: getattr(entry, name, None)


def _title(source: Any) -> str:
    read = _reader(source)
    path, target = read("path"), read("target")
    return os.path.basename(os.path.normpath(os.fspath(path))) if path else f"planned for {target}" if isinstance(target, str) else ""


def _cell(entry: Any, where: str) -> BitCell:
    """One matrix as a cell of its own."""
    read = _reader(entry)
    key, bpw = read("key"), read("bpw")
    if not isinstance(key, str) or not key or not _is_number(bpw) or not 0 < bpw <= 64:
        raise OptionError(f"{where}: an entry has key {key!r} and bpw {bpw!r}; expected a module key and a number of bits up to 64")
    layer, name, expert = place(key)
    rows, columns = (int(read(size) or 0) for size in ("in_features", "out_features"))
    weights = rows * columns if rows > 0 and columns > 0 else 1
    nbytes = next((value for name in ("nbytes", "bytes") if (value := read(name)) is not None), None)
    loss, share = read("loss"), read("share")
    share = share if share is not None else read("predicted_kl")  # `_fold` makes shares of it
    groups = read("groups")
    part = BitPart(expert or name, round(float(bpw), 4), str(read("format") or "")[:16], runs_of(groups, where))
    size = int(nbytes) if nbytes is not None and _is_number(nbytes) else round(bpw * weights / 8)
    return BitCell(layer, name, float(bpw), size, weights, rows, columns, 1, _known(loss), _known(share), [part])


def place(key: str) -> tuple[int, str, str]:
    """Layer, name of the matrix and name of its expert ("" without)."""
    found = _LAYER_KEY.fullmatch(key)
    layer, rest = (int(found[1]), found[2]) if found else (OUTSIDE_LAYERS, key)
    expert = re.search(r"experts\.(\d{1,6})", rest)
    stem = rest.rsplit(".", 1)[-1]
    name = _ROLE_NAMES.get(stem, stem)
    name = f"shared {name}" if "shared_expert" in rest else f"{name} (experts)" if expert else name
    return layer, name[:40], f"expert {expert[1]}" if expert else ""


def runs_of(groups: Any, where: str) -> list[Run]:
    """(bits, rows) of each group, from the top row to the last, as runs: (bits, rows of a group, number of groups)."""
    if groups is None or isinstance(groups, int):
        return []
    try:
        pairs = [(int(bits), int(rows)) for bits, rows in groups]
    except (TypeError, ValueError) as error:
        raise OptionError(f"{where}: groups are {str(groups)[:80]}; expected (bits, rows) for each group") from error
    if any(not 1 <= bits <= 16 or rows < 1 for bits, rows in pairs):
        raise OptionError(f"{where}: groups are {pairs[:8]}; expected 1 to 16 bits and at least one row each")
    return [Run(bits, rows, sum(1 for _ in run)) for (bits, rows), run in groupby(pairs)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _known(value: Any) -> float | None:
    return float(value) if _is_number(value) and value >= 0 else None


def _fold(found: Sequence[BitCell], title: str) -> BitGrid:
    """Experts of a layer become one cell; shares are made to add up to 1."""
    together: dict[tuple[str, int], list[BitCell]] = {}
    for cell in found:
        together.setdefault((cell.matrix, cell.layer), []).append(cell)
    total = sum(cell.share or 0.0 for cell in found) or 1.0
    cells = []
    for (name, layer), group in together.items():
        parts = [part for cell in group for part in cell.parts]
        errors, shares = ([getattr(cell, kind) for cell in group] for kind in ("error", "share"))
        cells.append(
            BitCell(
                layer, name, round(mean(group), 4), sum(cell.nbytes for cell in group), sum(cell.weights for cell in group),
                group[0].rows, group[0].columns, len(group),
                None if None in errors else _short(sum(errors)),
                None if None in shares else _short(sum(shares) / total),
                parts[:PARTS_SHOWN],
            )
        )  # fmt: skip
    inside = list(dict.fromkeys(cell.matrix for cell in cells if cell.layer != OUTSIDE_LAYERS))
    outside = [name for name in dict.fromkeys(cell.matrix for cell in cells if cell.layer == OUTSIDE_LAYERS) if name not in inside]
    layers = sorted({cell.layer for cell in cells if cell.layer != OUTSIDE_LAYERS})
    return BitGrid(title, (*inside, *outside), tuple(layers), tuple(cells))


def _short(value: float) -> float:
    return float(f"{value:.5g}")


MOST_LAYERS = 40  # of the table; the picture has all


def summary(grid: BitGrid) -> str:
    """One line."""
    inside = [cell.bpw for cell in grid.cells if cell.layer != OUTSIDE_LAYERS] or [cell.bpw for cell in grid.cells]
    name = f"{plain(grid.title)}: " if grid.title else ""
    count = f"{len(grid.cells)} cell{'' if len(grid.cells) == 1 else 's'}"
    return f"{name}{count}, {grid.bpw:.2f} bits per weight, {min(inside):.1f} to {max(inside):.1f}"


def table(grid: BitGrid, title: str = "") -> str:
    """Layers across, matrices down; each cell says its groups in its title."""
    at = {(cell.matrix, cell.layer): cell for cell in grid.cells}
    style = "padding:1px 4px;text-align:center;font-variant-numeric:tabular-nums"
    shown = grid.layers[:MOST_LAYERS]
    head = "".join(f'<th style="{style}">{layer}</th>' for layer in shown)
    body = []
    for name in grid.matrices:
        layers = shown if any((name, layer) in at for layer in grid.layers) else [OUTSIDE_LAYERS]
        cells = "".join(_td(at.get((name, layer)), style) for layer in layers)
        body.append(f'<tr><th style="text-align:left">{html.escape(name)}</th>{cells}</tr>')
    more = f"<div>and {len(grid.layers) - len(shown)} more layers</div>" if len(grid.layers) > len(shown) else ""
    heading = f"<b>{html.escape(plain(title))}</b>" if title else ""
    return (
        f'<div>{heading}<div style="overflow-x:auto"><table style="font-size:12px"><thead><tr><th style="text-align:left">layer</th>{head}'
        f"</tr></thead><tbody>{''.join(body)}</tbody></table></div>{more}</div>"
    )


def legend(runs: Sequence[Run]) -> str:
    """Groups by width, in the order of the file: "12 groups of 6 bits, 52 of 4"."""
    counts: dict[int, int] = {}
    for bits, _, count in runs:
        counts[bits] = counts.get(bits, 0) + count
    return ", ".join(
        f"{count} group{'' if count == 1 else 's'} of {bits} bits" if i == 0 else f"{count} of {bits}"
        for i, (bits, count) in enumerate(counts.items())
    )


def plain(text: str) -> str:
    """A name from a file without control characters, and not endless."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:120])


def _td(cell: BitCell | None, style: str) -> str:
    if cell is None:
        return f'<td style="{style}"></td>'
    what = legend(cell.parts[0].runs) if cell.experts == 1 and cell.parts else f"{cell.experts} experts"
    return bits_cell(cell.bpw, f"{plain(cell.matrix)}: {cell.bpw:.2f} bits per weight; {what}", style)
