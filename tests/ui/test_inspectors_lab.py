"""WeightBrowser, SamplerMicroscope, PageTable and Speculation in a real JupyterLab: what a reader does reaches the kernel.

One notebook for all, opened once: each test runs cells of its own.
"""

from pathlib import Path

import pytest
from lab import Cells

pytestmark = pytest.mark.slow  # run by .ci/run

DATA = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
STORY = "It was a dark and stormy night. The old man had a boat and a dog. " * 4
ASK = "It was a dark night, and the old man"
CELLS = {
    "start": "import time, exl2nb as ex\nllm = ex.demo(progress=None)",
    "weights": f"w = ex.widgets.WeightBrowser({str(DATA)!r}, llm, column=17)\nw",
    "busy": "time.sleep(3)",
    "weights after": "print(w.layer, w.matrix, w.column, w.value)",
    "microscope": f"s = ex.widgets.SamplerMicroscope(llm, {ASK!r}, max_tokens=12, temperature=0.8, top_p=0.9, seed=7)\ns",
    "microscope after": "print(s.at, s.params.top_k, s.token == s.replay.explain(s.at, s.params).token)",
    "pagetable": "p = ex.widgets.PageTable(llm, period_s=0.05)\np",
    "pagetable work": "for i in range(3):\n    llm.generate(f'{i} ' + 'The rain fell on the town. ' * 90, max_tokens=40)",
    "pagetable after": "p.stop(); p.wait(5); print(p.live, len(p.frames) > 5, p.shown['evictions'] == llm.cache.snapshot().evictions)",
    "speculation": f"v = ex.widgets.Speculation(llm, {STORY!r}, max_tokens=60, temperature=0)\nv",
    "speculation after": "print(v.stats['same'])",
}


@pytest.fixture(scope="module")
def book(lab_page, lab):
    lab_page.set_default_timeout(60_000)
    return Cells(lab, lab_page, CELLS, first=("start",))


def test_weights_while_a_cell_runs(book, screenshots):
    widget = book.shown("weights")
    book.start(book.place["busy"])
    widget.get_by_label("Matrix").select_option("mlp.down_proj")
    widget.locator(".exl2nb-word").nth(7).wait_for()
    widget.get_by_label("Column").fill("33")
    widget.get_by_label("Column").press("Tab")
    widget.locator(".exl2nb-scale", has_text=", for column 33").wait_for()
    widget.get_by_role("gridcell").nth(20).click()
    book.look("weights", screenshots)
    book.wait_idle()
    assert book.run_named("weights after").split() == ["0", "mlp.down_proj", "33", "20"]


def test_microscope(book, screenshots):
    widget = book.shown("microscope")
    steps = widget.locator("thead th").count()
    widget.get_by_role("slider", name="Top-k, slider").fill("5")
    widget.locator("thead th").nth(steps).wait_for()
    widget.get_by_role("option").nth(8).click()
    widget.locator(".exl2nb-drawn", has_text="draw 8 of seed 7").wait_for()
    book.look("microscope", screenshots)
    assert book.run_named("microscope after").split() == ["8", "5", "True"]


def test_pages_live_and_replayed(book, screenshots):
    widget = book.shown("pagetable")
    widget.get_by_role("button", name="Live").click()
    widget.locator("button[aria-pressed='true']", has_text="Live").wait_for()
    book.start(book.place["pagetable work"])
    widget.locator(".exl2nb-request").first.wait_for()
    widget.locator(".exl2nb-page[data-state='used']").first.wait_for()
    book.wait_idle(timeout_s=60)
    widget.get_by_role("slider", name="Frame").fill("1")
    widget.locator(".exl2nb-place", has_text="2 of").wait_for()
    widget.locator("button[aria-pressed='false']", has_text="Live").wait_for()
    book.look("pagetable", screenshots)
    assert book.run_named("pagetable after").split() == ["False", "True", "True"]


def test_speculation(book, screenshots):
    widget = book.shown("speculation")
    widget.get_by_role("option").nth(10).hover()
    widget.locator(".exl2nb-readout", has_text="pass ").wait_for()
    book.look("speculation", screenshots)
    assert book.run_named("speculation after").strip() == "True"
    assert "accepted draft tokens" in book.stored("speculation"), "a twin is stored"
