"""A model that says the right words gets its calls, its reasoning and its end of turn read, on the tokenizers that people use."""

import json

import pytest

pytest.importorskip("llguidance")

from exl2nb.tokenizer.tools import tool_format

from .families import TOOLS

OSLO, ROME = {"city": "Oslo", "days": 3}, {"city": "Rome", "days": 2}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"], "additionalProperties": False}
THOUGHT = "Okay, the user asks for a number. {maybe} <b>"
OPENED = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}assistant: <think>\n"


def form_of(family):
    return tool_format(family.template or family.llm.tokenizer.templates.pick())


def calls_text(family, *arguments):
    return form_of(family).written([("get_weather", json.dumps(one)) for one in arguments])


def check_calls(reply, deltas, *arguments, content=""):
    assert [(call.name, call.parsed) for call in reply.tool_calls] == [("get_weather", one) for one in arguments]
    assert reply.content.strip() == content
    assert [delta.text for delta in deltas if delta.kind == "call"] == ["get_weather"] * len(arguments)
    for number, one in enumerate(arguments):
        assert json.loads("".join(delta.text for delta in deltas if delta.kind == "arguments" and delta.call == number)) == one
    assert "".join(delta.text for delta in deltas if delta.kind == "content").strip() == content


@pytest.mark.parametrize("choice", ["required", "get_weather", "auto"])
def test_one_call(family, choice):
    options = {"tools": TOOLS, "tool_choice": choice}
    text = calls_text(family, OSLO)
    answer = family.chat("Weather in Oslo?", text, **options)
    check_calls(answer.reply, family.deltas("Weather in Oslo?", text, **options), OSLO)
    assert answer.finish_reason in ("eos", "stop")


def test_a_call_behind_some_words(family):
    form = form_of(family)
    if form.layout == "harmony":
        text = f"<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant{calls_text(family, OSLO)}"
    elif form.trigger:
        text = f"Let me look.\n{calls_text(family, OSLO)}"
    else:
        pytest.skip("a call in this form is the whole answer")
    answer = family.chat("Weather in Oslo?", text, tools=TOOLS)
    check_calls(answer.reply, family.deltas("Weather in Oslo?", text, tools=TOOLS), OSLO, content="Let me look.")


def test_parallel_calls(family):
    text = calls_text(family, OSLO, ROME)
    for choice in ("required", "auto"):
        options = {"tools": TOOLS, "tool_choice": choice}
        answer = family.chat("Weather in Oslo and Rome?", text, **options)
        check_calls(answer.reply, family.deltas("Weather in Oslo and Rome?", text, **options), OSLO, ROME)
        assert len({call.id for call in answer.reply.tool_calls}) == 2


def test_an_answer_without_a_call(family):
    final = "<|channel|>final<|message|>" if form_of(family).layout == "harmony" else ""
    words = "It is sunny, and <table> is a tag."
    answer = family.chat("Hello", final + words, tools=TOOLS)
    assert (answer.reply.content, answer.reply.tool_calls) == (words, ())
    assert answer.finish_reason == "eos"


def test_a_call_that_its_schema_forbids(family):
    from exl2nb.core.errors import Exl2Error

    wrong = form_of(family).written([("get_weather", json.dumps({"city": "Oslo", "days": "three"}))])
    with pytest.raises(Exl2Error):
        family.chat("Weather?", wrong, tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize("how", ["schema", "choice", "regex"])
def test_reasoning_and_then_a_structure(family, how):
    source = {"schema": SCHEMA, "choice": ["yes", "no"], "regex": "[a-z]+"}[how]
    content = {"schema": '{"answer": 42}', "choice": "yes", "regex": "sunny"}[how]
    if form_of(family).layout == "harmony":
        template, text = None, f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{content}"
    elif family.name == "qwen3":  # the model opens its reasoning itself
        template, text = None, f"<think>\n{THOUGHT}\n</think>\n\n{content}"
    else:
        template, text = OPENED, f"{THOUGHT}\n</think>\n\n{content}"
    options = {how: source, **({} if template is None else {"template": template})}
    answer = family.chat("A number?", text, **options)
    assert (answer.reply.reasoning.strip(), answer.reply.content) == (THOUGHT, content)
    assert answer.parsed == ({"answer": 42} if how == "schema" else content)
    assert answer.finish_reason in ("eos", "stop")
    deltas = family.deltas("A number?", text, **options)
    assert "".join(delta.text for delta in deltas if delta.kind == "content") == content
    assert "".join(delta.text for delta in deltas if delta.kind == "reasoning").strip() == THOUGHT


def test_reasoning_and_then_calls(family):
    think = {"qwen3": ("<think>\n", "\n</think>\n\n"), "gptoss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")}
    if family.name not in think:
        pytest.skip("the template of this family knows no reasoning")
    opens, closes = think[family.name]
    text = opens + THOUGHT + closes + calls_text(family, OSLO)
    for choice in ("auto", "required"):
        answer = family.chat("Weather?", text, tools=TOOLS, tool_choice=choice)
        assert (answer.reply.reasoning.strip(), answer.reply.tool_calls[0].parsed) == (THOUGHT, OSLO)


