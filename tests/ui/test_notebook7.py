"""The widgets in Notebook 7, driven: they stream while a cell runs, reach the kernel, look right, and leave a twin in the file.

Slow, and only where EXL2NB_NOTEBOOK_PYTHON names a Python with `notebook`: `bash .ci/front_ends` makes one and runs this.
"""

import os
from pathlib import Path

import pytest
from lab import Cells, Lab

PYTHON = os.environ.get("EXL2NB_NOTEBOOK_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="EXL2NB_NOTEBOOK_PYTHON is not set: run .ci/front_ends"),
]
DATA = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
ASK = "It was a dark night, and the old man"
CELLS = {
    "start": f"import exl2nb as ex\nllm = ex.demo(progress=None)\nlow = ex.load({str(DATA)!r}, progress=None)\n"
    f"w, sides, ask = ex.widgets, {{'16 bits': llm, '4 bits': low}}, {ASK!r}",
    "playground": "play = w.Playground(llm, prompt=ask, max_tokens=60, seed=7)\nplay",
    "playground after": "print(play.wait(30) == llm.generate(ask, max_tokens=60, seed=7, temperature=0.7, top_p=0.95).text)",
    "bitmap": f"browser = w.WeightBrowser({str(DATA)!r}, llm)\nmap_ = w.BitMap(low.path).link(browser)\nmap_",
    "bitmap after": "print(map_.selected, browser.layer, browser.matrix)",
    "weights": "browser",
    "explorer": "explorer = w.BitrateExplorer(ex.demo_measurement(), llm, bpw=3.0)\nexplorer",
    "explorer after": "print(round(explorer.solved, 2) < 2.3)",
    "microscope": "scope = w.SamplerMicroscope(llm, ask, max_tokens=12, temperature=0.8, seed=7)\nscope",
    "microscope after": "print(scope.at)",
    "caches": "caches = w.CacheExplorer(llm, prompt=ask, max_tokens=8)\ncaches",
    "caches after": "print(caches.wait(60).status)",
    "compare": "compare = w.Compare(sides, prompts=[ask], max_tokens=8)\ncompare",
    "compare after": "print(compare.wait(60).status)",
    "pagetable": "pages = w.PageTable(llm)\npages",
    "plan": "plan = w.MemoryPlan(llm, free=10**9)\nplan",
    "plan after": "print(plan.cache_mode)",
    "speculation": "w.Speculation(llm, 'One, two, three. ' * 8, max_tokens=20, temperature=0)",
    "errorflow": "flow = w.ErrorFlow(sides, ask)\nflow",
    "errorflow after": "print(flow.wait(60).layer, len(flow.patched))",
    "layerlens": "lens = w.LayerLens(sides, ask)\nlens",
    "layerlens after": "print(lens.token)",
    "attention": "view = w.AttentionView(sides, ask)\nview",
    "attention after": "print(view.head)",
    "outliers": "out = w.OutlierMap(sides, ask, layer=9, channel=190)\nout",
    "histogram": "hist = w.WeightHistogram(sides)\nhist",
    "histogram after": "print(hist.layer)",
}


@pytest.fixture(scope="module")
def book(browser, tmp_path_factory):
    server = Lab(tmp_path_factory.mktemp("notebook7"), python=PYTHON, app="notebook")
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page, errors = context.new_page(), []
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: errors.append(str(error.stack)))
    try:
        yield Cells(server, page, CELLS)
    finally:
        context.close()
        server.close()
    ours = [stack for stack in errors if "blob:" in stack]  # bundles of widgets; Notebook has errors of its own while it starts
    assert not ours, ours


def generate(widget):
    widget.get_by_role("button", name="Generate").click()


def patch(widget):
    widget.get_by_role("gridcell").nth(5).click()
    widget.get_by_role("button", name="Patch layer 5 back to 16 bits").click()
    widget.get_by_text("With only this layer patched back").wait_for()


ACTS = {
    "playground": (generate, "True"),
    "bitmap": (lambda widget: widget.get_by_role("gridcell").nth(3).click(), "[3, 'q'] 3 self_attn.q_proj"),
    "weights": (None, ""),
    "explorer": (lambda widget: widget.get_by_role("slider", name="Bits per weight").fill("2.2"), "True"),
    "microscope": (lambda widget: widget.get_by_role("option").nth(8).click(), "8"),
    "caches": (generate, "done"),
    "compare": (generate, "done"),
    "pagetable": (None, ""),
    "plan": (lambda widget: widget.get_by_label("Cache", exact=True).select_option("q4"), "q4"),
    "speculation": (None, ""),
    "errorflow": (patch, "5 1"),
    "layerlens": (lambda widget: widget.get_by_role("option").nth(2).click(), "2"),
    "attention": (lambda widget: widget.get_by_role("option").nth(1).click(), "1"),
    "outliers": (None, ""),
    "histogram": (lambda widget: widget.get_by_label("Layer").select_option("2"), "2"),
}


@pytest.mark.parametrize("kind", ACTS)
def test_what_a_reader_does_reaches_the_kernel(book, kind, screenshots):
    act, expected = ACTS[kind]
    widget = book.shown(kind)
    if act:
        act(widget)
        book.page.wait_for_timeout(700)  # sliders and lists ask the kernel once the pointer rests
        assert book.run_named(f"{kind} after").strip() == expected
    book.look(kind, screenshots, prefix="notebook7")


def test_the_saved_notebook_reads_without_a_kernel(book):
    book.shown("layerlens")
    assert "Top-1 token after" in book.stored("layerlens")
