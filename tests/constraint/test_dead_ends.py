import functools
import json
import random

import numpy as np
import pytest

from exl2nb.constraint.dead_ends import find_dead_end, without_dead_ends
from exl2nb.constraint.mask_engine import byte_matcher, explained
from exl2nb.constraint.structure import Structure, json_schema
from exl2nb.core.errors import StructureError
from tests.generator.fakes import TOKENIZER as WORDS
from tests.generator.fakes import VOCAB


def structure(kind, source) -> Structure:
    return Structure(kind, source, WORDS, VOCAB)


def closed(properties, **more):
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


ENDS = {i for i in range(VOCAB) if WORDS.decode([i]) in ('"', "}", "]", ",", '"}', "],")}


def texts(schema, count=40, steps=400):
    """Complete answers that the schema's masks allow; an answer that cannot go on raises StructureError."""
    made = structure("schema", schema)
    for seed in range(count):
        constraint, rng, ids = made.start(), random.Random(seed), []
        for _ in range(steps):
            if constraint.finished or (constraint.accepting and rng.random() < 0.5):
                break
            bits = np.unpackbits(constraint.allowed().bits.view(np.uint8), bitorder="little")[:VOCAB]
            allowed = [i for i in bits.nonzero()[0].tolist() if i not in WORDS.eos_ids]
            ends = [i for i in allowed if i in ENDS]
            token = rng.choice(ends if ends and rng.random() < 0.6 else allowed)
            constraint.accept(token)
            ids.append(token)
        if constraint.accepting:
            yield WORDS.decode(ids)


SCORE = {"type": "integer", "multipleOf": 5}
FIVES = closed({"score": SCORE}, required=["score"], patternProperties={"^score$": {"type": "integer", "minimum": 10}})
LINK = closed({"next": {"$ref": "#/$defs/link"}}, required=["next"])


@pytest.mark.parametrize(
    "schema",
    [
        FIVES,
        {"type": "array", "items": FIVES, "minItems": 1, "maxItems": 2},
        closed({"a": {"enum": [1, "x"]}}, required=["a", "b"], patternProperties={"^(a|b)$": {"type": "integer"}}),
        closed({"a": True}, required=["a"], patternProperties={"^a$": {"type": "integer"}, "^b": {"type": "null"}}),
        closed({"a": {"type": "null"}}, required=["a"], patternProperties={r"[^\s\S]": {"type": "integer"}}),
        closed({"a": {"type": "integer"}}, required=["a"], patternProperties={"^a": {"minimum": 7}}),
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "patternProperties": {"^a$": {}}},
        closed({"a": {"$ref": "#/$defs/link"}, "b": {"type": "null"}}, **{"$defs": {"link": LINK}}),
        closed({"a": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}}, required=["a"], **{"$defs": {"link": LINK}}),
        {"$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}, "maxItems": 1}}, "$ref": "#/$defs/list"},
        closed({"a": {"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "b": {"type": "null"}}),
        closed({"a": {"type": "string", "pattern": "^abc$", "maxLength": 2}, "b": {"type": "null"}}),
        closed(
            {"a": {"type": "array", "prefixItems": [{"type": "null"}, {"allOf": [{"pattern": "^a"}, {"enum": ["b"]}]}]}}, required=["a"]
        ),
    ],
)
def test_no_answer_ends_in_a_dead_end(schema):
    import jsonschema

    found = list(texts(schema))
    assert found
    for text in found:
        jsonschema.validate(json.loads(text), schema)


def test_a_pattern_of_taken_names_becomes_a_part_of_their_properties():
    schema, _ = json_schema(FIVES)
    assert "patternProperties" not in schema
    assert schema["properties"] == {"score": {"allOf": [SCORE, {"type": "integer", "minimum": 10}]}}
    other = closed({"a": {}}, patternProperties={"^b": {}})
    assert json_schema(other)[0] == other


def test_data_is_not_read_as_schemas():
    schema = closed({"$ref": {"const": {"$ref": "#"}}, "patternProperties": {"enum": [{"patternProperties": {"^a$": 1}}]}})
    assert without_dead_ends(schema, byte_matcher) == schema


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("schema", {"$defs": {"link": LINK}, "$ref": "#/$defs/link"}, "'#/$defs/link' needs itself"),
        ("schema", closed({"a": {"$ref": "#"}}, required=["a"]), "'#' needs itself"),
        ("schema", {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, "$ref": "#/$defs/a"}, "needs itself"),
        (
            "schema",
            {"$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/c"}]}, "c": {"anyOf": [{"$ref": "#/$defs/a~1b"}]}}, "$ref": "#/$defs/a~1b"},
            "needs itself",
        ),
        (
            "schema",
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": False},
                ]
            },
            "a dead end",
        ),
        ("grammar", 'start: A "x" B\nA: /a/\nB: /b/ & /c/', 'after the text "ax" the grammar has a dead end'),
        ("grammar", 'start: "x" (B | "z" C)\nB: /b/\nC: /b/ & /c/', "a dead end"),
        ("grammar", 'start: "x" <[5]> C\nC: /b/ & /c/', "a dead end"),
        ("grammar", 'start: "x" a | "y"\na: "z" a', "needs itself"),
        ("grammar", 'root ::= "x" a | "y"\na ::= "z" a', "needs itself"),
        ("grammar", 'start: "x" one\none: %json {"type": "object", "required": ["a"], "properties": {"a": false}}', "unsatisfiable"),
    ],
)
def test_dead_ends_are_refused_before_the_answer_begins(kind, source, message):
    with pytest.raises(StructureError) as caught:
        structure(kind, source)
    assert message in str(caught.value)


