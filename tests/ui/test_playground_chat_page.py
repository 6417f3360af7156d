"""Playground in chat mode in a browser with a fake kernel: turns, versions, keyboard, hostile text."""

import pytest
from mock_host import MockHost, low_controls, state_of, violations

from exl2nb.widgets import Playground

STATS = {"n": 2, "tps": 812.0, "ttft_s": 0.02}
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def turn(number, role, text, version=0, versions=1, **more):
    return {
        "id": number,
        "role": role,
        "text": text,
        "version": version,
        "versions": versions,
        "reasoning": "",
        "calls": [],
        "images": [],
        **more,
    }


TURNS = [
    turn(0, "user", "Hello"),
    turn(2, "assistant", "Good day", 1, 2),
    turn(3, "user", HOSTILE),
    turn(4, "assistant", "Well then", 1, 3),
]


def snapshot(*words, run=1):
    items = [[word, i, 0.25, 2, [["other", 0.5]]] for i, word in enumerate(words)]
    return {"type": "snapshot", "run": run, "seq": 0, "prompt": "", "items": items, "stats": STATS}


def mounted(page, theme="light", **changes):
    state = state_of(Playground(chat=True))
    return MockHost(page, "playground", {**state, "_has_model": True, "_model_label": "demo", **changes}, theme=theme)


def finished(host):
    host.put(_turns=TURNS, status="done")
    host.deliver(snapshot("Well", " then"))


def last_message(host):
    return [message for message in host.sent if message["type"] != "save"][-1]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reasoning_and_calls(page, theme):
    host = mounted(page, theme)
    call = f"add({HOSTILE})"
    turns = [
        turn(0, "user", "1 and 2?"),
        turn(1, "assistant", "", reasoning=f"A sum. {HOSTILE}", calls=[call]),
        turn(2, "tool", "3"),
    ]
    host.put(_turns=[*turns, turn(3, "assistant", "Well then", reasoning="Fine.", calls=["end({})"])], status="done")
    host.deliver(snapshot("Well", " then"))
    thought = page.locator("details.exl2nb-turn-reasoning")
    assert thought.count() == 1 and not thought.locator(".exl2nb-turn-text").is_visible()
    thought.locator("summary").click()
    assert thought.locator(".exl2nb-turn-text").inner_text() == f"A sum. {HOSTILE}"
    assert page.locator(".exl2nb-turn-call code").all_text_contents() == [call, "end({})"]
    assert page.locator("img").count() == 0
    assert violations(page) == []


def test_send_stream_again_and_switch(page):
    host = mounted(page)
    box = page.get_by_label("Message", exact=True)
    box.fill("Hello")
    page.keyboard.press("Control+Enter")
    sent = last_message(host)
    assert (sent["type"], sent["text"], sent["settings"]["temperature"]) == ("chat_send", "Hello", 0.7)
    host.put(status="running", _turns=TURNS[:1])
    assert box.input_value() == "", "what was sent is a turn now"
    host.deliver(snapshot("Good"))
    assert page.locator(".exl2nb-turn-text").all_text_contents() == ["Hello"]
    assert page.locator(".exl2nb-token").all_text_contents() == ["Good"]
    count = len(host.sent)
    page.get_by_role("button", name="Edit turn 1").click(force=True)
    assert len(host.sent) == count, "not while an answer streams"
    host.put(status="done", _turns=[TURNS[0], turn(1, "assistant", "Good day")])
    page.get_by_role("button", name="Regenerate").click()
    assert (last_message(host)["type"], last_message(host)["turn"]) == ("chat_again", 1)
    finished(host)
    assert page.locator(".exl2nb-turn-text").all_text_contents() == ["Hello", "Good day", HOSTILE]
    assert page.locator(".exl2nb-turn-number").all_text_contents() == ["2/2", "2/3"]
    page.get_by_role("button", name="Next version of turn 4").focus()
    page.keyboard.press("Enter")
    assert last_message(host) == {"type": "chat_go", "turn": 4, "index": 2}
    host.put(_turns=[*TURNS[:3], turn(5, "assistant", "No", 2, 3)])
    focused = "() => document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == "Next version of turn 4", "the keyboard stays where it was"
    page.get_by_role("button", name="Previous version of turn 2").click()
    assert last_message(host) == {"type": "chat_go", "turn": 2, "index": 0}
    count = len(host.sent)
    page.get_by_role("button", name="Next version of turn 2").click(force=True)
    assert len(host.sent) == count, "there is no third version"


