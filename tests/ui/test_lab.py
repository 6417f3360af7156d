"""The widgets in a real JupyterLab: what a reader clicks, what the kernel does, what the saved notebook keeps."""

import time

import pytest
from lab import Lab, Notebook

pytestmark = pytest.mark.slow  # run by .ci/run

FAKE = """
import time
from types import SimpleNamespace as Row
import exl2nb.widgets as w

class Model:
    name = "a slow fake model"
    def stream(self, prompt, *, max_tokens, **settings):
        for i in range(max_tokens):
            time.sleep(0.01)
            word = f" word{i}"
            yield Row(text=word, tokens=[Row(id=i, text=word, prob=1 / (1 + i % 7), rank=1 + i % 3, top=[(word, 0.5), (" other", 0.2)])])

play = w.Playground(Model(), prompt="Once upon a time", max_tokens=2000)
"""


@pytest.fixture(scope="module")
def shared(lab: Lab, lab_page):
    return Notebook(lab, lab_page, [FAKE, "play", "time.sleep(4); print('slept')", "print(play.wait(5)[:12], play.status)"])


@pytest.fixture
def book(shared):
    """The notebook with a new playground, displayed and idle."""
    shared.wait_idle()
    shared.run(0)
    shared.run(1)
    shared.page.locator(".exl2nb-headline", has_text="Ready").wait_for()
    return shared


@pytest.fixture
def page(shared):
    return shared.page


def test_a_cell_that_raises_fails_its_test(lab, lab_page):
    """However the front end renders an error; a warning on stderr is none."""
    fine = "import sys; print('a warning', file=sys.stderr); print('fine')"
    book = Notebook(lab, lab_page, ["1 / 0", "raise SystemExit(3)", "%no_such_magic", fine])
    for cell, name in enumerate(("ZeroDivisionError", "SystemExit", "UsageError")):
        with pytest.raises(AssertionError, match=name):
            book.run(cell)
    assert "fine" in book.run(3)


def words(page) -> int:
    return page.locator(".exl2nb-token").count()


def test_generate_stop_idle(book, page, screenshots):
    """Generate streams; Stop stops within a second, says so and keeps the text; the kernel is idle and goes on working."""
    page.get_by_role("button", name="Generate").click()
    page.locator(".exl2nb-token").nth(40).wait_for()
    assert "Generating" in page.locator(".exl2nb-headline").inner_text()
    clicked = time.monotonic()
    page.get_by_role("button", name="Stop").click()
    page.locator(".exl2nb-headline", has_text="Stopped after").wait_for(timeout=1000)
    assert time.monotonic() - clicked < 1
    book.wait_idle()
    count = words(page)
    assert page.locator(".exl2nb-headline").inner_text() == f"Stopped after {count} tokens"
    page.locator(".exl2nb-token").nth(5).hover()
    tip = page.locator(".exl2nb-tip")
    assert "␣word5" in tip.inner_text() and "␣other" in tip.inner_text()
    page.screenshot(path=screenshots / "lab-stopped.png")
    assert book.run(3).startswith(" word0 word1")
    assert words(page) == count


def test_works_while_another_cell_runs(book, page):
    """A busy cell delays neither the text nor Stop."""
    book.start(2)
    page.get_by_role("button", name="Generate").click()
    page.locator(".exl2nb-token").nth(30).wait_for(timeout=2500)
    page.get_by_role("button", name="Stop").click()
    page.locator(".exl2nb-headline", has_text="Stopped after").wait_for(timeout=1000)
    assert book.is_busy(2), "the cell was over too early to prove anything"


def test_saved_notebook_shows_the_text(book, page):
    """The twin without scripts is hidden beside the live widget, follows the run, and is what a reader without a kernel gets."""
    page.get_by_role("button", name="Generate").click()
    page.locator(".exl2nb-token").nth(20).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator(".exl2nb-headline", has_text="Stopped after").wait_for()
    assert page.locator(".exl2nb-static").count() == 1
    assert not page.locator(".exl2nb-static").is_visible()
    end = time.monotonic() + 20  # the twin follows the run, a moment behind the view
    while " word3" not in (outputs := book.save().cells[1].outputs)[1].data["text/html"]:
        assert time.monotonic() < end, outputs[1].data["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in outputs[0].data
    assert "Once upon a time" in outputs[1].data["text/html"]
    assert outputs[1].data["text/plain"].startswith("Playground(stopped after")


DEMO = """
import exl2nb as ex
llm = ex.demo()
play = ex.widgets.Playground(llm, prompt="It was a dark night, and the old man", max_tokens=900, seed=7)
"""


def test_the_demo_model(lab, lab_page, screenshots):
    """The real engine: Generate streams its text, Stop stops it within a second, the pages come back and the kernel is idle."""
    page = lab_page
    book = Notebook(lab, page, [DEMO, "play", "print(play.status, llm.engine.pages.num_free == llm.engine.spec.num_pages)"])
    book.run(0)
    book.run(1)
    page.get_by_role("button", name="Generate").click()
    page.locator(".exl2nb-token").nth(60).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator(".exl2nb-headline", has_text="Stopped after").wait_for(timeout=1000)
    book.wait_idle()
    text = page.locator(".exl2nb-text").inner_text()
    assert text.startswith("It was a dark night, and the old man ")
    page.locator(".exl2nb-log").evaluate("(log) => { log.scrollTop = 0; }")
    page.locator(".exl2nb-token[data-step='3']").first.hover()
    page.screenshot(path=screenshots / "lab-demo.png")
    page.locator(".exl2nb-playground").screenshot(path=screenshots / "playground.png")
    assert book.run(2).strip() == "stopped True"
