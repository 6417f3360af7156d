"""CacheExplorer and Compare in a real JupyterLab with the demo model: clicks, a page that is loaded again in the middle, Run All."""

import re

import pytest
from lab import Notebook

pytestmark = pytest.mark.slow  # run by .ci/run

SETUP = """
import exl2nb as ex
llm = ex.demo(progress=None)
caches = ex.widgets.CacheExplorer(llm, prompt="It was a dark night, and the old man", needle={"sentences": 8, "depths": [0.5]})
columns = {"greedy": llm, "dice": (llm, {"temperature": 0.9, "seed": 3})}
compare = ex.widgets.Compare(columns, prompts=["It was a dark night, and", "She opened the letter and"], max_tokens=24)
"""


@pytest.mark.parametrize("widget", ["caches", "compare"])
def test_from_click_to_frame(lab, page, screenshots, widget):
    book = Notebook(lab, page, [SETUP, widget, f"frame = {widget}.to_dataframe(); print(len(frame), frame.kl_mean.iloc[0])"])
    book.run(0)
    book.run(1)
    button = "Generate"
    page.get_by_role("button", name=button, exact=True).click()
    page.locator(f".exl2nb-{widget} .exl2nb-headline", has_text="Done").wait_for()
    assert page.locator(".exl2nb-answer-column").count() == 4
    assert page.locator(".exl2nb-kl-token[data-step='-1']").count() == 0, "everything is measured"
    if widget == "caches":
        page.get_by_role("button", name="Run needle test").click()
        page.locator(".exl2nb-verdict", has_text="FP16 gives").wait_for()
    page.screenshot(path=screenshots / f"lab-{widget}.png")
    rows, kl = book.run(2).split()
    assert (rows, float(kl)) == ("4", 0.0)
    outputs = book.save().cells[1].outputs
    assert "application/vnd.jupyter.widget-view+json" in outputs[0].data
    assert "KL" in outputs[1].data["text/plain"]


def test_a_page_loaded_again_in_the_middle(lab, page):
    """The new page has all that was written before it, and goes on to the end."""
    slow = (
        "import time\nimport exl2nb.widgets.caches as work\nturn, work.TURN_S = work.take_turn, 0  # a token a turn, 20 a second\n"
        "work.take_turn = lambda steps: (time.sleep(0.05), turn(steps))[1]\ncaches.max_tokens = 400"
    )
    cells = [SETUP, slow, "caches", "caches.start(); print('begun')", "caches.wait(120)\nprint(len(caches.tokens['fp16']), caches.status)"]
    book = Notebook(lab, page, cells)
    for cell in range(4):
        book.run(cell)
    page.locator(".exl2nb-kl-token").nth(30).wait_for()
    book.save()
    page.reload()
    page.locator(".jp-Notebook .jp-Cell").nth(4).wait_for(timeout=60_000)
    page.locator(".exl2nb-kl-token").nth(60).wait_for(timeout=60_000)
    page.get_by_role("button", name="Stop", exact=True).click()
    page.locator(".exl2nb-headline", has_text="Stopped").wait_for()
    count, status = book.run(4).split()
    assert status == "stopped"
    first = page.locator(".exl2nb-answer-text").first
    assert first.locator(".exl2nb-kl-token").count() == int(count)


def test_run_all(lab, page):
    """Every cell at once, without a click: what streams is waited for by the cell that needs it, and all texts are there."""
    cells = [
        SETUP,
        "caches",
        "compare",
        "caches.start()\ncompare.start();",
        "caches.wait(); compare.wait()\nprint(caches.status, compare.status)",
    ]
    book = Notebook(lab, page, cells)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).click()
    page.locator(".jp-Notebook .jp-Cell").nth(4).locator(".jp-InputPrompt", has_text=re.compile(r"\[5\]")).wait_for(timeout=90_000)
    assert book.output(4).strip() == "done done"
    assert page.locator(".exl2nb-caches .exl2nb-answer-text").count() == page.locator(".exl2nb-compare .exl2nb-answer-text").count() == 4
    assert "" not in page.locator(".exl2nb-answer-text").all_text_contents()
