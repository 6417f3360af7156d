"""The demo's HTML report: one self-contained page, light and dark, readable without scripts, every picture with its numbers in text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from exl2nb.cli.console import BitTable, table
from exl2nb.core.show import colour, ink, size_text

Histogram = Sequence[tuple[float, float, float]]


def size_against_kl(points: Sequence[tuple[str, float, float]], reference_mib: float) -> str:
    """Points (name, MiB, mean KL) joined by a line; KL on a logarithmic axis.

    Args:
        points: at least one.
        reference_mib: size of the original, the right end of the axis.
    """
    width, height, left, right, top, bottom = 460, 280, 56, 20, 12, 40
    positive = [kl for _, _, kl in points if kl > 0] or [1e-3]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)
    span = max(reference_mib, *(mib for _, mib, _ in points))

    def x(mib: float) -> float:
        return left + (width - left - right) * mib / span

    def y(kl: float) -> float:
        exponent = math.log10(max(kl, 10.0**low))
        return top + (height - top - bottom) * (high - exponent) / (high - low)

    parts = []
    for decade in range(low, high + 1):
        at = y(10.0**decade)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for mib in _ticks(span):
        parts.append(f'<text x="{x(mib):.1f}" y="{height - bottom + 18}" text-anchor="middle">{mib:g}</text>')
    end = f"{x(reference_mib):.1f}"
    parts.append(f'<line class="grid" x1="{end}" x2="{end}" y1="{top}" y2="{height - bottom}" stroke-dasharray="3 4"/>')
    parts.append(f'<text x="{x(reference_mib) - 6:.1f}" y="{height - bottom - 8}" text-anchor="end">FP16: {reference_mib:.1f} MiB</text>')
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 4}" text-anchor="middle">files, MiB</text>')
    ordered = sorted(points, key=lambda point: point[1])
    parts.append(f'<polyline class="line" points="{" ".join(f"{x(mib):.1f},{y(kl):.1f}" for _, mib, kl in ordered)}"/>')
    for name, mib, kl in ordered:
        title = f"<title>{escape(name)}: {mib:.2f} MiB, KL {kl:.4f}</title>"
        parts.append(f'<circle class="dot" cx="{x(mib):.1f}" cy="{y(kl):.1f}" r="6">{title}</circle>')
        parts.append(f'<text class="strong" x="{x(mib) + 11:.1f}" y="{y(kl) + 4:.1f}">{escape(name)}</text>')
    label = "; ".join(f"{name}: {mib:.2f} MiB, mean KL {kl:.4f} nats" for name, mib, kl in ordered)
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


@dataclass(frozen=True, kw_only=True)
class ReportEntry:
    """One model of the table.

    name: "FP16" or "4.0 bpw". path: its directory. target_bpw: asked for, None for the reference. bpw: reached, over the decoder's linears.
    head_bits: of the head. bytes: its .safetensors files. ppl, kl_mean, kl_p99 (nats), top1 (share): on the evaluation text; the KL of the
    reference is 0 by definition. decode_tok_s: single-stream generation. convert_s: seconds its conversion took. sample: streamed text.
    bits: module key -> bits per weight. histogram: (low, high, share of tokens) of KL. passage_kl: KL after each token of the passage.
    """

    name: str
    path: str
    target_bpw: float | None
    bpw: float
    head_bits: float
    bytes: int
    ppl: float
    kl_mean: float
    kl_p99: float
    top1: float
    decode_tok_s: float
    convert_s: float | None
    sample: str
    bits: dict[str, float]
    histogram: list[tuple[float, float, float]]
    passage_kl: list[float]


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The whole run.

    entries: reference first, then from many bits to few. passage: texts of the passage's tokens. machine: name -> value.
    """

    entries: tuple[ReportEntry, ...]
    prompt: str
    rows: int
    length: int
    passage: tuple[str, ...]
    machine: dict[str, str]
    total_s: float
    created: str
    version: str
    report: str = ""

    @property
    def reference(self) -> ReportEntry:
        """The FP16 model."""
        return self.entries[0]

    @property
    def quantised(self) -> tuple[ReportEntry, ...]:
        """All others."""
        return self.entries[1:]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def table(self) -> str:
        """The table for a terminal."""
        header = ["model", "bpw", "files", "of FP16", "perplexity", "KL mean", "KL p99", "top-1", "tok/s", "converted"]
        rows = []
        for entry in self.entries:
            base = entry.target_bpw is None
            rows.append(
                [
                    entry.name,
                    f"{entry.bpw:.3f}",
                    size_text(entry.bytes),
                    f"{entry.bytes / self.reference.bytes:.0%}",
                    f"{entry.ppl:.2f}",
                    "-" if base else f"{entry.kl_mean:.4f}",
                    "-" if base else f"{entry.kl_p99:.3f}",
                    "-" if base else f"{entry.top1:.1%}",
                    f"{entry.decode_tok_s:.0f}",
                    "-" if entry.convert_s is None else f"{entry.convert_s:.1f} s",
                ]
            )
        return table(header, rows)


