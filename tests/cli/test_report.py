import importlib.util
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from exl2nb.cli import report
from exl2nb.cli.report import size_against_kl

_spec = importlib.util.spec_from_file_location("sample_result", Path(__file__).with_name("sample_result.py"))
sample = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sample)
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
    return report.render(sample.sample_result())


def test_nothing_outside_is_needed(html):
    assert not re.search(r"https?://|//cdn|@import|url\(|<script|<link|<img", html)
    assert not [a for a in Page(html).attributes if a[1] in ("src", "href") or a[1].startswith("on")]


def test_well_formed_with_all_numbers(html):
    text = "".join(Page(html).words)
    for entry in sample.sample_result().quantised:
        for number in (
            entry.name,
            f"{entry.bpw:.3f}",
            f"{entry.kl_mean:.4f}",
            f"{entry.kl_p99:.3f}",
            f"{entry.top1:.1%}",
            f"{entry.ppl:.2f}",
        ):
            assert number in text


def test_what_models_and_paths_say_is_escaped(html):
    assert "<b>Nobody" not in html
    assert "<best>" not in html
    assert "Some <CPU>" not in html
    text = "".join(Page(html).words)
    assert "<b>Nobody</b>" in text
    assert "<best>" in text


def test_pictures_have_words(html):
    attributes = Page(html).attributes
    pictures = [a for a in attributes if a[:2] == ("svg", "role")]
    labels = [value for tag, name, value in attributes if tag == "svg" and name == "aria-label"]
    assert len(pictures) == len(labels) == 2
    assert "6 bpw: 10.15 MB, mean KL 0.0061 nats" in labels[0]
    assert ("html", "lang", "en") in attributes


def test_one_bitrate_and_no_passage():
    result = sample.sample_result()
    whole, short = report.render(result), report.render(replace(result, entries=result.entries[:2], passage=()))
    Page(short)
    assert result.entries[1].name in short
    assert result.entries[2].name in whole
    assert result.entries[2].name not in short


def test_a_lossless_copy_still_draws():
    assert "0.0000" in size_against_kl([("8 bpw", 12.0, 0.0)], 23.0)


def test_terminal_table():
    lines = sample.sample_result().table().splitlines()
    assert len(lines) == 6
    assert lines[2].split()[:4] == ["FP16", "16.000", "23.09", "MB"]
    assert "0.0940" in lines[4]
