"""Conversations: the tree, its JSON, what the cache keeps of branches, and the prompt to look at."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exl2nb as ex
from exl2nb.core.errors import ConfigError, ContextOverflow, OptionError, TokenizerError
from exl2nb.generator.handle import Channel, Handle
from exl2nb.generator.request import Completion, Timings
from exl2nb.llm import conversation
from exl2nb.llm.chat_prompt import rendered
from exl2nb.llm.conversation import Conversation, Tree

EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
OPTIONS = {"template": TEMPLATE, "max_tokens": 8, "temperature": 0}


def test_say_edit_regenerate_branch(llm):
    talk = llm.conversation(system="Answer shortly.", **OPTIONS)
    first = talk.say("It was a dark night.")
    assert first.role == "assistant" and first.content
    assert first.content == llm.chat(talk.messages[:2], **OPTIONS).text
    assert [turn.role for turn in talk.turns] == ["system", "user", "assistant"]
    second = talk.say("And then?")
    assert second.content == llm.chat(talk.messages[:-1], **OPTIONS).text
    other = talk.regenerate(temperature=1.0, seed=5)
    assert other.parent == second.parent and other.seed == 5
    assert talk.siblings(other) == [second, other]
    question = talk.turns[1]
    answer = talk.edit(question, "It was a fine day.")
    assert [turn.content for turn in talk.turns] == ["Answer shortly.", "It was a fine day.", answer.content]
    assert talk.siblings(talk.turns[1])[0] == question
    assert talk.goto(second) == second == talk.head
    assert [turn.content for turn in talk.turns][1] == "It was a dark night."
    corrected = talk.edit(second, "I do not know.")
    assert talk.head == corrected and corrected.role == "assistant"
    assert len(talk.tree) == 9
    assert "assistant (3/3): I do not know." in str(talk)
    assert repr(talk) == "Conversation(5 turns, 9 in 4 branches)"
    page = talk._repr_html_()
    assert "version 3 of 3" in page and "I do not know." in page


def test_streaming_and_cancel(llm):
    talk = llm.conversation(**OPTIONS)
    answer = talk.say("The old man", stream=True)
    shown = "".join(chunk.text for chunk in answer)
    assert shown == talk.head.content == llm.chat([{"role": "user", "content": "The old man"}], **OPTIONS).text
    answer = talk.say("Go on", stream=True, max_tokens=500, ignore_eos=True)
    next(answer)
    turn = answer.cancel()
    assert turn.finish_reason == "cancelled" and talk.head == turn and talk.turns[-2].content == "Go on"


def test_reasoning_and_calls_are_told_apart(llm, tmp_path):
    pytest.importorskip("llguidance")
    thinking = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    talk = llm.conversation(template=thinking, max_tokens=24, temperature=0, reasoning_budget=4)
    turn = talk.say("It was")
    assert turn.reasoning and turn.content and "think" not in turn.content + turn.reasoning
    assert turn.message == {"role": "assistant", "content": turn.content, "reasoning_content": turn.reasoning}
    assert "<summary>Reasoning</summary>" in talk._repr_html_()
    add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}
    options = {"template": "chatml", "tools": [add], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    talk = llm.conversation(**options)
    called = talk.say("1 and 2?")
    assert called.tool_calls and called.tool_calls[0]["function"]["name"] == "add"
    assert json.loads(called.tool_calls[0]["function"]["arguments"])["a"] in (1, 2)
    assert called.calls[0] in str(talk) and "Tool calls <code>add(" in talk._repr_html_()
    assert talk.say("3", role="tool", tool_choice="none", max_tokens=4).role == "assistant"
    talk.save(tmp_path / "talk.json")
    assert list(Conversation.load(llm, tmp_path / "talk.json").tree) == list(talk.tree)
    turns = json.loads((tmp_path / "talk.json").read_text())["turns"]
    assert "tool_calls" in turns[1] and not {"tool_calls", "reasoning"} & set(turns[0])
    turns[1]["tool_calls"] = [{"function": "add"}]
    with pytest.raises(ConfigError, match="tool_calls is"):
        Tree.from_json(turns, where="here")


def test_branches_find_their_beginning_in_the_cache(llm):
    talk = llm.conversation(**OPTIONS)
    talk.say("The rain fell on the old town and its harbour. " * 60)
    handle = talk.say("And then?", stream=True).handle
    reused = handle.result().timings.reused_tokens
    assert reused > 600
    talk.goto(talk.turns[1])
    handle = talk.say("What else?", stream=True).handle
    timings = handle.result().timings
    assert timings.reused_tokens > 600 and timings.prompt_tokens - timings.reused_tokens < 60


def test_save_and_load(llm, tmp_path):
    talk = llm.conversation(system="Be kind.", **OPTIONS)
    talk.say("Hello")
    talk.regenerate(seed=3, temperature=1.0)
    talk.goto(talk.turns[1])
    path = tmp_path / "talk.json"
    talk.save(path)
    again = llm.load_conversation(path)
    assert (list(again.tree), again.head, again.options) == (list(talk.tree), talk.head, talk.options)
    assert again.reply().content == talk.reply().content
    talk.options["post_sampling"] = print
    with pytest.raises(OptionError, match="not plain data"):
        talk.save(path)


def saved(tmp_path, llm):
    talk = llm.conversation(**OPTIONS)
    talk.head = talk.tree.add(None, "user", "Hello")
    talk.answered(talk.head, llm.generate("a", max_tokens=1))
    talk.save(tmp_path / "talk.json")
    return json.loads((tmp_path / "talk.json").read_text())


DAMAGE = [
    (lambda v: v.update(format="x"), "is no conversation"),
    (lambda v: v.update(version=2), "version 2 of the format; this library reads 1"),
    (lambda v: v.pop("turns"), "is no conversation"),
    (lambda v: v.update(head=7), "head is '7'; expected null or a turn from 0 to 1"),
    (lambda v: v.update(head=True), "head is 'True'"),
    (lambda v: v.update(turns={}), "turns is '{}'; expected a list"),
    (lambda v: v["turns"][1].update(parent=1), "turn 1: parent is '1'; expected null or an earlier turn"),
    (lambda v: v["turns"][1].pop("parent"), "turn 1: parent is 'None'; expected null or an earlier turn"),
    (lambda v: v["turns"][1].update(id=5), "turn 1: id is '5'; expected 1: turns are numbered in order"),
    (lambda v: v["turns"][0].update(role="root"), "turn 0: role is 'root'; expected one of system, user"),
    (lambda v: v["turns"][0].update(content=None), "turn 0: content is 'None'; expected a text"),
    (lambda v: v["turns"][0].update(extra=1), "turn 0 is "),
    (lambda v: v.update(options={"max_tokns": 3}), "did you mean 'max_tokens'"),
    (lambda v: v.update(options=[]), "options is"),
    (lambda v: v.update(options={"template": 3}), "template is '3'; expected Jinja source"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_damaged_files(damage, words, llm, tmp_path):
    value = saved(tmp_path, llm)
    damage(value)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=words):
        llm.load_conversation(path)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "1" * 5000, "\udcff", "{}", "null"])
def test_files_that_hold_no_conversation(text, llm, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match="conversation"):
        llm.load_conversation(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        llm.load_conversation(tmp_path / "missing.json")


def test_files_that_are_too_large_or_no_files(llm, tmp_path, monkeypatch):
    path = tmp_path / "talk.json"
    value = saved(tmp_path, llm)
    value["turns"] = value["turns"] * 50_001
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match="a list of at most 100000 turns"):
        llm.load_conversation(path)
    monkeypatch.setattr(conversation, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        llm.load_conversation(path)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="expected a regular file|directory"):
            llm.load_conversation(other)


def test_refusals(llm):
    talk = llm.conversation(**OPTIONS)
    for ask, words in [
        (lambda: talk.reply(), "nothing was said"),
        (lambda: talk.regenerate(), "expected an assistant's turn"),
        (lambda: talk.say(3), "text is '3'; expected a text"),
        (lambda: talk.say("a", max_token=3), "did you mean 'max_tokens'"),
        (lambda: talk.tree[99], "no turn 99"),
        (lambda: llm.conversation(temprature=3), "did you mean 'temperature'"),
    ]:
        with pytest.raises(OptionError, match=words):
            ask()
    assert talk.head.content == "a", "what was said stays, and reply() asks again"
    assert talk.reply().content
    with pytest.raises(OptionError, match="the current turn is the assistant's"):
        talk.reply()
    with pytest.raises(ContextOverflow):
        talk.say("word " * 5000)
    talk.say("b")  # in the place of what was too long
    assert [turn.content for turn in talk.turns if turn.role == "user"] == ["a", "b"]
    assert [len(turn.content) for turn in talk.siblings(talk.turns[2])] == [25000, 1]
    other = llm.conversation(**OPTIONS)
    other.say("Else")
    with pytest.raises(OptionError, match="is no turn of it"):
        talk.goto(other.head)
    with ex.load(EXL2, progress=None) as bare, pytest.raises(TokenizerError, match="no chat template"):
        bare.conversation().say("Hello")


class Echo:
    """A model that answers at once."""

    def chat(self, messages, *, stream=False, **options):
        timings = Timings(prompt_tokens=1, new_tokens=1, queue_s=0, first_token_s=0, prefill_s=0, decode_s=0)
        channel = Channel()
        channel.end(Completion(text=f"re {messages[-1]['content']}", tokens=(), finish_reason="eos", timings=timings, seed=1))
        return Handle(channel)

    def render(self, messages, **options):
        raise AssertionError


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_edits(data, tmp_path_factory):
    """The tree stays a tree, every path alternates as it was said, nothing is lost, and the file gives it all back."""
    talk = Conversation(Echo())
    sizes = []
    for number in range(data.draw(st.integers(1, 12))):
        turns = list(talk.tree)
        what = data.draw(st.sampled_from(["say", "edit", "regenerate", "goto"])) if turns else "say"
        turn = data.draw(st.sampled_from(turns)) if turns else None
        if what == "say":
            if talk.head is not None and talk.head.role == "user":
                talk.reply()
            talk.say(f"t{number}")
        elif what == "edit":
            talk.edit(turn, f"e{number}")
        elif what == "regenerate" and turn.role == "assistant":
            talk.regenerate(turn)
        else:
            talk.goto(turn)
        sizes.append(len(talk.tree))
    assert sizes == sorted(sizes)
    for turn in talk.tree:
        path = talk.tree.path(turn.id)
        assert [one.role for one in path] == ["user", "assistant"] * (len(path) // 2) + ["user"] * (len(path) % 2)
        assert turn in talk.tree.children(turn.parent)
    path = tmp_path_factory.mktemp("talk") / "talk.json"
    talk.save(path)
    again = Conversation.load(Echo(), path)
    assert list(again.tree) == list(talk.tree) and again.messages == talk.messages
    assert Tree.from_json(talk.tree.to_json(), where="x").to_json() == talk.tree.to_json()


def test_render(llm):
    shown = llm.render([{"role": "user", "content": "Hello"}], template=TEMPLATE)
    assert shown.warnings == ()
    assert shown.ids == llm.tokenizer.encode(shown.text, add_special=False)
    assert shown.pieces[0] == (1, "<s>", True) and not shown.pieces[1].special
    assert "<s>user: Hello" in str(shown) and "border" in shown._repr_html_()
    for template, words in [
        ("<s>" + TEMPLATE, "BOS is doubled: the prompt begins with '<s>' twice"),
        (TEMPLATE.replace("{{ bos_token }}", ""), "the template writes no BOS"),
        ("a<s>{{ 1 }}", "BOS '<s>' occurs inside the prompt"),
    ]:
        assert any(words in warning for warning in llm.render("Hello", template=template).warnings), template
    injected = llm.render("Hello</s>", template=TEMPLATE)
    assert "message 0 (user) holds special tokens as text: </s>; the model reads them as text" in str(injected)
    assert 2 not in injected.ids
    acting = llm.render([{"role": "system", "content": "Be brief.</s>"}, {"role": "user", "content": "Hello"}], template=TEMPLATE)
    assert "they act as such" in str(acting) and 2 in acting.ids
    assert rendered("", llm.tokenizer).pieces == ()
    talk = llm.conversation(**OPTIONS)
    talk.say("Hello", max_tokens=1)
    assert talk.render().text.startswith("<s>user: Hello\nassistant:")
