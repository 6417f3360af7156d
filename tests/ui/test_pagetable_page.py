"""The real PageTable bundle in a browser: squares and requests, chains, the scrubber, playing, Live, both themes, the export."""

import re

import pytest
from mock_host import ROUNDED, MockHost, state_of, violations

import exl2nb
from exl2nb.widgets import PageTable
from tests.widgets.page import state

STORY = "The rain fell on the old town, and nobody was in the streets. " * 40


@pytest.fixture(scope="module")
def table():
    """Three requests, two of which begin alike; a cached text before them."""
    with exl2nb.demo(progress=None, cache_tokens=8192) as llm:
        llm.generate("The sea was quiet, and the ships lay in the harbour. " * 30, max_tokens=1)
        shots, labels = [llm.cache.snapshot()], ["one text is kept"]
        asked = llm.stream([STORY + "Then", STORY + "But", "It was a dark night"], max_tokens=400, seed=1, ignore_eos=True)
        chunks = asked.chunks()
        for i in range(60):
            next(chunks)
            if i % 15 == 0:
                shots.append(llm.cache.snapshot())
                labels.append(f"after {i} tokens")
        shots.append(llm.cache.snapshot())
        asked.cancel()
        for handle in asked:
            handle.result()
        shots.append(llm.cache.snapshot())
        yield PageTable(shots, labels=[*labels, "all three run", "and have ended"], title="demo_model")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_squares_requests_and_chains(page, table, screenshots, theme):
    table.frame = state(table, "_count") - 2
    host = MockHost(page, "pagetable", state_of(table), theme=theme)
    frame = table.shown
    cells = page.get_by_role("gridcell")
    assert cells.count() == len(frame["pages"])
    for i, cell in enumerate(frame["pages"]):
        assert cells.nth(i).get_attribute("data-state") == cell[0]
    assert page.locator(".exl2nb-request").count() == 3
    longest = max(frame["requests"], key=lambda one: len(one[5]))
    assert page.locator(".exl2nb-request").filter(has_text=re.compile(f"^{longest[0]}")).locator(".exl2nb-chip").all_inner_texts() == [
        str(i) for i in longest[5]
    ]
    shared = next(i for i, cell in enumerate(frame["pages"]) if len(cell[2]) > 1)
    cells.nth(shared).hover()
    host.frame()
    assert "shared by requests" in page.locator(".exl2nb-readout").inner_text()
    cells.nth(longest[5][-1]).click()
    host.frame()
    assert page.locator(".exl2nb-page.exl2nb-on").count() == len(longest[5]), "the page and all before it in its text"
    page.screenshot(path=screenshots / f"pagetable-{theme}.png")
    assert violations(page, besides=ROUNDED) == []


def test_scrubber_and_live_ask_the_kernel(page, table):
    table.frame = -1
    host = MockHost(page, "pagetable", state_of(table, _can_live=True))
    assert page.locator(".exl2nb-place").inner_text() == f"{state(table, '_count')} of {state(table, '_count')}"
    page.get_by_role("slider", name="Frame").fill("1")
    assert host.sent[-1] == {"type": "frame", "frame": 1, "live": False}
    table.frame = 1
    host.put(**state_of(table, _can_live=True))
    assert page.locator(".exl2nb-place").inner_text() == f"2 of {state(table, '_count')}"
    assert table.shown["label"] in page.locator(".exl2nb-head").inner_text()
    page.get_by_role("button", name="Live").click()
    assert host.sent[-1] == {"type": "frame", "frame": -1, "live": True}
    host.put(live=True, status="running")
    assert page.get_by_role("button", name="Live").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="Live").click()
    assert host.sent[-1] == {"type": "frame", "frame": -1, "live": False}


def test_keys(page, table):
    table.frame = -1
    host = MockHost(page, "pagetable", state_of(table))
    page.get_by_role("gridcell").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    host.frame()
    assert page.locator(".exl2nb-readout").inner_text().startswith("page 18: ")
    assert page.get_by_role("status").inner_text().startswith("page 18: ")


def test_export_replays_without_kernel(page, table, tmp_path):
    table.to_html(tmp_path / "pages.html")
    page.context.set_offline(True)
    page.goto((tmp_path / "pages.html").as_uri())
    page.get_by_role("slider", name="Frame").fill("0")
    page.wait_for_function("() => document.querySelector('.exl2nb-head').textContent.includes('one text is kept')")
    assert page.locator(".exl2nb-request").count() == 0
    assert page.locator("[data-state='cached'].exl2nb-page").count() > 0
    assert not page.get_by_role("button", name="Live").is_visible()
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("() => document.querySelector('.exl2nb-place').textContent.startsWith('3 of')", timeout=5000)
    page.get_by_role("button", name="Pause").click()


def test_words_are_text(page, table):
    table.frame = -1
    frame = {**state(table, "_frames")[0], "label": "<img src=x onerror=fail()>"}
    MockHost(page, "pagetable", state_of(table, title="<script>fail()</script>", _frames=[frame])).frame()
    assert page.locator("img").count() == 0
    assert "<img" in page.locator(".exl2nb-head").inner_text()
