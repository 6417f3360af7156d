import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("llguidance")

import exl2nb
from exl2nb.constraint.reply_grammar import behind_reasoning, call_structure
from exl2nb.core.errors import OptionError, StructureError
from exl2nb.tokenizer.reply import ReplyFormat
from exl2nb.tokenizer.tokenizer import Tokenizer
from exl2nb.tokenizer.tools import FORMATS, tools_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tokenizer"))
from test_reply import PLAIN_FORMATS, THINK, written

DEMO = Path(exl2nb.__file__).parent / "demo_model"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 2}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
TOOLS = tools_of([{"name": "weather", "parameters": PARAMETERS}, {"name": "now"}])
FINE = [("weather", {"city": "Oslo < 3", "days": 3, "unit": "C"}), ("now", {})]
VOCAB = 4096


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEMO)


def accepts(structure, tokenizer, text):
    ids = tokenizer.encode(text, add_special=False)
    constraint = structure.start()
    for one in ids:
        try:
            constraint.accept(one)
        except StructureError:
            return False
    return constraint.accepting or constraint.finished


ONE_OF_EACH_LAYOUT = {FORMATS[name].layout: name for name in PLAIN_FORMATS}.values()


@pytest.mark.parametrize(("name", "thinking"), [*((name, False) for name in PLAIN_FORMATS), *((name, True) for name in ONE_OF_EACH_LAYOUT)])
def test_calls_fit_their_schemas(name, thinking, tokenizer):
    form = FORMATS[name]
    reply = ReplyFormat(calls=form, tools=TOOLS, think=THINK if thinking else None, thinking=thinking)
    start = "well, {1} <tool_call>x\n</think>\n\n" if thinking else ""
    auto, required, named = (call_structure(reply, choice, tokenizer, VOCAB, parallel=True)[0] for choice in ("auto", "required", "now"))
    one, notes = call_structure(reply, "required", tokenizer, VOCAB, parallel=False)
    assert notes == []
    both = start + written(form, FINE)
    assert accepts(auto, tokenizer, both)
    assert accepts(required, tokenizer, both)
    assert not accepts(one, tokenizer, both)
    assert accepts(one, tokenizer, start + written(form, FINE[:1]))
    assert accepts(named, tokenizer, start + written(form, FINE[1:]))
    assert not accepts(named, tokenizer, both)
    assert accepts(auto, tokenizer, start + "Just an answer.")
    assert not accepts(required, tokenizer, start + "Just an answer.")
    if form.trigger:
        assert accepts(auto, tokenizer, start + "Let me see.\n" + written(form, FINE))
    for wrong in [
        ("other", {}),
        ("weather", {"days": 3}),
        ("weather", {"city": "Rome", "days": "x"}),
        ("weather", {"city": "Rome", "unit": "K"}),
    ]:
        assert not accepts(auto, tokenizer, start + written(form, [wrong])), wrong
    if form.layout == "json":
        assert not accepts(auto, tokenizer, start + written(form, [("weather", {"city": "R"})]))


def test_a_tag_that_is_a_special_token_is_that_token(tokenizer):
    plain = json.loads((DEMO / "tokenizer.json").read_text())
    plain["added_tokens"].append({**plain["added_tokens"][-1], "id": 3, "content": "[TOOL_CALLS]", "special": True})
    own = Tokenizer(type(tokenizer.backend).from_str(json.dumps(plain)), special_tokens={})
    own.eos_ids = tokenizer.eos_ids
    reply = ReplyFormat(calls=FORMATS["mistral"], tools=TOOLS)
    structure, _ = call_structure(reply, "auto", own, own.vocab_size, parallel=True)
    calls = own.encode("Well " + written(FORMATS["mistral"], FINE), add_special=False)
    assert own.token_id("[TOOL_CALLS]") in calls
    constraint = structure.start()
    for one in calls:
        constraint.accept(one)
    assert constraint.accepting or constraint.finished


def test_a_structure_behind_the_reasoning(tokenizer):
    reply = ReplyFormat(think=THINK, thinking=True)
    for kind, source, text, value in [
        ("schema", {"enum": [1, 2]}, "2", 2),
        ("regex", "[ab]/x", "a/x", "a/x"),
        ("choice", ["yes", "no"], "no", "no"),
    ]:
        structure = behind_reasoning(kind, source, reply, tokenizer, VOCAB)
        assert accepts(structure, tokenizer, f"so, so\n</think>\n\n{text}")
        assert not accepts(structure, tokenizer, text)
        assert structure.parse(text) == value
    with pytest.raises(OptionError, match="grammar and a prompt that opens the reasoning"):
        behind_reasoning("grammar", 'start: "a"', reply, tokenizer, VOCAB)


def test_what_cannot_be_called(tokenizer):
    reply = ReplyFormat(calls=FORMATS["hermes"], tools=TOOLS)
    with pytest.raises(OptionError, match="tool_choice is 'late'"):
        call_structure(reply, "late", tokenizer, VOCAB, parallel=True)


