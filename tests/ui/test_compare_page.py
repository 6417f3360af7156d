"""The real Compare bundle in a browser: streaming by cell, KL that comes later, differences, both themes, the export."""

from pathlib import Path

import pytest
from mock_host import MockHost, low_controls, state_of, violations

from exl2nb.widgets import Compare

NOTHING = {"n": 0, "tps": 0.0, "ttft_s": None}
EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"


@pytest.fixture(scope="module")
def compare(llm):
    """A finished run: the demo model, its three-bit copy, and dice."""
    columns = {"16 bits": llm, "4 bits": EXL2, "dice": (llm, {"temperature": 0.9, "seed": 3})}
    compare = Compare(columns, prompts=["It was a dark night, and the old man", "She opened the letter and"], max_tokens=24)
    compare.start().wait()
    return compare


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_finished_run(page, compare, screenshots, theme):
    host = MockHost(page, "compare", state_of(compare), theme=theme)
    assert page.locator(".exl2nb-prompt").all_inner_texts() == compare.prompts
    columns = page.locator(".exl2nb-answer-column")
    assert columns.count() == 6
    for cell, tokens in enumerate(tokens for answers in compare.answers for tokens in answers):
        assert columns.nth(cell).locator(".exl2nb-answer-text").evaluate("(e) => e.textContent") == "".join(t.text for t in tokens)
    frame = compare.to_frame()
    for cell, differs in enumerate(frame.first_difference):
        marks = columns.nth(cell).locator(".exl2nb-kl-token.exl2nb-differs")
        assert marks.count() == int(differs == differs)
        if differs == differs:
            assert marks.first.get_attribute("data-i") == str(int(differs))
    rows = page.locator(".exl2nb-summary tbody tr")
    assert rows.count() == 3 and "reference" in rows.first.inner_text() and "temperature 0.9" in rows.nth(2).inner_text()
    columns.nth(1).locator(".exl2nb-kl-token").nth(3).hover()
    host.frame()
    assert page.locator(".exl2nb-block").first.locator(".exl2nb-answer-text .exl2nb-current").count() == 3
    page.locator("section").screenshot(path=screenshots / f"compare-{theme}.png")
    page.get_by_role("button", name="Differences").click()
    host.frame()
    assert host.sent[-1]["values"]["view"] == "difference"
    page.locator("section").screenshot(path=screenshots / f"compare-difference-{theme}.png")
    assert violations(page) == []
    assert low_controls(page) == []


def test_a_run_from_click_to_measured(page, compare):
    empty = {"_tokens": [], "_run_prompts": [], "_measured": [], "_speeds": [], "prompts": ["One", "Two"]}
    host = MockHost(page, "compare", state_of(compare, status="idle", **empty))
    page.get_by_label("Prompts, one per line").fill("A <b>\n\nTwo")
    page.get_by_role("button", name="Generate").click()
    assert host.sent[-1] == {"type": "run", "prompts": ["A <b>", "Two"]}
    host.put(status="running", stage="4 bits: generating", _run_prompts=["A <b>", "Two"])
    words = {0: [" night", " fell"], 1: [" night", " rose"], 3: [" was", " it"]}
    deltas = [[[cell, text, i, 0.5, None, None, None, None] for i, text in enumerate(texts)] for cell, texts in words.items()]
    host.deliver(
        {"type": "snapshot", "run": 1, "seq": -1, "prompt": "", "items": [], "stats": NOTHING},
        *({"type": "delta", "run": 1, "seq": i, "items": items, "stats": NOTHING} for i, items in enumerate(deltas)),
    )
    texts = page.locator(".exl2nb-answer-text")
    assert texts.all_text_contents() == [" night fell", " night rose", "", " was it", "", ""]
    assert texts.locator(".exl2nb-differs").all_text_contents() == [" rose"]
    assert texts.nth(1).locator("[data-step='-1']").count() == 2, "not measured yet"
    host.put(_measured=[[1, [0.02, 1.5], [0.4, 0.1], [True, False]]], _speeds=[[1, 812.0, 0.01, "length"]])
    assert [e.get_attribute("data-step") for e in texts.nth(1).locator(".exl2nb-kl-token").all()] == ["2", "4"]
    assert "mean KL 0.76" in page.locator(".exl2nb-answer-foot").nth(1).inner_text()
    assert page.locator(".exl2nb-summary tbody tr").nth(1).locator("td").all_inner_texts()[-3:] == ["0.76", "50 %", "812"]
    page.get_by_role("button", name="Stop").click()
    assert host.sent[-1] == {"type": "stop"}
    host.put(prompts=["two\nlines"])
    assert page.get_by_label("Prompts, one per line").get_attribute("readonly") is not None


def test_export_without_network(page, compare, tmp_path):
    compare.to_html(tmp_path / "compare.html")
    assert (tmp_path / "compare.html").stat().st_size < 200_000
    page.context.set_offline(True)
    page.goto((tmp_path / "compare.html").as_uri())
    page.locator(".exl2nb-kl-token").first.wait_for()
    assert page.locator(".exl2nb-answer-text").count() == 6
    assert page.get_by_role("button", name="Generate").count() == 0
    page.get_by_role("button", name="Differences").click()
    page.locator("[data-view=difference]").wait_for(state="attached")
    assert page.locator("[data-view=difference]").count() == 1