def test_edit_fills_the_box_and_sends_a_version(page):
    host = mounted(page)
    finished(host)
    box = page.get_by_label("Message", exact=True)
    page.get_by_role("button", name="Edit turn 1").click()
    assert box.input_value() == "Hello"
    assert box.evaluate("(e) => e === document.activeElement")
    page.get_by_role("button", name="Cancel edit").click()
    assert box.input_value() == ""
    page.get_by_role("button", name="Edit turn 1").click()
    box.fill("Bye")
    page.get_by_role("button", name="Send").click()
    sent = last_message(host)
    assert (sent["type"], sent["turn"], sent["text"]) == ("chat_edit", 0, "Bye")
    host.put(status="error", error="OptionError: no")
    assert box.input_value() == "Bye", "what was refused stays"


def test_text_is_text(page):
    host = mounted(page)
    finished(host)
    assert page.locator(".exl2nb-turns img, .exl2nb-turns script").count() == 0
    assert page.locator(".exl2nb-turn-text").nth(2).inner_text() == HOSTILE


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessible(page, theme, screenshots):
    host = mounted(page, theme)
    finished(host)
    page.get_by_role("button", name="Edit turn 3").focus()
    page.screenshot(path=screenshots / f"chat-{theme}.png")
    assert low_controls(page) == []
    assert violations(page, ".exl2nb") == []


def test_an_export_shows_the_turns_and_no_buttons(page, tmp_path):
    play = Playground(chat=True)
    play.set_trait("_turns", TURNS)
    play.to_html(tmp_path / "chat.html")
    page.context.set_offline(True)
    page.goto((tmp_path / "chat.html").as_uri())
    page.locator(".exl2nb-turn-text").nth(2).wait_for()
    assert page.locator(".exl2nb-turn-number").all_text_contents() == ["2/2", "2/3"]
    assert page.locator(".exl2nb-turns button:visible, .exl2nb-turn-answer button:visible").count() == 0


RED = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/q842iQAAAABJRU5ErkJggg=="


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_are_chosen_dropped_removed_and_sent(page, theme, tmp_path):
    import base64

    (tmp_path / "red.png").write_bytes(base64.b64decode(RED.partition(",")[2]))
    host = mounted(page, theme, _sees=True)
    waiting = page.get_by_role("button", name="Remove picture")
    page.locator("input[type=file]").set_input_files([tmp_path / "red.png", tmp_path / "red.png"])
    waiting.nth(1).wait_for()
    waiting.nth(0).click()
    assert waiting.count() == 1
    page.get_by_label("Message", exact=True).evaluate(
        """(box) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array([1, 2])], "a.png", { type: "image/png" }));
          data.items.add(new File(["text"], "a.txt", { type: "text/plain" }));
          box.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }"""
    )
    waiting.nth(1).wait_for()
    assert violations(page) == []
    waiting.nth(1).click()
    page.get_by_label("Message", exact=True).fill("What is this?")
    page.keyboard.press("Control+Enter")
    sent = last_message(host)
    assert sent["text"] == "What is this?"
    assert sent["images"] == [RED]
    asked = turn(0, "user", "What is this?", images=[[RED, "1 x 1 pixels, 9 tokens"]])
    host.put(status="running", _turns=[asked])
    assert waiting.count() == 0
    host.put(status="done", _turns=[asked, turn(1, "assistant", "Red")])
    host.deliver(snapshot("Red"))
    assert page.get_by_role("img", name="Picture, 1 x 1 pixels, 9 tokens").count() == 1
    assert page.locator("figcaption").inner_text() == "1 x 1 pixels, 9 tokens"
    assert violations(page) == []


def test_a_model_that_reads_text_alone_takes_no_pictures(page):
    mounted(page)
    assert not page.get_by_role("button", name="Picture").is_visible()