def render(result: DemoResult) -> str:
    """The page as a string of HTML."""
    css = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    body = "".join(part(result) for part in (_head, _results, _figures, _maps, _passage, _samples, _method))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>exl2nb demo: what quantising costs</title><style>\n{css}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def _head(result: DemoResult) -> str:
    best = min(result.quantised, key=lambda entry: abs((entry.target_bpw or 0) - 4.0))
    share = best.bytes / result.reference.bytes
    facts = [
        (f"{share:.0%}", f"of the FP16 files: {size_text(best.bytes)} instead of {size_text(result.reference.bytes)}"),
        (f"{best.top1:.1%}", "of next tokens ranked first as in FP16"),
        (f"{best.kl_mean:.3f}", "nats a token: mean KL divergence from FP16"),
        (f"{best.decode_tok_s:,.0f}", "tokens a second, one stream, on this CPU"),
    ]
    items = "".join(f"<li><b>{value}</b><span>{escape(text)}</span></li>" for value, text in facts)
    return (
        "<header><h1>What quantising the demo model costs</h1>"
        f'<p class="lead">A Llama of 11.5 million parameters, converted to EXL2 at {_listed([e.name for e in result.quantised])}, run by '
        f"the compiled engine and measured against its FP16 original on {result.rows * result.length:,} tokens.</p>"
        f'<p class="soft">At {best.name}:</p><ul class="facts">{items}</ul></header>'
    )


def _results(result: DemoResult) -> str:
    columns = [
        ("Model", ""),
        ("Bits per weight", "decoder"),
        ("Files", ""),
        ("Perplexity", "lower is better"),
        ("KL mean", "nats"),
        ("KL p99", "nats"),
        ("Same top token", ""),
        ("Decode", "tok/s"),
        ("Converted in", "s"),
    ]
    head = "".join(f'<th scope="col">{name}{f"<small>{note}</small>" if note else ""}</th>' for name, note in columns)
    worst = max([entry.kl_mean for entry in result.quantised] or [1.0]) or 1.0
    rows = "".join(_row(entry, result.reference, worst) for entry in result.entries)
    return (
        '<section><h2 id="results">Results</h2><div class="scroll" role="region" aria-labelledby="results" tabindex="0">'
        f'<table class="results"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        '<p class="note">KL is KL(FP16 || quantised) after every token. The first conversion also measures how much each matrix suffers at '
        "each width; the others reuse that measurement. Bits per weight count everything the decoder's matrices store; the norm vectors "
        "take the small rest of what was asked for.</p></section>"
    )


def _row(entry: ReportEntry, reference: ReportEntry, worst: float) -> str:
    base = entry.target_bpw is None
    cells = [
        f"{entry.bpw:.3f}",
        size_text(entry.bytes) + _bar(entry.bytes / reference.bytes),
        f"{entry.ppl:.2f}",
        "reference" if base else f"{entry.kl_mean:.4f}" + _bar(entry.kl_mean / worst),
        "" if base else f"{entry.kl_p99:.3f}",
        "" if base else f"{entry.top1:.1%}" + _bar(entry.top1),
        f"{entry.decode_tok_s:,.0f}",
        "" if entry.convert_s is None else f"{entry.convert_s:.1f}",
    ]
    head = "" if base else f"<small>head {entry.head_bits:.2f} bits</small>"
    return f'<tr><th scope="row">{escape(entry.name)}{head}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _bar(share: float) -> str:
    return f'<span class="bar" aria-hidden="true"><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></span>'


def _figures(result: DemoResult) -> str:
    points = [(entry.name, entry.bytes / 2**20, entry.kl_mean) for entry in result.quantised]
    bars = [(entry.name, entry.histogram) for entry in result.quantised]
    return (
        '<section><h2>Size against divergence</h2><div class="pair">'
        '<figure><figcaption><h3>KL against file size</h3><span class="note">Mean KL on a logarithmic axis.</span></figcaption>'
        f"{size_against_kl(points, result.reference.bytes / 2**20)}</figure>"
        '<figure><figcaption><h3>How it spreads over tokens</h3><span class="note">Share of tokens by KL. The last bar is open.</span>'
        f"</figcaption>{histograms(bars)}</figure></div></section>"
    )


