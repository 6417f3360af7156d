"""The report's pictures: SVG from plain numbers, each with a text alternative that carries the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

Histogram = Sequence[tuple[float, float, float]]


def size_against_kl(points: Sequence[tuple[str, float, float]], reference_mb: float) -> str:
    """Points (name, MB, mean KL) joined by a line; KL on a logarithmic axis.

    Args:
        points: at least one.
        reference_mb: size of the original, the right end of the axis.
    """
    width, height, left, right, top, bottom = 460, 280, 56, 20, 12, 40
    positive = [kl for _, _, kl in points if kl > 0] or [1e-3]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)
    span = max(reference_mb, *(mb for _, mb, _ in points))

    def x(mb: float) -> float:
        return left + (width - left - right) * mb / span

    def y(kl: float) -> float:
        exponent = math.log10(max(kl, 10.0**low))
        return top + (height - top - bottom) * (high - exponent) / (high - low)

    parts = []
    for decade in range(low, high + 1):
        at = y(10.0**decade)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for mb in _ticks(span):
        parts.append(f'<text x="{x(mb):.1f}" y="{height - bottom + 18}" text-anchor="middle">{mb:g}</text>')
    end = f"{x(reference_mb):.1f}"
    parts.append(f'<line class="grid" x1="{end}" x2="{end}" y1="{top}" y2="{height - bottom}" stroke-dasharray="3 4"/>')
    parts.append(f'<text x="{x(reference_mb) - 6:.1f}" y="{height - bottom - 8}" text-anchor="end">FP16: {reference_mb:.1f} MB</text>')
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 4}" text-anchor="middle">files, MB</text>')
    ordered = sorted(points, key=lambda point: point[1])
    parts.append(f'<polyline class="line" points="{" ".join(f"{x(mb):.1f},{y(kl):.1f}" for _, mb, kl in ordered)}"/>')
    for name, mb, kl in ordered:
        parts.append(
            f'<circle class="dot" cx="{x(mb):.1f}" cy="{y(kl):.1f}" r="6"><title>{escape(name)}: {mb:.2f} MB, KL {kl:.4f}</title></circle>'
        )
        parts.append(f'<text class="strong" x="{x(mb) + 11:.1f}" y="{y(kl) + 4:.1f}">{escape(name)}</text>')
    label = "; ".join(f"{name}: {mb:.2f} MB, mean KL {kl:.4f} nats" for name, mb, kl in ordered)
    return _svg(width, height, f"Mean KL against file size. {label}", parts)


def histograms(models: Sequence[tuple[str, Histogram]]) -> str:
    """One small histogram of KL a model, over the same bins and to the same scale."""
    width, left, row, gap, foot = 460, 78, 62, 18, 36
    height = len(models) * (row + gap) + foot
    bins = len(models[0][1]) if models else 1
    step = (width - left - 8) / bins
    top_share = max((share for _, bars in models for _, _, share in bars), default=1.0) or 1.0
    parts = []
    for index, (name, bars) in enumerate(models):
        base = index * (row + gap) + row + gap / 2
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 8}" y1="{base:.1f}" y2="{base:.1f}"/>')
        parts.append(f'<text class="strong" x="0" y="{base - 4:.1f}">{escape(name)}</text>')
        for column, (low, high, share) in enumerate(bars):
            tall = row * share / top_share
            edge = f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} and more"
            x = left + column * step
            parts.append(
                f'<rect class="fill" x="{x + 1:.1f}" y="{base - tall:.1f}" width="{step - 2:.1f}" height="{tall:.1f}" rx="1.5">'
                f"<title>{edge} nats: {share:.1%}</title></rect>"
            )
            if share >= 0.05:
                parts.append(
                    f'<text x="{x + step / 2:.1f}" y="{base - tall - 3:.1f}" text-anchor="middle" style="font-size:10px">{share:.0%}</text>'
                )
    for column, (low, _, _) in enumerate(models[0][1] if models else []):
        x = left + column * step
        parts.append(f'<text x="{x:.1f}" y="{height - foot + 12}" text-anchor="middle" style="font-size:10px">{low:g}</text>')
    parts.append(f'<text x="{(left + width) / 2}" y="{height - 6}" text-anchor="middle">KL of a token, nats</text>')
    label = ". ".join(f"{name}: " + ", ".join(f"from {low:g}: {share:.1%}" for low, _, share in bars) for name, bars in models)
    return _svg(width, height, f"Share of tokens by KL. {label}", parts)


def _ticks(span: float) -> list[float]:
    """Round numbers from 0 to `span`, at most seven."""
    step = 10.0 ** math.floor(math.log10(span / 5))
    step *= next(f for f in (1, 2, 5, 10) if span / (step * f) <= 6)
    return [step * i for i in range(int(span / step) + 1)]


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