def test_a_search_is_bounded_and_changes_nothing():
    large = functools.reduce(lambda inner, _: closed({"x": inner, "y": {"type": "string"}}), range(20), {"type": "number"})
    matcher = byte_matcher(large)
    before = matcher.compute_bitmask()
    assert find_dead_end(matcher, {byte: chr(byte) for byte in range(256)}, 2000) is None
    assert find_dead_end(matcher, {}, 50) is None
    assert matcher.compute_bitmask() == before


def test_what_the_engine_says_in_mid_answer_is_explained():
    assert "dead end" in explained("schema", "NoExtensionBias\n<state>\n...")
    assert "NoExtension" not in explained("schema", "NoExtensionBias\n<state>\n...")
    assert "one regex" in explained("grammar", "parser error: Current row has 3001 items; max is 2000; consider\n<state>x")


def test_a_dead_end_in_mid_answer_is_a_structure_error(fresh_llm, monkeypatch):
    """The search is bounded, so that a dead end may be met all the same: the error then says what it is, and the engine goes on."""
    monkeypatch.setattr("exl2nb.constraint.mask_engine.MAX_BYTE_STEPS", 0)
    with pytest.raises(StructureError, match="the grammar has a dead end"):
        fresh_llm.generate("x", grammar='start: "x" C\nC: /b/ & /c/', max_tokens=8)
    assert fresh_llm.generate("x", choice=["yes"]).parsed == "yes"


def test_functions_with_taken_patterns(llm):
    import jsonschema

    schema = closed({"score": {"enum": [1, 5, 10]}}, required=["score"], patternProperties={"^score$": SCORE})
    tool = {"type": "function", "function": {"name": "rate", "parameters": schema}}
    messages = [{"role": "user", "content": "x"}]
    template = "{{ messages[0].content }}{% if tools %}<tool_call>{% endif %}"
    answer = llm.chat(messages, tools=[tool], tool_choice="required", template=template, max_tokens=80, parallel_tool_calls=False)
    assert answer.reply.tool_calls
    for call in answer.reply.tool_calls:
        jsonschema.validate(json.loads(call.arguments), schema)
