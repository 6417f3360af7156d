"""The real Speculation bundle in a browser: runs, wrong guesses, charts, keys, both themes, the export."""

import pytest
from mock_host import MockHost, state_of, violations

from exl2nb.widgets import Speculation

PASSAGE = "It was a dark and stormy night. The old man had a boat and a dog. The rain fell on the roof of the house. "


@pytest.fixture(scope="module")
def seen(llm):
    speculation = {"kind": "ngram", "adaptive": False, "max_tokens": 5}
    return Speculation(llm, PASSAGE * 3, max_tokens=150, temperature=0, ignore_eos=True, speculation=speculation)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_runs_wrong_guesses_and_charts(page, seen, screenshots, theme):
    host = MockHost(page, "speculation", state_of(seen), theme=theme)
    tokens = seen.to_frame()
    options = page.get_by_role("option")
    assert options.count() == len(tokens)
    assert page.locator(".exl2nb-tokens [data-source='ngram']").count() == (tokens.source == "ngram").sum()
    assert page.locator(".exl2nb-tokens del").count() == (tokens.wrong.map(len) > 0).sum()
    assert page.locator(".exl2nb-passes > span").count() == tokens.step.nunique()
    step = tokens.groupby("step").size().idxmax()
    run = tokens.index[tokens.step == step]
    options.nth(int(run[0])).hover()
    host.frame()
    assert page.locator(".exl2nb-token.exl2nb-on").count() == len(run), "the whole pass is marked"
    said = page.locator(".exl2nb-readout").inner_text()
    assert "proposed by n-gram lookup, accepted" in said and f"pass {step + 1};" in said
    page.screenshot(path=screenshots / f"speculation-{theme}.png")
    assert violations(page) == []
    page.get_by_label("show rejected draft tokens").uncheck()
    host.frame()
    assert not page.locator(".exl2nb-tokens del").first.is_visible()


def test_keys(page, seen):
    host = MockHost(page, "speculation", state_of(seen))
    page.get_by_role("option").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    host.frame()
    assert page.get_by_role("option").nth(3).get_attribute("aria-selected") == "true"
    assert page.get_by_role("status").inner_text() == page.locator(".exl2nb-readout").inner_text()


def test_words_are_text(page, seen):
    tokens = [["<img src=x onerror=fail()>", 1, "target", 0.5, 0, ["<script>fail()</script>"]]]
    MockHost(page, "speculation", state_of(seen, _tokens=tokens, title="<b>no</b>")).frame()
    assert page.locator("img").count() == 0
    assert page.locator(".exl2nb-tokens del").inner_text() == "<script>fail()</script>"
    assert page.locator(".exl2nb-head b").inner_text() == "<b>no</b>"


def test_export_without_kernel(page, seen, open_export):
    open_export(seen)
    page.get_by_role("option").nth(5).hover()
    page.wait_for_function("() => document.querySelector('.exl2nb-readout').textContent.includes('pass ')")
