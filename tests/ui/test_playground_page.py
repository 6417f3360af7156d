"""The real Playground bundle in a browser with a fake kernel: what a reader sees, hears and presses."""

import pytest
from mock_host import MockHost, low_controls, state_of, violations

from exl2nb.widgets import Playground
from exl2nb.widgets.protocol import SAMPLER_FIELDS

TOP = [[" the", 0.5], [" dog", 0.25], [" a", 0.1]]
ITEMS = [[" dog", 11, 0.25, 2, TOP], [" ran", 12, 0.97, 1, [[" ran", 0.97]]], [".\n", 13, 0.02, 40, TOP], ["\n", 14, 0.6, 1, []]]
STATS = {"n": 4, "tps": 812.0, "ttft_s": 0.02}
NOTHING = {"n": 0, "tps": 0.0, "ttft_s": None}


def state(**changes) -> dict:
    return state_of(Playground(prompt="Once upon a"), _has_model=True, _model_label="demo · 4.0 bpw", **changes)


def snapshot(items=(), *, run=1, seq=-1):
    return {"type": "snapshot", "run": run, "seq": seq, "prompt": "Once upon a", "items": list(items), "stats": STATS if items else NOTHING}


def delta(seq, *items, run=1):
    return {"type": "delta", "run": run, "seq": seq, "items": list(items), "stats": STATS}


@pytest.fixture
def host(page):
    return MockHost(page, "playground", state())


def test_where_the_defaults_come_from(host, page):
    """Said above the controls, and nowhere for a widget without a model."""
    assert page.locator(".exl2nb-defaults").is_hidden()
    words = "temperature 0.6, top_p 0.95 from generation_config.json"
    MockHost(page, "playground", state(_defaults=words))
    page.locator(".exl2nb-settings > summary").click()
    assert page.locator(".exl2nb-defaults").inner_text() == f"Defaults: {words}"


def text(page) -> str:
    return page.locator(".exl2nb-text").inner_text()


def stream(host: MockHost) -> None:
    host.put(status="running")
    host.deliver(snapshot(), delta(0, *ITEMS[:2]), delta(1, *ITEMS[2:]))


def test_a_run_from_click_to_done(host, page):
    assert host.sent == [{"type": "ready"}]
    assert page.locator(".exl2nb-headline").inner_text() == "Ready"
    page.get_by_label("Prompt").fill("A dark")
    page.get_by_role("button", name="Generate").click()
    generate = host.sent[-1]
    assert (generate["type"], generate["prompt"]) == ("generate", "A dark")
    assert generate["settings"]["temperature"] == 0.7
    stream(host)
    assert page.locator(".exl2nb-token").all_text_contents() == [item[0] for item in ITEMS]
    assert text(page).startswith("Once upon a dog ran.")
    log = page.get_by_role("log")
    assert log.get_attribute("aria-busy") == "true"
    assert page.get_by_role("button", name="Generate").get_attribute("aria-disabled") == "true"
    page.get_by_role("button", name="Stop").click()
    assert host.sent[-1] == {"type": "stop"}
    host.frame()
    assert page.locator(".exl2nb-headline").inner_text() == "Stopping…"
    host.deliver({"type": "done", "run": 1, "seq": 1, "reason": "stopped", "stats": STATS})
    host.put(status="stopped")
    assert page.locator(".exl2nb-headline").inner_text() == "Stopped after 4 tokens"
    assert page.locator(".exl2nb-figures").inner_text() == "812 tok/s · first token after 20 ms"
    assert log.get_attribute("aria-busy") == "false"
    assert page.get_by_role("status").inner_text() == "Stopped after 4 tokens"


def test_ctrl_enter_generates_and_other_shortcuts_stay_the_notebooks(host, page):
    page.evaluate("() => { window.seen = []; document.addEventListener('keydown', (e) => window.seen.push(e.key)); }")
    page.get_by_label("Prompt").focus()
    page.keyboard.press("Control+Enter")
    assert host.sent[-1]["type"] == "generate"
    page.keyboard.press("a")
    assert page.locator("section").get_attribute("data-lm-suppress-shortcuts") == "true"
    page.keyboard.press("Control+s")
    assert page.locator("section").get_attribute("data-lm-suppress-shortcuts") is None
    assert page.evaluate("() => window.seen") == ["Control", "s"] or "s" in page.evaluate("() => window.seen")
    assert "a" not in page.evaluate("() => window.seen")


