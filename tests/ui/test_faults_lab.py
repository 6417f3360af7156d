"""What goes wrong around a notebook, in a real JupyterLab: a kernel that dies, a cell that is run again, a notebook nobody trusts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import hostile
import numpy as np
import pytest
from lab import Notebook
from playwright.sync_api import expect

import exl2nb as ex
from exl2nb.widgets import (
    BitMap,
    BitrateExplorer,
    CacheExplorer,
    Compare,
    MemoryPlan,
    PageTable,
    Playground,
    ProgressView,
    SamplerMicroscope,
    WeightBrowser,
)

pytestmark = pytest.mark.slow  # run by .ci/run

DATA = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
SETUP = """
import os, signal, time
import exl2nb as ex
llm = ex.demo(progress=None)
"""
MAKE = """
play = ex.widgets.Playground(llm, prompt="It was a dark night, and the old man", max_tokens=800, seed=7)
display(play)
play.start();
"""


def test_a_kernel_that_dies_leaves_a_readable_widget(lab, page, screenshots):
    """The text stays and the page says what happened; after the restart the same cells work."""
    slow = "import exl2nb.widgets.caches as work; work.TURN_S = 0"
    start = f"caches = ex.widgets.CacheExplorer(llm, max_tokens=400)\ndisplay(caches)\n{slow}\ncaches.start();"
    book = Notebook(lab, page, [SETUP, start, "os.kill(os.getpid(), signal.SIGKILL)"])
    book.run(0)
    book.run(1)
    page.locator(".exl2nb-kl-token").nth(10).wait_for()
    book.start(2)
    notice = page.locator(".exl2nb-lost", has_text="run the cell again")
    notice.wait_for(timeout=40_000)
    assert page.locator(".exl2nb-kl-token").count() > 10
    page.screenshot(path=screenshots / "lab-dead-kernel.png")
    for button in page.locator(".jp-Dialog button", has_text="Ok").all():  # "the kernel appears to have died"
        button.click()
    book.wait_idle(timeout_s=60)
    book.run(0)
    book.run(1)
    page.locator(".exl2nb-kl-token").nth(10).wait_for()
    assert not notice.is_visible()


def test_the_cell_is_run_again_while_it_streams(lab, page):
    """The new output takes the place of the old, the old run ends or goes on unseen, and the engine is free afterwards."""
    free = "play.stop(); play.wait(); llm.engine.wait_idle(30)\nprint(play.status, llm.engine.pages.num_free == llm.engine.spec.num_pages)"
    book = Notebook(lab, page, [SETUP, MAKE, free])
    book.run(0)
    for _ in range(3):
        book.run(1)
        page.locator(".exl2nb-token").nth(5).wait_for()
    assert page.locator(".exl2nb-playground").count() == 1
    status, is_free = book.run(2, timeout_s=90).split()
    assert status in ("stopped", "done") and is_free == "True"


def test_an_interrupt_of_the_waiting_cell(lab, page):
    """The stop button of the notebook: the cell ends with KeyboardInterrupt, the run is stopped, its text stays, the next run works."""
    slow = "play.on_token(lambda token: time.sleep(0.02))"  # 16 s: the key comes before the end, however slow the page is
    cells = [
        SETUP,
        MAKE.replace("play.start();", f"{slow}\nplay.start().wait();"),
        "print(play.status, len(play.text) > 0)",
        "print(llm.generate('It was', max_tokens=2).finish_reason)",
    ]
    book = Notebook(lab, page, cells)
    book.run(0)
    book.start(1)
    page.locator(".exl2nb-token").nth(10).wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("i")
    page.keyboard.press("i")
    expect(book.cell(1).locator(".jp-OutputArea")).to_contain_text("KeyboardInterrupt", timeout=10_000)
    page.locator(".exl2nb-headline", has_text="Stopped after").wait_for()
    assert book.run(2).strip() == "stopped True"
    assert book.run(3).strip() == "length"


def test_a_notebook_nobody_trusts(lab, page, screenshots):
    """Downloaded, never run here: the twins without scripts show text and numbers, and hostile text stays text."""
    import nbformat

    text = hostile.TEXTS["script"]
    pages = {"page_size": 256, "pages": [["used", 9, [1], "", -1, ""]], "requests": [], "evictions": 0, "preemptions": 0}
    kl = [[0, text, 1, 0.5, 0.5, 0.0, True, None], [1, " other", 2, 0.5, 0.1, 0.3, False, text]]
    widgets = [
        Playground(result={"prompt": text, "text": text}),
        CacheExplorer(result={"modes": ["fp16", "q4"], "prompt": text, "tokens": kl}),
        Compare(result={"columns": [[text, "", 1, 2.0], ["b", "", 1, 2.0]], "prompts": [text], "tokens": kl}),
        ProgressView(text),
        BitrateExplorer(prompt=text),
        BitMap(DATA, title=text),
        PageTable(pages, title=text),
        MemoryPlan(replace(ex.plan(DATA, free=10**9), name=text)),
        SamplerMicroscope(np.float32([2, 1, 0]), new_ids=[0], top_k=2, seed=1),
        WeightBrowser(DATA),
    ]
    widgets[4].original = text
    cells = []
    for widget in widgets:
        view = {"application/vnd.jupyter.widget-view+json": {"model_id": "0" * 32, "version_major": 2, "version_minor": 0}}
        outputs = [nbformat.v4.new_output("display_data", data={**widget._repr_mimebundle_()[0], **view})]
        cells.append(nbformat.v4.new_code_cell("widget", outputs=outputs))
    book = nbformat.v4.new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    (lab.root / "download.ipynb").write_text(json.dumps(book))
    page.goto(f"http://127.0.0.1:{lab.port}/lab/tree/download.ipynb?reset&token={lab.token}")
    page.locator(".jp-Notebook .jp-Cell").nth(len(widgets) - 1).wait_for(timeout=60_000)
    words = {"CacheExplorer": "Prompt", "SamplerMicroscope": "drew", "WeightBrowser": "codes in words"}
    for index, widget in enumerate(widgets):
        output = page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-OutputArea-output")
        expect(output).to_contain_text(words.get(type(widget).__name__, "window.pwned = 1"), timeout=30_000)
    assert page.evaluate("() => window.pwned") is None
    assert page.locator(".jp-OutputArea-output script, .jp-OutputArea-output [onerror], .jp-OutputArea-output [onload]").count() == 0
    assert not re.search("Error displaying widget", page.locator(".jp-Notebook").inner_text())
    page.screenshot(path=screenshots / "lab-untrusted.png")