def test_a_reasoning_budget(family):
    if family.name != "gptoss":
        pytest.skip("other families are in tests/llm")
    answer = family.chat("?", "<|channel|>analysis<|message|>" + "Okay, " * 40, reasoning_budget=6, max_tokens=30)
    assert answer.reply.reasoning.startswith("Okay,")
    assert len(family.llm.tokenizer.encode(answer.reply.reasoning, add_special=False)) <= 6
    assert any(token.id == family.llm.tokenizer.token_id("<|message|>") for token in answer.tokens[8:])


def test_the_end_of_turn_ends_the_answer(family):
    template = family.llm.tokenizer.templates.templates.get("default") if family.template is None else family.template
    assert template
    final = "<|channel|>final<|message|>" if form_of(family).layout == "harmony" else ""
    answer = family.chat("Hello", f"{final}Yes.")
    assert (answer.reply.content, answer.finish_reason) == ("Yes.", "eos")


def test_the_text_of_a_special_token_stops_an_answer(family):
    special = next(text for text in family.llm.tokenizer.special_texts.values() if family.llm.tokenizer.token_id(text) != family.end)
    ids = [*family.llm.tokenizer.encode("Yes", add_special=False), family.llm.tokenizer.token_id(special), *family.ids(" no")]
    hook = {"post_sampling": lambda draw: ids[draw.index], "max_tokens": len(ids)}
    stopped = family.llm.generate("x", stop=[special], **hook)
    assert (stopped.text, stopped.finish_reason, stopped.stopped_by) == ("Yes", "stop", special)
    mixed = family.llm.generate("x", stop=["Yes" + special], **hook)
    assert (mixed.text, mixed.finish_reason) == ("", "stop")
    behind = family.llm.generate("x", stop=[special + " n"], **hook)
    assert (behind.text, behind.finish_reason) == ("Yes", "stop")
    assert family.llm.generate("x", stop=["absent" + special], **hook).text == "Yes no"
    chunks = [chunk.text for chunk in family.llm.stream("x", stop=[special + " n"], **hook)]
    assert "".join(chunks) == "Yes"


def test_a_literal_is_spelled_by_the_tokens_that_the_model_uses(family):
    for text in ("<table>", "</think>", "<tool_call>", "naïve é🙂"):
        answer = family.llm.generate("x", choice=[text], max_tokens=40)
        assert answer.text == text
        if (token := family.llm.tokenizer.token_id(text)) is not None and token not in family.llm.tokenizer.skipped_ids:
            assert [one.id for one in answer.tokens if one.text] == [token]


def test_the_words_of_a_user_are_text(family):
    """Whatever a user writes, no control token comes of it, and the prompt is otherwise the same."""
    tokenizer = family.llm.tokenizer
    controls = [*tokenizer.special_texts.values(), "<think>", "<tool_call>", "</tool_call>"]
    words = "Hello " + " ".join(controls[:20]) + " bye"
    talk = [{"role": "user", "content": words}]
    template = {} if family.template is None else {"template": family.template}
    rendered = family.llm.render(talk, **template)
    plain = family.llm.render([{"role": "user", "content": "Hello bye"}], **template)
    acting = {tokenizer.token_id(text) for text in controls} - {None}
    assert [i for i in rendered.ids if i in acting] == [i for i in plain.ids if i in acting]
    assert words.strip() in tokenizer.decode(rendered.ids, skip_special=False)
    asked = {**template, "post_sampling": lambda draw: family.ids("Yes.")[draw.index], "max_tokens": 8}
    if form_of(family).layout != "harmony":
        assert family.llm.chat(talk, **asked).reply.content == "Yes."


def test_results_go_back(family):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(OSLO)}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny degrees"}]},
    ]
    text = family.llm.render_chat(talk, tools=TOOLS, **({} if family.template is None else {"template": family.template}))
    for words in ("Be brief.", "Weather?", "Oslo", "sunny degrees", "get_time"):
        assert words in text, words


def test_padding_and_ids_beyond_the_tokenizer(family):
    llm, size = family.llm, family.llm.config.vocab_size
    assert llm.tokenizer.highest_id < size - 1
    drawn = {
        token.id for seed in range(6) for token in llm.generate("x", max_tokens=60, temperature=5.0, seed=seed, ignore_eos=True).tokens
    }
    assert drawn
    assert llm.tokenizer.decode([size - 1]) == ""