def test_a_lost_delta_is_healed_by_a_snapshot(host, page):
    host.put(status="running")
    host.deliver(snapshot(), delta(0, ITEMS[0]), delta(2, ITEMS[2]))
    assert host.sent[-1] == {"type": "resync"}
    host.deliver(snapshot(ITEMS, seq=2))
    assert page.locator(".exl2nb-token").count() == 4


def test_a_second_view_shows_the_same_and_closing_leaves_nothing(host, page):
    stream(host)
    page.evaluate("async () => { window.closeSecond = await window.view('second'); }")
    assert page.locator("#second .exl2nb-token").count() == 4
    listeners = page.evaluate("() => window.listenerCount()")
    page.evaluate("() => { window.closeSecond(); window.closeView(); window.forget(); }")
    assert page.locator(".exl2nb").count() == 0
    assert page.evaluate("() => window.listenerCount()") == 0 < listeners


def test_pointer_and_keyboard_show_the_same_card(host, page):
    stream(host)
    tip = page.locator(".exl2nb-tip")
    page.locator(".exl2nb-token").first.hover()
    pointed = tip.inner_text()
    assert {"␣dog", "25 %", "rank 2 · token id 11", "␣the", "50 %"} <= set(pointed.split("\n"))
    page.mouse.move(0, 0)
    assert not tip.is_visible()
    page.get_by_role("log").focus()
    page.keyboard.press("Home")
    assert tip.inner_text() == pointed
    spoken = page.locator("[aria-live=polite].exl2nb-sr")
    assert spoken.inner_text() == "Token “dog”; 25 % likely; rank 2; alternatives: “the” 50 %, “a” 10 %"
    page.keyboard.press("ArrowRight")
    assert "␣ran" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_alternatives_are_fetched_when_somebody_looks(host, page):
    host.deliver(snapshot(), delta(0, *([*item[:4], None] for item in ITEMS[:3])))
    tip = page.locator(".exl2nb-tip")
    page.locator(".exl2nb-token").first.hover()
    assert "loading alternatives…" in tip.inner_text()
    assert [m for m in host.sent if m["type"] == "look_at"] == [{"type": "look_at", "run": 1, "at": 0}]
    host.deliver({"type": "tops", "run": 0, "at": 0, "top": []}, {"type": "tops", "run": 1, "at": 9, "top": []})
    assert "loading alternatives…" in tip.inner_text()
    host.deliver({"type": "tops", "run": 1, "at": 0, "top": TOP})
    assert {"␣dog", "25 %", "␣the", "50 %"} <= set(tip.inner_text().split("\n"))
    page.locator(".exl2nb-token").nth(1).hover()
    host.put(_tokens=[list(item) for item in ITEMS[:3]])
    assert "␣ran" in tip.inner_text().split("\n"), "the run is over and the rows came whole"
    assert "follow" not in tip.inner_text()
    page.locator(".exl2nb-token").nth(2).hover()
    assert len([m for m in host.sent if m["type"] == "look_at"]) == 2, "nothing more to ask for"


def test_the_card_says_what_the_samplers_removed(host, page):
    stream(host)
    first = page.locator(".exl2nb-token").first
    first.hover()
    page.wait_for_timeout(200)
    assert not [m for m in host.sent if m["type"] == "look_into"], "nothing is computed beside a run"
    page.mouse.move(0, 0)
    host.put(status="done")
    first.hover()
    page.wait_for_function("() => document.querySelector('.exl2nb-tip:popover-open')")
    page.wait_for_timeout(200)
    assert [m for m in host.sent if m["type"] == "look_into"] == [{"type": "look_into", "run": 1, "at": 0}]
    host.deliver({"type": "fates", "run": 1, "at": 0, "names": ["", "", "top_p"], "left": 2, "of": 4096})
    tip = page.locator(".exl2nb-tip")
    assert page.locator(".exl2nb-tip-fate").all_inner_texts() == ["kept", "kept", "removed by top-p"]
    assert tip.inner_text().endswith("2 of 4,096 candidates left after the samplers")
    assert violations(page, ".exl2nb") == []
    page.mouse.move(0, 0)
    page.get_by_role("log").focus()
    page.keyboard.press("Home")
    assert page.locator("[aria-live=polite].exl2nb-sr").inner_text().endswith("2 of 4096 candidates left after the samplers")
    page.wait_for_timeout(200)
    assert len([m for m in host.sent if m["type"] == "look_into"]) == 1, "asked once"


