"""Playground in chat mode without a page: turns, versions, what is asked of the model, faults."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import chunk

import exl2nb as ex
from exl2nb.core.errors import GenerationError, OptionError, OutOfPages, TokenizerError
from exl2nb.widgets import Playground
from tests.widgets.page import state, tell

EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)>\u202eevil\x1b[31m & "quotes"'


class Talker:
    """Answers with its `words`, in turn; remembers the messages. `gate` is waited for before every word but the first."""

    def __init__(self, *words, gate=None):
        self.words, self.gate, self.asked, self.settings = list(words), gate, [], []

    def stream(self, prompt, **settings):
        raise AssertionError("chat mode asks chat()")

    def chat(self, messages, *, stream, **settings):
        assert stream
        self.asked.append([(m["role"], m["content"]) for m in messages])
        self.settings.append(settings)
        word = self.words.pop(0)
        if isinstance(word, Exception):
            raise word
        return self._answer(word)

    def _answer(self, words):
        for i, word in enumerate(words.split("|")):
            if i and self.gate is not None:
                self.gate.wait(5)
            yield chunk(word, i)


def shown(play):
    return [(turn.role, turn.text, turn.version, turn.versions) for turn in play.turns]


def test_reasoning_is_shown_beside_the_answer(llm):
    play = Playground(llm, chat=True, template=TEMPLATE + "<think>\n{# </think> #}", max_tokens=6, temperature=0.0)
    assert play.say("It was").wait()
    (_, answer) = play.turns
    assert answer.reasoning and not answer.text and answer.calls == []
    assert play.conversation.messages[1]["reasoning_content"] == answer.reasoning
    play.say("And then?").wait()
    assert "<summary>Reasoning</summary>" in play._repr_mimebundle_()[0]["text/html"]


def test_say_again_edit_and_go(sent):
    llm = Talker("good| day", "hi", "fine", "what?")
    play = Playground(llm, chat=True, seed=3)
    assert play.say("Hello") is play
    assert play.wait() == "good day"
    assert shown(play) == [("user", "Hello", 0, 1), ("assistant", "good day", 0, 1)]
    assert play.again().wait() == "hi"
    assert shown(play) == [("user", "Hello", 0, 1), ("assistant", "hi", 1, 2)]
    play.say("How are you?").wait()
    assert llm.asked[-1] == [("user", "Hello"), ("assistant", "hi"), ("user", "How are you?")]
    play.edit(play.turns[0].id, "Bye").wait()
    assert llm.asked[-1] == [("user", "Bye")]
    assert shown(play) == [("user", "Bye", 1, 2), ("assistant", "what?", 0, 1)]
    play.go(play.turns[0].id, 0)
    assert shown(play) == [("user", "Hello", 0, 2), ("assistant", "hi", 1, 2), ("user", "How are you?", 0, 1), ("assistant", "fine", 0, 1)]
    assert play.text == "fine"
    play.go(play.turns[1].id, 0)
    assert shown(play) == [("user", "Hello", 0, 2), ("assistant", "good day", 0, 2)]
    assert [item["text"] if isinstance(item, dict) else item[0] for item in sent[-1]["items"]] == ["good", " day"]
    assert (sent[-1]["type"], sent[-1]["items"][0][2]) == ("snapshot", 0.25), "an older answer keeps its probabilities"
    assert [turn._asdict() for turn in play.turns] == state(play, "_turns")
    assert llm.settings[0]["seed"] == 3
    assert llm.settings[0]["top_logprobs"] == 6
    assert len(play.conversation.tree) == 7


def test_messages_of_the_page(sent):
    llm = Talker("a", "b", "c")
    play = Playground(llm, chat=True)
    settings = {**play.settings, "temperature": 0.3}
    for message in (
        {"type": "chat_send", "text": "one", "settings": settings},
        {"type": "chat_again", "turn": 1, "settings": settings},
        {"type": "chat_edit", "turn": 0, "text": "two", "settings": settings},
        {"type": "chat_go", "turn": 3, "index": 0},
    ):
        tell(play, message)
        play.wait(5)
    assert (play.status, play.error, play.temperature) == ("done", "", 0.3)
    assert shown(play) == [("user", "one", 0, 2), ("assistant", "b", 1, 2)]
    for message in (
        {"type": "chat_go", "turn": 1, "index": 7},
        {"type": "chat_go", "turn": True, "index": 0},
        {"type": "chat_again", "turn": 99, "settings": settings},
        {"type": "chat_edit", "turn": 1, "text": "x", "settings": settings},
        {"type": "chat_send", "text": " ", "settings": settings},
        {"type": "chat_send", "text": ["x"], "settings": settings},
        {"type": "chat_send", "text": "x"},
    ):
        tell(play, message)
        assert play.error.startswith("OptionError: "), message
    assert len(play.conversation.tree) == 5, "what was refused left nothing"


def test_stop_keeps_what_was_said_and_the_next_message_follows_it():
    gate = threading.Event()
    llm = Talker("one|two|three", "next", gate=gate)
    play = Playground(llm, chat=True).say("Go")
    while not play.tokens:
        time.sleep(0.001)
    with pytest.raises(GenerationError, match="in progress"):
        play.again()
    with pytest.raises(GenerationError, match="in progress"):
        play.go(0, 0)
    tell(play, {"type": "chat_send", "text": "a second click", "settings": play.settings})
    play.stop()
    gate.set()
    text = play.wait()
    assert (play.status, play.turns[-1].text) == ("stopped", text)
    assert text.startswith("one")
    assert play.conversation.head.finish_reason == "cancelled"
    play.say("And?").wait()
    assert llm.asked[-1] == [("user", "Go"), ("assistant", text), ("user", "And?")]


def test_a_failure_leaves_the_message_and_the_older_answer():
    llm = Talker(OutOfPages("12 pages"), "fine", OutOfPages("12 pages"), OutOfPages("12 pages"), "sure")
    play = Playground(llm, chat=True)
    with pytest.raises(OutOfPages):
        play.say("Hello").wait()
    assert (play.status, play.error) == ("error", "OutOfPages: 12 pages")
    assert shown(play) == [("user", "Hello", 0, 1)]
    assert play.again().wait() == "fine"
    with pytest.raises(OutOfPages):
        play.again().wait()
    assert shown(play) == [("user", "Hello", 0, 1), ("assistant", "fine", 0, 1)]
    assert (play.text, play.status) == ("fine", "error")
    with pytest.raises(OutOfPages):
        play.say("More").wait()
    play.say("Less").wait()
    assert llm.asked[-1] == [("user", "Hello"), ("assistant", "fine"), ("user", "Less")], "no two messages in a row"
    assert shown(play)[2] == ("user", "Less", 1, 2)


def test_wrong_use_is_named():
    with pytest.raises(OptionError, match="chat=True"):
        Playground(Talker()).say("x")
    with pytest.raises(OptionError, match="no model"):
        Playground(chat=True).say("x")
    with pytest.raises(OptionError, match=r"has no chat\(\)"):
        Playground(SimpleNamespace(stream=print), chat=True).say("x")
    with pytest.raises(OptionError, match="there is no message yet"):
        Playground(Talker(), chat=True).again()
    assert Playground(Talker(), chat=True).turns == []


def test_hostile_text_stays_text_in_every_twin():
    play = Playground(Talker(HOSTILE, "x" * 1_000_000), chat=True).say(HOSTILE)
    play.wait()
    body = play._repr_mimebundle_()[0]
    assert "<script" not in body["text/html"]
    assert "<img" not in body["text/html"]
    assert body["text/html"].count("&lt;script&gt;") >= 2
    assert "\x1b" not in body["text/plain"]
    assert "\u202e" not in body["text/plain"]
    assert body["text/plain"].split("\n")[1].startswith("You: '<script>")
    page = play.to_html()
    assert "<script>alert(1)" not in page
    play.say("y" * 1_000_000).wait()
    assert len(play.turns[-1].text) == 1_000_000
    assert len(repr(play)) < 2000


def test_with_a_real_model(llm):
    play = Playground(llm, chat=True, template=TEMPLATE, max_tokens=6, temperature=0)
    first = play.say("It was a dark night.").wait()
    assert first == llm.chat("It was a dark night.", template=TEMPLATE, max_tokens=6, temperature=0).text
    assert play.again().wait() == first
    assert [turn.versions for turn in play.turns] == [1, 2]
    assert play.finish_reason == "length"
    play.say("And then?").wait()
    assert play.conversation.messages[:2] == [{"role": "user", "content": "It was a dark night."}, {"role": "assistant", "content": first}]


def test_a_model_without_a_chat_template_says_so_at_once(llm, tmp_path):
    with ex.load(EXL2, progress=None) as bare:
        with pytest.raises(TokenizerError, match="no chat template .* give template="):
            Playground(bare, chat=True)
        assert Playground(bare, chat=True, template=TEMPLATE, max_tokens=2).say("Hello").wait()
        assert Playground(bare).chat is False


def test_the_demo_model_has_a_template(llm):
    play = Playground(llm, chat=True, max_tokens=6, temperature=0)
    answer = play.say("Who goes there?").wait()
    assert llm.render_chat([{"role": "user", "content": "Who goes there?"}]) == '<s>"Who goes there?" said the visitor.\n\n"'
    again = llm.render_chat([*play.conversation.messages, {"role": "user", "content": "Alone?"}])
    assert again == f'<s>"Who goes there?" said the visitor.\n\n"{answer}\n\n"Alone?" said the visitor.\n\n"', (
        "the answer as it was written"
    )


def test_pictures_stand_with_their_turns_and_reach_the_model(monkeypatch):
    """The page sends data URLs and nothing else: the kernel's files cannot be named."""
    import numpy as np

    from exl2nb.model.vision.pictures import Picture

    talker = Talker("Red", "Blue")
    talker.vision = SimpleNamespace(
        tokens=lambda picture: 9,
        grid=lambda picture: (1, 3, 3),
        seen=lambda picture: picture.frames[0].resize((24, 24)),
        vision=SimpleNamespace(merge=1),
    )
    play = Playground(talker, chat=True, template=TEMPLATE)
    assert state(play, "_sees")
    url = Picture.of(np.zeros((300, 400, 3), np.uint8)).data_url
    tell(play, {"type": "chat_send", "text": "What is this?", "images": [url], "settings": {}})
    play.wait()
    ((role, content),) = talker.asked[0]
    assert role == "user"
    assert content == [{"type": "image", "image": url}, {"type": "text", "text": "What is this?"}]
    (shown,) = play.turns[0].images
    assert shown.note == "400 x 300 pixels, seen as 24 x 24 in 3 x 3 patches, 9 tokens"
    assert Picture.of(shown.url).size == (160, 160)
    pixels = np.asarray(Picture.of(shown.url).frames[0])
    assert pixels[10, 10].tolist() == [0, 0, 0] != pixels[10, 53].tolist(), "an edge between two patches"
    tell(play, {"type": "chat_send", "text": "Read it", "images": ["/etc/passwd"], "settings": {}})
    assert "data URLs" in play.error
    play.say("And now?", images=[np.zeros((4, 4), np.uint8)])
    play.wait()
    assert len(play.turns[2].images) == 1
    assert not state(Playground(Talker("x"), chat=True, template=TEMPLATE), "_sees")
