"""A BitGrid where no script runs: a summary, an HTML table, a picture. Strings and bytes; no Jupyter."""

from __future__ import annotations

import html
from collections.abc import Sequence

from exl2nb.core.show import colour, ink
from exl2nb.widgets import static
from exl2nb.widgets.bitgrid import OUTSIDE, BitGrid
from exl2nb.widgets.protocol import BitCell, Run

CELL_PX = 12
MOST_LAYERS = 40  # of the table; the picture has all


def summary(grid: BitGrid) -> str:
    """One line."""
    inside = [cell.bpw for cell in grid.cells if cell.layer != OUTSIDE] or [cell.bpw for cell in grid.cells]
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
        layers = shown if any((name, layer) in at for layer in grid.layers) else [OUTSIDE]
        cells = "".join(_td(at.get((name, layer)), style) for layer in layers)
        body.append(f'<tr><th style="text-align:left">{html.escape(name)}</th>{cells}</tr>')
    more = f"<div>and {len(grid.layers) - len(shown)} more layers</div>" if len(grid.layers) > len(shown) else ""
    heading = f"<b>{html.escape(plain(title))}</b>" if title else ""
    return (
        f'<div>{heading}<div style="overflow-x:auto"><table style="font-size:12px"><thead><tr><th style="text-align:left">layer</th>{head}'
        f"</tr></thead><tbody>{''.join(body)}</tbody></table></div>{more}</div>"
    )


def picture(grid: BitGrid) -> bytes:
    """PNG: one square per cell, the colours of the table."""
    at = {(cell.matrix, cell.layer): cell.bpw for cell in grid.cells}
    layers: Sequence[int] = grid.layers or (OUTSIDE,)
    rows = []
    for name in grid.matrices:
        if any((name, layer) in at for layer in layers):
            bits = [at.get((name, layer)) for layer in layers]
        else:
            bits = [at.get((name, OUTSIDE)), *[None] * (len(layers) - 1)]
        line = [
            dot for value in bits for dot in ([(255, 255, 255) if value is None else colour(value)] * (CELL_PX - 1) + [(255, 255, 255)])
        ]
        rows += [line] * (CELL_PX - 1) + [[(255, 255, 255)] * len(line)]
    return static.png(rows)


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
    back = colour(cell.bpw)
    what = legend(cell.parts[0].runs) if cell.experts == 1 and cell.parts else f"{cell.experts} experts"
    title = html.escape(f"{plain(cell.matrix)}: {cell.bpw:.2f} bits per weight; {what}", quote=True)
    colours = f"background:rgb{back};color:rgb{ink(back)}".replace(" ", "")
    return f'<td title="{title}" style="{style};{colours}">{cell.bpw:.1f}</td>'