def test_plain_view_has_no_tint_and_marks_are_not_colour_alone(host, page):
    stream(host)
    tint = "() => getComputedStyle(document.querySelector('.exl2nb-token')).backgroundColor"
    underline = "() => getComputedStyle(document.querySelector('.exl2nb-token')).textDecorationLine"
    assert page.evaluate(tint) != "rgba(0, 0, 0, 0)"
    assert page.evaluate(underline) == "underline"
    page.get_by_role("radio", name="Plain").click()
    assert page.evaluate(tint) == "rgba(0, 0, 0, 0)"
    assert page.evaluate(underline) == "none"
    assert host.sent[-1]["values"]["view"] == "plain"


def test_rank_view_tints_by_place_and_says_which(host, page):
    stream(host)
    colour = "(e) => getComputedStyle(e).backgroundColor"
    by_probability = page.locator(".exl2nb-token").evaluate_all(f"(all) => all.map({colour})")
    page.get_by_role("radio", name="Rank").click()
    assert host.sent[-1]["values"]["view"] == "rank"
    tints = page.locator(".exl2nb-token").evaluate_all(f"(all) => all.map({colour})")
    keys = page.locator(".exl2nb-key i").evaluate_all(f"(all) => all.map({colour})")
    assert [keys.index(tint) for tint in tints] == [1, 0, 3, 0], "ranks 2, 1, 40, 1"
    assert len(set(keys)) == 4
    assert page.locator(".exl2nb-key").all_inner_texts()[:4] == ["1st", "2nd–3rd", "4th–10th", "11th or later"]
    host.deliver(delta(2, *([" x", 15, None if rank is None else 0.3, rank, []] for rank in (None, 3, 4, 10, 11))))
    tints = page.locator(".exl2nb-token").evaluate_all(f"(all) => all.map({colour})")
    assert [keys.index(tint) for tint in tints[4:]] == [0, 1, 2, 2, 3]
    page.get_by_role("radio", name="Probability").click()
    assert page.locator(".exl2nb-token").evaluate_all(f"(all) => all.map({colour})")[:4] == by_probability
    assert page.locator(".exl2nb-key i").count() == 5


def test_controls_write_traits_and_traits_write_controls(host, page):
    page.locator("summary").first.click()
    page.get_by_label("Temperature", exact=True).fill("900")
    page.keyboard.press("Tab")
    assert host.sent[-1]["values"]["temperature"] == 100, "more than SamplingParams takes"
    assert page.get_by_label("Temperature, slider", exact=True).input_value() == "2", "the slider is not at its end"
    page.get_by_label("Temperature", exact=True).fill("2")
    page.keyboard.press("Tab")
    page.get_by_label("Seed").fill("7")
    page.keyboard.press("Tab")
    assert host.sent[-1]["values"]["seed"] == 7
    assert "temperature 2 · top-p 0.95 · seed 7" in page.locator("summary").first.inner_text()
    host.put(top_k=40)
    assert page.get_by_label("Top-k", exact=True).input_value() == "40"


def test_the_folded_samplers_are_controls_too(host, page):
    page.locator("summary").first.click()
    more = page.locator("details.exl2nb-more")
    assert more.get_attribute("open") is None
    assert more.locator("summary").inner_text().split("\n") == ["More samplers", "all off"]
    more.locator("summary").click()
    assert more.locator(".exl2nb-control").count() == sum(not one["common"] for one in SAMPLER_FIELDS)
    page.get_by_label("Typical-p", exact=True).fill("7")
    page.keyboard.press("Tab")
    assert host.sent[-1]["values"]["typical_p"] == 1, "no more than SamplingParams takes"
    page.get_by_label("DRY range", exact=True).fill("9000.4")
    page.keyboard.press("Tab")
    assert host.sent[-1]["values"]["dry_range"] == 9000, "whole, and beyond the slider"
    page.get_by_label("Skew", exact=True).fill("-0.5")
    page.keyboard.press("Tab")
    page.get_by_label("Mirostat", exact=True).check()
    assert host.sent[-1]["values"]["mirostat"] is True
    assert "mirostat · skew -0.5 · DRY range 9000" in page.locator("summary").first.inner_text()
    assert more.locator("summary").inner_text().split("\n")[1] == "3 changed"
    host.put(top_a=0.25)
    assert page.get_by_label("Top-a, slider").input_value() == "0.25"
    page.get_by_role("button", name="Generate").click()
    settings = host.sent[-1]["settings"]
    assert {name: settings[name] for name in ("dry_range", "mirostat", "skew", "top_a", "tfs")} == {
        "dry_range": 9000, "mirostat": True, "skew": -0.5, "top_a": 0.25, "tfs": 1,
    }  # fmt: skip