BAD = {
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "look-around": {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z.]+$"},
    "not": {"not": {"type": "null"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
}


@pytest.mark.parametrize(
    ("name", "keyword"),
    [(name, keyword) for name in PLAIN_FORMATS for keyword in BAD if keyword == "not" or name in ONE_OF_EACH_LAYOUT],
)
def test_one_schema_that_cannot_be_masked(name, keyword, tokenizer):
    """Its function can still be called, with anything; the others are held to theirs."""
    form = FORMATS[name]
    bad = {"type": "object", "properties": {"x": BAD[keyword]}, "required": ["x"]}
    tools = tools_of([{"name": "send", "parameters": bad}, {"name": "weather", "parameters": PARAMETERS}])
    structure, notes = call_structure(ReplyFormat(calls=form, tools=tools), "required", tokenizer, VOCAB, parallel=True)
    assert len(notes) == 1
    assert "the arguments of 'send' are not held to their schema" in notes[0]
    assert keyword in notes[0] or (keyword == "look-around" and "pattern" in notes[0])
    assert accepts(structure, tokenizer, written(form, [("send", {"x": "any", "y": "more"})]))
    assert accepts(structure, tokenizer, written(form, FINE[:1]))
    assert not accepts(structure, tokenizer, written(form, [("weather", {"city": "Rome", "days": "x"})]))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "binary"},
        {"type": "string", "format": "url"},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"type": "array", "uniqueItems": False},
    ],
)
def test_annotations_change_nothing(schema, tokenizer):
    tools = tools_of([{"name": "f", "parameters": {"type": "object", "properties": {"format": schema}, "required": ["format"]}}])
    structure, notes = call_structure(ReplyFormat(calls=FORMATS["hermes"], tools=tools), "required", tokenizer, VOCAB, parallel=True)
    assert notes == []
    assert not accepts(structure, tokenizer, written(FORMATS["hermes"], [("f", {})])), "a property named like a keyword is kept"


def test_a_choice_that_is_no_function(tokenizer):
    with pytest.raises(OptionError, match="tool_choice is 'late'"):
        call_structure(ReplyFormat(calls=FORMATS["hermes"], tools=TOOLS), "late", tokenizer, VOCAB, parallel=True)


def test_gemma_arguments_keep_to_their_schema(tokenizer):
    form = FORMATS["gemma-4"]
    schema = {
        "type": "object",
        "properties": {
            "at": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "boolean"}}, "required": ["x"]},
            "list": {"type": "array", "items": {"type": "integer"}},
            "name": {"type": "string", "maxLength": 5},
            "unit": {"enum": ["C", 1, None]},
        },
        "required": ["name"],
    }
    tools = tools_of([{"name": "f", "parameters": schema}])
    structure, notes = call_structure(ReplyFormat(calls=form, tools=tools), "required", tokenizer, VOCAB, parallel=False)
    assert notes == []
    for fine in [
        {"name": "a, b"},
        {"at": {"x": -1.5, "y": True}, "list": [1, 2], "name": "", "unit": None},
        {"list": [], "name": "x", "unit": "C"},
    ]:
        assert accepts(structure, tokenizer, written(form, [("f", fine)])), fine
    for wrong in [
        {},
        {"name": "too long"},
        {"name": 3},
        {"name": "a", "list": ["b"]},
        {"name": "a", "at": {"y": True}},
        {"name": "a", "unit": "D"},
    ]:
        assert not accepts(structure, tokenizer, written(form, [("f", wrong)])), wrong


TAGGED = [name for name in PLAIN_FORMATS if FORMATS[name].layout == "tagged"]


def structure_for(name, schema, tokenizer):
    tools = tools_of([{"name": "f", "parameters": schema}])
    structure, notes = call_structure(ReplyFormat(calls=FORMATS[name], tools=tools), "required", tokenizer, VOCAB, parallel=False)
    return structure, notes, ReplyFormat(calls=FORMATS[name], tools=tools)


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    "one",
    [
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": ["string", "null"]},
        {"$ref": "#/$defs/word"},
        {"$ref": "#/definitions/word"},
        {},
        {"enum": ["Oslo", 1]},
    ],
    ids=str,
)
def test_a_value_that_may_be_a_text_is_written_bare(name, one, tokenizer):
    schema = {
        "type": "object",
        "properties": {"x": one},
        "required": ["x"],
        "$defs": {"word": {"type": "string"}},
        "definitions": {"word": {"type": "string"}},
    }
    structure, notes, reply = structure_for(name, schema, tokenizer)
    assert notes == []
    text = written(FORMATS[name], [("f", {"x": "Oslo"})])
    assert accepts(structure, tokenizer, text)
    assert reply.read_text(text).tool_calls[0].parsed == {"x": "Oslo"}


@pytest.mark.parametrize("name", TAGGED)
def test_arguments_that_the_schema_does_not_name(name, tokenizer):
    form = FORMATS[name]
    open_, notes, _ = structure_for(name, {"type": "object", "properties": {}, "additionalProperties": True}, tokenizer)
    assert notes == []
    assert accepts(open_, tokenizer, written(form, [("f", {"a": "b", "c": 1})]))
    numbers, _, _ = structure_for(name, {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}, tokenizer)
    assert accepts(numbers, tokenizer, written(form, [("f", {"a": 1})]))
    assert not accepts(numbers, tokenizer, written(form, [("f", {"a": "b"})]))
    needed, _, _ = structure_for(name, {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]}, tokenizer)
    assert accepts(needed, tokenizer, written(form, [("f", {"b": "x"})]))
    assert not accepts(needed, tokenizer, written(form, [("f", {})]))


@pytest.mark.parametrize("name", TAGGED)
def test_no_value_contains_the_tag_that_ends_it(name, tokenizer):
    structure, _, _ = structure_for(name, {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}, tokenizer)
    end = FORMATS[name].tagged.end
    assert not accepts(structure, tokenizer, written(FORMATS[name], [("f", {"x": f"a{end}b"})]))
    assert accepts(structure, tokenizer, written(FORMATS[name], [("f", {"x": f"a{end[:-1]}b"})]))
