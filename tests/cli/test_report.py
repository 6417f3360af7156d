"""The report of the demo, on a made-up result with the shape of a real one: 12 layers, 7 matrices, three bitrates."""

import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from exl2nb.cli import report
from exl2nb.cli.console import BitTable, colour, ink, render_text
from exl2nb.cli.report import DemoResult, ReportEntry, size_against_kl
from exl2nb.eval.comparison import KL_BIN_EDGES_NATS

MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
WORDS = "It was the <best> of times & it was the worst of times, and nobody knew which of the two it was."
PASSAGE = tuple(f" {word}" for word in WORDS.split(" "))


def entry(name, target, bpw, size, ppl, kl, p99, top1, speed, seconds):
    rng = random.Random(name)
    bits = {
        f"model.layers.{layer}.{matrix}": 16.0 if target is None else min(8.1, max(2.1, rng.gauss(bpw, 0.8)))
        for layer in range(12)
        for matrix in MATRICES
    }
    centre = math.log10(kl or 1)
    weights = [math.exp(-((math.log10(max(edge, 3e-5)) - centre) ** 2)) for edge in KL_BIN_EDGES_NATS]
    histogram = [(a, b, w / sum(weights)) for a, b, w in zip(KL_BIN_EDGES_NATS, [*KL_BIN_EDGES_NATS[1:], math.inf], weights)]
    return ReportEntry(
        name=name,
        path=f"exl2nb-demo/{name.replace(' ', '')}",
        target_bpw=target,
        bpw=bpw,
        head_bits=16.0 if target is None else 6.04,
        bytes=size,
        ppl=ppl,
        kl_mean=kl,
        kl_p99=p99,
        top1=top1,
        decode_tok_s=speed,
        convert_s=seconds,
        sample=" the gate was open. <b>Nobody</b> had passed that way for years, she thought, and she went on to the door of the house.",
        bits=bits,
        histogram=histogram if target else [],
        passage_kl=[rng.expovariate(1 / (kl + 1e-9)) for _ in PASSAGE] if target else [],
    )


RESULT = DemoResult(
    entries=(
        entry("FP16", None, 16.0, 23_093_392, 24.58, 0.0, 0.0, 1.0, 640, None),
        entry("6 bpw", 6.0, 5.996, 10_150_000, 24.72, 0.0061, 0.06, 0.951, 980, 8.1),
        entry("4 bpw", 4.0, 3.998, 7_790_000, 26.1, 0.094, 0.71, 0.816, 1190, 7.9),
        entry("3 bpw", 3.0, 2.999, 6_610_000, 33.2, 0.412, 2.9, 0.64, 1370, 52.0),
    ),
    prompt="The old house stood at the end of the lane, and",
    rows=32,
    length=512,
    passage=PASSAGE,
    machine={"Engine": "compiled, avx512", "Processor": "Some <CPU>, 2 threads", "System": "Linux x86_64, Python 3.11, torch 2.13"},
    total_s=112.0,
    created="2026-11-21 05:00",
    version="0.1.0",
    report="exl2nb-demo/report.html",
)
VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects text and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.attributes = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def html():
    return report.render(RESULT)


def test_nothing_outside_is_needed(html):
    assert not re.search(r"https?://|//cdn|@import|url\(|<script|<link|<img", html)
    assert not [a for a in Page(html).attributes if a[1] in ("src", "href") or a[1].startswith("on")]


def test_well_formed_with_all_numbers(html):
    text = "".join(Page(html).words)
    for entry in RESULT.quantised:
        numbers = f"{entry.bpw:.3f} {entry.kl_mean:.4f} {entry.kl_p99:.3f} {entry.top1:.1%} {entry.ppl:.2f}".split()
        assert all(number in text for number in (entry.name, *numbers))


def test_texts_of_models_and_paths_are_escaped(html):
    assert "<b>Nobody" not in html
    assert "<best>" not in html
    assert "Some <CPU>" not in html
    text = "".join(Page(html).words)
    assert "<b>Nobody</b>" in text
    assert "<best>" in text


def test_pictures_have_labels(html):
    attributes = Page(html).attributes
    pictures = [a for a in attributes if a[:2] == ("svg", "role")]
    labels = [value for tag, name, value in attributes if tag == "svg" and name == "aria-label"]
    assert len(pictures) == len(labels) == 2
    assert "6 bpw: 9.68 MiB, mean KL 0.0061 nats" in labels[0]
    assert ("html", "lang", "en") in attributes


def test_one_bitrate_and_no_passage():
    whole, short = report.render(RESULT), report.render(replace(RESULT, entries=RESULT.entries[:2], passage=()))
    Page(short)
    assert RESULT.entries[1].name in short
    assert RESULT.entries[2].name in whole
    assert RESULT.entries[2].name not in short


def test_a_lossless_copy_still_draws():
    assert "0.0000" in size_against_kl([("8 bpw", 12.0, 0.0)], 23.0)


def test_terminal_table():
    lines = RESULT.table().splitlines()
    assert len(lines) == 6
    assert lines[2].split()[:4] == ["FP16", "16.000", "22.02", "MiB"]
    assert "0.0940" in lines[4]


# ---- bits of every matrix as a table of colours

BITS = {
    "model.layers.0.self_attn.q_proj": 4.13,
    "model.layers.0.mlp.down_proj": 3.0,
    "model.layers.11.self_attn.q_proj": 2.04,
    "lm_head": 6.0,
}


def test_layers_across_matrices_down():
    grid = BitTable.of(BITS)
    assert grid.matrices == ("q_proj", "down_proj")
    assert grid.layers == (0, 11)
    assert grid.bits == ((4.13, 2.04), (3.0, None))


def test_plain_text():
    assert render_text(BitTable.of(BITS)).splitlines() == ["layer        0  11", "q_proj     4.1 2.0", "down_proj  3.0"]


def test_narrow_terminals_break_lines():
    grid = BitTable.of({f"model.layers.{i}.mlp.up_proj": 4.0 for i in range(80)})
    text = render_text(grid, columns=60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("4") >= 80


def test_colours_say_the_same_as_the_digits():
    plain, coloured = (render_text(BitTable.of(BITS), colours=c) for c in (False, True))
    assert re.sub(r"\033\[[0-9;]*m", "", coloured).split() == plain.split()
    assert coloured.count("\033[0m") == 3


def test_cells_are_readable():
    def luminance(rgb):
        linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for tenth in range(10, 170):
        rgb = colour(tenth / 10)
        high, low = sorted([luminance(rgb), luminance(ink(rgb))], reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, tenth / 10