def test_scrolls_only_while_the_reader_is_at_the_end(host, page):
    host.put(status="running")
    words = [[f" word{i}", i, 0.5, 1, []] for i in range(2000)]
    host.deliver(snapshot(), delta(0, *words[:1000]))
    log = page.locator(".exl2nb-log")
    at_end = "(e) => e.scrollHeight - e.scrollTop - e.clientHeight < 2"
    assert log.evaluate(at_end)
    log.evaluate("(e) => { e.scrollTop = 0; }")
    host.frame()
    host.deliver(delta(1, *words[1000:]))
    assert log.evaluate("(e) => e.scrollTop") == 0
    page.get_by_role("button", name="Scroll to end").click()
    assert log.evaluate(at_end)


def test_lines_are_blocks_and_the_text_stays_exact(host, page):
    """A finished line is never laid out again; what is copied has the breaks of the text and no others."""
    host.put(status="running")
    words = [" one", "\n", "\n", " two\n", "th\nree", " four"]
    for seq, word in enumerate(words):
        host.deliver(*([snapshot()] if not seq else []), delta(seq, [word, seq, 0.5, 1, []]))
    assert page.locator(".exl2nb-line").count() == 4
    whole = "Once upon a" + "".join(words)
    assert page.locator(".exl2nb-text").evaluate("(e) => e.textContent") == whole
    copied = page.evaluate("""() => {
      getSelection().selectAllChildren(document.querySelector('.exl2nb-text'));
      const data = new DataTransfer();
      const event = new ClipboardEvent('copy', {clipboardData: data, bubbles: true, cancelable: true});
      document.querySelector('.exl2nb-line').dispatchEvent(event);
      return data.getData('text/plain');
    }""")
    assert copied == whole
    tops = page.locator(".exl2nb-line").evaluate_all("(all) => all.map((e) => Math.round(e.offsetHeight / all[0].offsetHeight))")
    assert tops == [1, 1, 1, 2], "an empty line is a line, a break within a token breaks, and none is drawn twice"
    log = page.get_by_role("log")
    log.focus()
    page.keyboard.press("End")
    assert page.locator(".exl2nb-current").inner_text() == " four"


def test_errors_and_other_versions_are_shown(page):
    host = MockHost(page, "playground", state(status="error", error="OutOfPages: 12 pages needed"))
    assert page.get_by_role("alert").inner_text() == "OutOfPages: 12 pages needed"
    host.put(_protocol=99)
    host.put(error="")
    assert "reload the page" in page.get_by_role("alert").inner_text()


def test_text_is_text(host, page):
    host.put(status="running")
    host.deliver(snapshot(), delta(0, ["<img src=x onerror=alert(1)>", 1, 0.5, 1, [["<b>", 0.5]]]))
    assert page.locator(".exl2nb-text img").count() == 0
    assert "<img" in text(page)


@pytest.mark.parametrize("view", ["probability", "rank"])
@pytest.mark.parametrize("theme", ["light", "dark", "none"])
def test_accessible(page, theme, view, screenshots):
    host = MockHost(page, "playground", state(error="something to read", view=view), theme=theme)
    stream(host)
    for summary in page.locator("summary").all():
        summary.click()
    page.locator(".exl2nb-token").first.hover()
    page.screenshot(path=screenshots / (f"page-{theme}.png" if view == "probability" else f"rank-{theme}.png"))
    assert low_controls(page) == []
    assert violations(page, ".exl2nb") == []


def test_offline_export_shows_text_without_network(page, tmp_path, screenshots):
    play = Playground(result={"prompt": "Once upon a", "tokens": ITEMS, "finish_reason": "length"})
    play.to_html(tmp_path / "play.html")
    page.context.set_offline(True)
    page.goto((tmp_path / "play.html").as_uri())
    page.locator(".exl2nb-token").nth(3).wait_for()
    assert text(page).startswith("Once upon a dog ran.")
    assert not page.get_by_role("button", name="Generate").is_visible()
    page.locator(".exl2nb-token").first.hover()
    assert "25 %" in page.locator(".exl2nb-tip").inner_text()
    page.screenshot(path=screenshots / "offline.png")
