"""The widgets that look inside in a real JupyterLab, beside a BitMap: what a reader does reaches the kernel, and a twin is stored."""

from pathlib import Path

import pytest
from lab import Cells

pytestmark = pytest.mark.slow  # run by .ci/run

DATA = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
CELLS = {
    "start": f"import exl2nb as ex\nllm = ex.demo(progress=None)\nlow = ex.load({str(DATA)!r}, progress=None)\n"
    "sides = {'16 bits': llm, '4 bits': low}",
    "bitmap": "ex.widgets.BitMap(low.path)",
    "errorflow": "flow = ex.widgets.ErrorFlow(sides, 'It was a dark night')\nflow",
    "errorflow after": "print(flow.layer, len(flow.patched), flow.prompt)",
    "layerlens": "lens = ex.widgets.LayerLens(sides, 'It was a dark night')\nlens",
    "layerlens after": "print(lens.token)",
    "attention": "view = ex.widgets.AttentionView(sides, 'It was a dark night')\nview",
    "attention after": "print(view.layer, view.head)",
    "outliers": "out = ex.widgets.OutlierMap(sides, 'It was a dark night')\nout",
    "outliers after": "print(out.channel, out.effect['channel'])",
    "histogram": "hist = ex.widgets.WeightHistogram(sides)\nhist",
    "histogram after": "print(hist.layer, hist.matrix, hist.row)",
}


@pytest.fixture(scope="module")
def book(lab_page, lab):
    lab_page.set_default_timeout(60_000)
    return Cells(lab, lab_page, CELLS, first=("start", "bitmap"))


def test_error_flow(book, screenshots):
    widget = book.shown("errorflow")
    widget.get_by_role("gridcell").nth(5).click()
    widget.get_by_role("button", name="Patch layer 5 back to 16 bits").click()
    widget.get_by_text("With only this layer patched back").wait_for()
    widget.get_by_label("Prompt").fill("She opened the letter")
    widget.get_by_role("button", name="Trace").click()
    widget.get_by_text("mean over 5 tokens").wait_for()
    book.look("errorflow", screenshots)
    assert book.run_named("errorflow after").split() == ["5", "0", "She", "opened", "the", "letter"]


def test_layer_lens(book, screenshots):
    widget = book.shown("layerlens")
    widget.get_by_role("option").nth(2).click()
    widget.locator("[role=option][aria-selected=true]", has_text="was").wait_for()
    book.look("layerlens", screenshots)
    assert book.run_named("layerlens after").strip() == "2"


def test_attention_view(book, screenshots):
    widget = book.shown("attention")
    widget.get_by_role("application").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        book.page.keyboard.press(key)
    widget.get_by_text("Layer 2, head 1: queries down").wait_for()
    book.look("attention", screenshots)
    assert book.run_named("attention after").split() == ["2", "1"]


def test_outlier_map(book, screenshots):
    widget = book.shown("outliers")
    widget.get_by_role("spinbutton", name="Channel").fill("190")
    widget.get_by_role("spinbutton", name="Channel").press("Enter")
    widget.get_by_text("without this channel").first.wait_for()
    book.look("outliers", screenshots)
    assert book.run_named("outliers after").split() == ["190", "190"]


def test_weight_histogram(book, screenshots):
    widget = book.shown("histogram")
    widget.get_by_label("Layer").select_option("2")
    widget.get_by_label("Row").fill("33")
    widget.get_by_label("Row").press("Enter")
    book.page.wait_for_timeout(500)
    book.look("histogram", screenshots)
    assert book.run_named("histogram after").split()[0::2] == ["2", "33"]
    assert "clipped" in book.stored("histogram"), "a twin is stored"
