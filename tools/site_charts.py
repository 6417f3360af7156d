"""The charts of the site: benchmarks/results.json as SVG inside the page, each with a table. The style sheet colours them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results.json"
WIDTH, LABEL, RIGHT, BAR, GAP = 480, 116, 56, 18, 10
Chart = dict[str, Any]


def charts() -> list[Chart]:
    """All charts, in their order."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["charts"]


def chart(name: str) -> str:
    """One chart by its id, as a figure in HTML."""
    return figure(next(one for one in charts() if one["id"] == name))


def page() -> str:
    """The page with all of them, in Markdown."""
    parts = [
        "# Benchmarks",
        "",
        "Drawn from `benchmarks/results.json` when the site is built. Machines, commands, limits and misses: [results](results.md).",
        "What each script measures: [scripts](scripts.md).",
        "",
    ]
    for one in charts():
        parts += [f"## {one['title']}", "", figure(one), ""]
    return "\n".join(parts)


def figure(one: Chart) -> str:
    """SVG, caption and table."""
    svg = bars(one) if one["kind"] == "bars" else lines(one)
    legend = ""
    if len(one["series"]) > 1:
        keys = (f'<span class="chart-key chart-{i}">{escape(series["name"])}</span>' for i, series in enumerate(one["series"]))
        legend = f'<div class="chart-legend">{"".join(keys)}</div>'
    return (
        f'<figure class="chart" id="chart-{one["id"]}">{legend}{svg}<figcaption>{escape(one["note"])}</figcaption>'
        f"<details><summary>Numbers</summary>{table(one)}</details></figure>"
    )


def table(one: Chart) -> str:
    """The numbers, a row for each value of x."""
    names = list(dict.fromkeys(x for series in one["series"] for x, _ in series["points"]))
    head = "".join(f'<th scope="col">{escape(series["name"])}, {escape(one["unit"])}</th>' for series in one["series"])
    rows = ""
    for name in names:
        cells = "".join(f"<td>{dict(map(tuple, series['points'])).get(name, '')}</td>" for series in one["series"])
        rows += f'<tr><th scope="row">{escape(str(name))}</th>{cells}</tr>'
    return f'<table><thead><tr><th scope="col">{escape(one.get("x", ""))}</th>{head}</tr></thead><tbody>{rows}</tbody></table>'


def scale(one: Chart, low: float, high: float) -> Callable[[float], float]:
    """From a value to a share of the axis. A logarithmic axis begins at a power of ten below the least value, any other at 0."""
    values = [y for series in one["series"] for _, y in series["points"]]
    if one.get("log"):
        least, most = math.floor(math.log10(min(values)) - 0.2), math.log10(max(values))
        return lambda y: low + (high - low) * (math.log10(y) - least) / (most - least)
    return lambda y: low + (high - low) * y / max(values)


def opened(one: Chart, height: int) -> str:
    """The start of a picture with what a screen reader says of it."""
    name = f"{one['title']}, {one['unit']}: {'; '.join(series['name'] for series in one['series'])}. The numbers are in the table below."
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name, quote=True)}">'


def bars(one: Chart) -> str:
    """A group of bars for each name, one bar for each series that has it; dots on a logarithmic axis."""
    names = list(dict.fromkeys(x for series in one["series"] for x, _ in series["points"]))
    place, y, parts = scale(one, 0, WIDTH - LABEL - RIGHT), 4, []
    for name in names:
        present = [
            (i, dict(map(tuple, series["points"]))[name]) for i, series in enumerate(one["series"]) if name in dict(series["points"])
        ]
        middle = y + len(present) * BAR / 2 + 4
        parts.append(f'<text x="{LABEL - 10}" y="{middle:.0f}" text-anchor="end">{escape(name)}</text>')
        for i, value in present:
            width = max(2.0, place(value))
            if one.get("log"):  # the length of a bar would say nothing
                parts.append(f'<line class="chart-grid" x1="{LABEL}" y1="{y + 9}" x2="{LABEL + width - 4:.1f}" y2="{y + 9}"/>')
                parts.append(f'<circle class="chart-{i}" cx="{LABEL + width - 4:.1f}" cy="{y + 9}" r="5"/>')
            else:
                parts.append(f'<rect class="chart-{i}" x="{LABEL}" y="{y + 1}" width="{width:.1f}" height="{BAR - 3}" rx="2"/>')
            parts.append(f'<text x="{LABEL + width + 6:.1f}" y="{y + 13}">{value:g}</text>')
            y += BAR
        y += GAP
    parts.append(f'<text class="chart-unit" x="{LABEL}" y="{y + 8}">{escape(one["unit"])}</text>')
    return opened(one, y + 14) + "".join(parts) + "</svg>"


def lines(one: Chart) -> str:
    """A line with marked points for each series."""
    height, bottom, top = 300, 250, 30
    xs = sorted({x for series in one["series"] for x, _ in series["points"]})
    across, up = (lambda x: 60 + (WIDTH - 90) * (x - xs[0]) / (xs[-1] - xs[0])), scale(one, bottom, top)
    parts = [f'<line class="chart-axis" x1="60" y1="{bottom}" x2="{WIDTH - 20}" y2="{bottom}"/>']
    values = [y for series in one["series"] for _, y in series["points"]]
    for power in range(math.floor(math.log10(min(values)) - 0.2), math.ceil(math.log10(max(values)))):
        at = up(10.0**power)
        parts.append(f'<line class="chart-grid" x1="60" y1="{at:.1f}" x2="{WIDTH - 20}" y2="{at:.1f}"/>')
        parts.append(f'<text x="52" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    parts += [f'<text x="{across(x):.1f}" y="{bottom + 18}" text-anchor="middle">{x:g}</text>' for x in xs]
    for i, series in enumerate(one["series"]):
        points = [(across(x), up(y)) for x, y in series["points"]]
        parts.append(f'<polyline class="chart-{i}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
        parts += [f'<circle class="chart-{i}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points]
    parts.append(f'<text class="chart-unit" x="{WIDTH - 20}" y="{bottom + 38}" text-anchor="end">{escape(one["x"])}</text>')
    parts.append(f'<text class="chart-unit" x="4" y="12">{escape(one["unit"])}</text>')
    return opened(one, height) + "".join(parts) + "</svg>"
