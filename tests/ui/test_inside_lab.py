"""The widgets that look inside in a real JupyterLab, beside a BitMap: what a reader does reaches the kernel, and a twin is stored."""

from pathlib import Path

import pytest
from lab import Notebook
from mock_host import ROUNDED, violations

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
PLACE = {name: i for i, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def book(browser, lab):
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page, errors = context.new_page(), []
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    book = Notebook(lab, page, list(CELLS.values()))
    for name in ("start", "bitmap"):
        book.run(PLACE[name])
    yield book
    context.close()
    assert not errors, f"errors in the page: {errors}"


def shown(book, kind: str):
    book.run(PLACE[kind])
    widget = book.page.locator(f".exl2nb-{kind}")
    widget.wait_for()
    return widget


def look(book, kind: str, screenshots) -> None:
    assert violations(book.page, f".exl2nb-{kind}", besides=ROUNDED) == []
    book.page.locator(f".exl2nb-{kind}").screenshot(path=screenshots / f"lab-{kind}.png")


def test_error_flow(book, screenshots):
    widget = shown(book, "errorflow")
    widget.get_by_role("gridcell").nth(5).click()
    widget.get_by_role("button", name="Patch layer 5 back to 16 bits").click()
    widget.get_by_text("With only this layer patched back").wait_for()
    widget.get_by_label("Prompt").fill("She opened the letter")
    widget.get_by_role("button", name="Trace").click()
    widget.get_by_text("mean over 5 tokens").wait_for()
    look(book, "errorflow", screenshots)
    assert book.run(PLACE["errorflow after"]).split() == ["5", "0", "She", "opened", "the", "letter"]


def test_layer_lens(book, screenshots):
    widget = shown(book, "layerlens")
    widget.get_by_role("option").nth(2).click()
    widget.locator("[role=option][aria-selected=true]", has_text="was").wait_for()
    look(book, "layerlens", screenshots)
    assert book.run(PLACE["layerlens after"]).strip() == "2"


def test_attention_view(book, screenshots):
    widget = shown(book, "attention")
    widget.get_by_role("application").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        book.page.keyboard.press(key)
    widget.get_by_text("Layer 2, head 1: queries down").wait_for()
    look(book, "attention", screenshots)
    assert book.run(PLACE["attention after"]).split() == ["2", "1"]


def test_outlier_map(book, screenshots):
    widget = shown(book, "outliers")
    widget.get_by_role("spinbutton", name="Channel").fill("190")
    widget.get_by_role("spinbutton", name="Channel").press("Enter")
    widget.get_by_text("without this channel").first.wait_for()
    look(book, "outliers", screenshots)
    assert book.run(PLACE["outliers after"]).split() == ["190", "190"]


def test_weight_histogram(book, screenshots):
    widget = shown(book, "histogram")
    widget.get_by_label("Layer").select_option("2")
    widget.get_by_label("Row").fill("33")
    widget.get_by_label("Row").press("Enter")
    book.page.wait_for_timeout(500)
    look(book, "histogram", screenshots)
    assert book.run(PLACE["histogram after"]).split()[0::2] == ["2", "33"]
    outputs = book.save().cells[PLACE["histogram"]].outputs
    assert any("clipped" in str(output.get("data", {}).get("text/html", "")) for output in outputs), "a twin is stored"