def _maps(result: DemoResult) -> str:
    figures = "".join(
        f"<figure><figcaption><h3>{escape(entry.name)}</h3><span class=note>{entry.bpw:.3f} bits per weight in the decoder, head "
        f"{entry.head_bits:.2f}.</span></figcaption>{_map_table(entry)}</figure>"
        for entry in result.quantised
    )
    swatches = "".join(f'<span style="{_paint(bits)}">{bits}</span>' for bits in (2, 3, 4, 5, 6, 8))
    return (
        "<section><h2>Where the bits went</h2><p>The allocator gives each matrix the option that lowers the total error most for its size. "
        f'Layers run across, matrices down; a cell shows bits per weight.</p><p class="legend">bits {swatches}</p>{figures}</section>'
    )


def _map_table(entry: ReportEntry) -> str:
    grid = BitTable.of(entry.bits)
    head = "".join(f'<th scope="col">{layer}</th>' for layer in grid.layers)
    rows = ""
    for name, row in zip(grid.matrices, grid.bits):
        cells = "".join("<td></td>" if bits is None else f'<td style="{_paint(bits)}">{bits:.1f}</td>' for bits in row)
        rows += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    caption = f"Bits per weight of each matrix at {entry.name}"
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table class="bits" aria-label="{escape(caption)}">'
        f'<thead><tr><th scope="row">layer</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _paint(bits: float) -> str:
    rgb = colour(bits)
    return "background:rgb({} {} {});color:rgb({} {} {})".format(*rgb, *ink(rgb))


def _passage(result: DemoResult) -> str:
    if not result.passage:
        return ""
    blocks = "".join(
        f'<figure><figcaption><h3>{escape(entry.name)}</h3><span class="note">KL on this passage: '
        f"{sum(entry.passage_kl) / len(entry.passage_kl):.4f} nats a token.</span></figcaption>"
        f"{_tinted(result.passage, entry.passage_kl)}</figure>"
        for entry in result.quantised
    )
    return (
        "<section><h2>Where it shows in a text</h2><p>A passage of the evaluation text. The stronger a token is tinted, the more the "
        "quantised model's opinion of the <em>next</em> token differs from FP16 there; underlined: 1 nat or more. Point at a token for its "
        "number.</p>"
        f"{blocks}</section>"
    )


def _tinted(tokens: tuple[str, ...], kl: list[float]) -> str:
    spans = []
    for text, value in zip(tokens, kl):
        strength = min(0.85, 0.6 * max(0.0, value) ** 0.5)
        hot = ' class="hot"' if value >= 1 else ""
        spans.append(f'<span{hot} style="--a:{strength:.2f}" title="KL {value:.4f}">{escape(text)}</span>')
    return f'<p class="passage">{"".join(spans)}</p>'


def _samples(result: DemoResult) -> str:
    figures = "".join(
        f"<figure><figcaption><h3>{escape(entry.name)}</h3></figcaption><blockquote><b>{escape(result.prompt)}</b>{escape(entry.sample)}"
        "</blockquote></figure>"
        for entry in result.entries
    )
    return (
        f"<section><h2>The same prompt, {_count(len(result.entries))} times</h2><p>Sampled with the same seed. Texts part ways at the "
        "first token that falls differently, so a different text is not a worse one: "
        f'the table above says what is worse.</p><div class="pair">{figures}</div></section>'
    )


def _method(result: DemoResult) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in result.machine.items())
    paths = "".join(f"<dt>{escape(entry.name)}</dt><dd><code>{escape(entry.path)}</code></dd>" for entry in result.entries)
    return (
        f"<section><h2>How it was measured</h2><p>{result.rows} rows of {result.length} tokens of the packaged evaluation text, each row "
        "from an empty context, FP32 KV cache. Perplexity over all tokens but the first of each row, KL and top token after every token. "
        "Decode speed: one stream on an FP16 cache.</p>"
        f"<dl>{facts}</dl><h3 style='margin-top:1.5rem'>Files</h3><dl>{paths}</dl></section>"
        f"<footer>Made by <code>exl2nb demo</code> {escape(result.version)} on {escape(result.created)} in {result.total_s:.0f} s. Use a "
        f"converted model: <code>exl2nb generate {escape(result.entries[-1].path)} --prompt 'It was'</code></footer>"
    )


def _listed(names: list[str]) -> str:
    names = [escape(name) for name in names]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _count(number: int) -> str:
    return {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}.get(number, str(number))
