"""The real CacheExplorer bundle in a browser: choosing caches, streaming, the linked cursor, the needle, both themes, the export."""

import pytest
from mock_host import MockHost, low_controls, state_of, violations

from exl2nb.widgets import CacheExplorer
from tests.widgets.page import state

NOTHING = {"n": 0, "tps": 0.0, "ttft_s": None}


@pytest.fixture(scope="module")
def explorer(llm):
    """A finished run of the demo model, needle included."""
    explorer = CacheExplorer(llm, modes=["q8", "q6", "q4"], max_tokens=40, needle={"sentences": 8}, free=2_000_000_000)
    explorer.start().wait()
    explorer.hide_needle().wait()
    return explorer


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_finished_run(page, explorer, screenshots, theme):
    host = MockHost(page, "caches", state_of(explorer), theme=theme)
    columns = page.locator(".exl2nb-answer-column")
    assert columns.count() == 4
    for i, mode in enumerate(["fp16", "q8", "q6", "q4"]):
        tokens = explorer.tokens[mode]
        assert columns.nth(i).locator(".exl2nb-answer-text").evaluate("(e) => e.textContent") == "".join(t.text for t in tokens)
        assert columns.nth(i).locator(".exl2nb-bars > i").count() == len(tokens)
    assert "6,144 bytes per token" in columns.first.inner_text()
    steps = [sum(t.kl >= limit for limit in (0.001, 0.01, 0.1, 1)) for t in explorer.tokens["q4"]]
    assert columns.nth(3).locator(".exl2nb-kl-token").evaluate_all("(all) => all.map((e) => Number(e.dataset.step))") == steps
    columns.nth(3).locator(".exl2nb-kl-token").nth(5).hover()
    host.frame()
    assert page.locator(".exl2nb-answer-text .exl2nb-current").count() == 4, "one cursor in all columns"
    readout = page.locator(".exl2nb-readout-rows").inner_text()
    assert readout.startswith("Token 6") and "in FP16" in readout and "KL" in readout
    assert page.locator(".exl2nb-needle-table tbody tr").count() == 6
    assert page.locator(".exl2nb-verdict").inner_text() == state(explorer, "_verdict") != ""
    page.locator("section").screenshot(path=screenshots / f"caches-{theme}.png")
    assert violations(page) == []
    assert low_controls(page) == []


def test_choose_run_stream_and_stop(page, explorer):
    host = MockHost(
        page, "caches", state_of(explorer, status="idle", _tokens=[], _run_modes=[], _needle=[], _verdict="", modes=["fp16", "q8"])
    )
    assert host.sent == [{"type": "ready"}]
    assert page.get_by_role("checkbox", name="FP16").is_disabled(), "the reference stays"
    page.get_by_role("checkbox", name="Q4", exact=True).check()
    assert host.sent[-1]["values"]["modes"] == ["fp16", "q8", "q4"]
    page.get_by_label("Prompt").fill("A <b>dark")
    page.get_by_label("Tokens").fill("12")
    page.get_by_role("button", name="Generate").click()
    assert host.sent[-1] == {"type": "run", "prompt": "A <b>dark", "modes": ["fp16", "q8", "q4"], "max_tokens": 12}
    host.put(status="running", stage="q8", _run_modes=["fp16", "q8", "q4"], _run_prompt="A <b>dark")
    first = [[0, " night", 5, 0.5, 0.5, 0.0, True, None], [0, " fell", 6, 0.2, 0.2, 0.0, True, None]]
    second = [[1, " night", 5, 0.4, 0.5, 0.02, True, None], [1, " rose", 7, 0.3, 0.1, 1.5, False, " fell"]]
    snapshot = {"type": "snapshot", "run": 1, "seq": -1, "prompt": "A <b>dark", "items": [], "stats": NOTHING}
    host.deliver(
        snapshot, *({"type": "delta", "run": 1, "seq": i, "items": some, "stats": NOTHING} for i, some in enumerate((first, second)))
    )
    assert page.locator(".exl2nb-headline").inner_text() == "Q8…"
    assert page.locator(".exl2nb-answer-text").all_text_contents() == [" night fell", " night rose", ""]
    assert page.locator(".exl2nb-answer-text .exl2nb-differs").all_text_contents() == [" rose"]
    foot = page.locator(".exl2nb-answer-foot").nth(1).inner_text().replace("\u00a0", " ")
    assert "mean KL 0.76" in foot and "top-1 agreement 50 %" in foot and "first difference at token 2" in foot
    page.get_by_role("group", name="Q8: text").focus()
    page.keyboard.press("End")
    host.frame()
    assert page.locator("[aria-live=polite]").inner_text().startswith("Q8, token 2, rose: 30 % here, 10 % in FP16, KL 1.5; FP16 prefers")
    page.get_by_role("button", name="Stop").click()
    assert host.sent[-1] == {"type": "stop"}
    host.put(status="stopped")
    page.get_by_role("button", name="Run needle test").click()
    assert host.sent[-1] == {"type": "needle", "modes": ["fp16", "q8", "q4"]}


def test_export_without_network(page, explorer, tmp_path):
    explorer.to_html(tmp_path / "caches.html")
    assert (tmp_path / "caches.html").stat().st_size < 200_000
    page.context.set_offline(True)
    page.goto((tmp_path / "caches.html").as_uri())
    page.locator(".exl2nb-kl-token").first.wait_for()
    assert page.locator(".exl2nb-answer-text").first.evaluate("(e) => e.textContent") == "".join(t.text for t in explorer.tokens["fp16"])
    assert page.get_by_role("button", name="Generate").count() == 0
    assert page.locator(".exl2nb-needle-table").is_visible()
