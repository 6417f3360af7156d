"""The demo's HTML report: one self-contained page, light and dark, readable without scripts, every picture with its numbers in text."""

from __future__ import annotations

from html import escape
from pathlib import Path

from exl2nb.cli import report_charts as charts
from exl2nb.cli.bitmap import BitMap, colour, ink
from exl2nb.cli.console import mega
from exl2nb.cli.demo_result import DemoResult, Entry


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
        (f"{share:.0%}", f"of the FP16 files: {mega(best.bytes)} instead of {mega(result.reference.bytes)}"),
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


def _row(entry: Entry, reference: Entry, worst: float) -> str:
    base = entry.target_bpw is None
    cells = [
        f"{entry.bpw:.3f}",
        mega(entry.bytes) + _bar(entry.bytes / reference.bytes),
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
    points = [(entry.name, entry.bytes / 1e6, entry.kl_mean) for entry in result.quantised]
    bars = [(entry.name, entry.histogram) for entry in result.quantised]
    return (
        '<section><h2>Size against divergence</h2><div class="pair">'
        '<figure><figcaption><h3>What a megabyte buys</h3><span class="note">Mean KL (logarithmic) against file size.</span></figcaption>'
        f"{charts.size_against_kl(points, result.reference.bytes / 1e6)}</figure>"
        '<figure><figcaption><h3>How it spreads over tokens</h3><span class="note">Share of tokens by KL. The last bar is open.</span>'
        f"</figcaption>{charts.histograms(bars)}</figure></div></section>"
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


def _map_table(entry: Entry) -> str:
    grid = BitMap.of(entry.bits)
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
        f"{_mean(entry.passage_kl):.4f} nats a token.</span></figcaption>{_tinted(result.passage, entry.passage_kl)}</figure>"
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


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _listed(names: list[str]) -> str:
    names = [escape(name) for name in names]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _count(number: int) -> str:
    return {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}.get(number, str(number))
