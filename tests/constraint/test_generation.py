"""Structured output through the real engine and the demo model: every answer parses and fits."""

import asyncio
import dataclasses
import random
from typing import Annotated

import pytest

from exl2nb.core.errors import GenerationError, OptionError, StructureError


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    """A schema of the common features; strings and lists are bounded, so that a small model comes to an end."""
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "const", "pattern"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * (2 if depth < 2 else 0))
    if kind == "object":
        names = rng.sample(["name", "age", "kind", "the list", "ünder", 'quo"te', "x"], rng.randint(1, 4))
        required = [n for n in names if rng.random() < 0.7]
        properties = {n: random_schema(rng, depth + 1) for n in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "integer":
        low = rng.randint(-500, 500)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
    if kind == "number":
        return {"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.25} if rng.random() < 0.3 else {"enum": [1.5, -2, 0]}
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[A-Z][a-z]{1,8}$", "^[0-9]{4}-[0-9]{2}$", "^(red|green)$"])}
    if kind == "enum":
        return {"enum": rng.sample(["a", "b c", 1, None, True, "\n", "é"], 3)}
    if kind == "const":
        return {"const": rng.choice(["fixed", 7, None, False, [1, "x"], {"k": 1}])}
    return {"type": kind}


def test_random_schemas(llm):
    """32 schemas at a time, sampled hot: every answer that ends fits its schema, and nearly all end."""
    jsonschema = pytest.importorskip("jsonschema")
    rng = random.Random(4)
    schemas = [random_schema(rng) for _ in range(48)]
    handles = [
        llm.stream("Here is the record:", schema=schema, seed=i, max_tokens=150, temperature=rng.choice([0.0, 0.7, 1.0, 1.5]))
        for i, schema in enumerate(schemas)
    ]
    ended = 0
    for schema, handle in zip(schemas, handles):
        completion = handle.result()
        if completion.finish_reason == "length":
            with pytest.raises(StructureError):
                _ = completion.parsed
            continue
        assert completion.finish_reason in ("eos", "stop")
        jsonschema.validate(completion.parsed, schema)
        ended += 1
    assert ended >= 44


def test_a_dataclass_comes_back(llm):
    field = pytest.importorskip("pydantic").Field

    @dataclasses.dataclass
    class Person:
        name: Annotated[str, field(max_length=12)]
        age: Annotated[int, field(ge=0, le=120)]

    for seed in range(5):
        person = llm.generate("A person:", schema=Person, seed=seed, max_tokens=200).parsed
        assert isinstance(person, Person)
        assert len(person.name) <= 12
        assert 0 <= person.age <= 120


def test_several_prompts_share_one_structure(llm):
    answers = llm.generate(["One", "Two", "Three"], choice=["left", "right"], seed=2)
    assert {a.parsed for a in answers} <= {"left", "right"}
    assert len({id(a.structure) for a in answers}) == 1


def test_length_after_a_complete_answer_is_read(llm):
    completion = llm.generate("Letters:", regex="[a-z]+", seed=1, max_tokens=3, banned_tokens=list(llm.tokenizer.eos_ids))
    assert completion.finish_reason == "length"
    assert completion.parsed == completion.text


@pytest.mark.parametrize(
    ("options", "reason", "message"),
    [
        (
            {"schema": {"type": "array", "items": {"type": "string"}, "minItems": 50}, "max_tokens": 12},
            "length",
            "before the schema was complete",
        ),
        ({"regex": "abc[0-9]", "stop": "c", "temperature": 0}, "stop", "before the regex was complete"),
        ({"max_tokens": 1}, "length", "no structure"),
    ],
)
def test_an_incomplete_answer_is_not_read(llm, options, reason, message):
    completion = llm.generate("Names:", seed=1, **options)
    assert completion.finish_reason == reason
    assert completion.text == "ab" or reason != "stop"
    with pytest.raises(StructureError, match=message):
        _ = completion.parsed


def test_a_complete_grammar_ends_before_min_tokens(llm):
    completion = llm.generate("x", choice=["yes"], min_tokens=50, seed=1)
    assert completion.parsed == "yes"


def test_bans_and_a_structure_that_leave_no_token(llm):
    banned = [i for i in range(llm.config.vocab_size) if llm.tokenizer.piece(i).startswith("y")]
    with pytest.raises(GenerationError, match="no token is left"):
        llm.generate("x", choice=["yes"], banned_tokens=banned)
    assert llm.generate("x", choice=["no"]).parsed == "no"  # the engine goes on


def test_refused_at_the_call(llm):
    pytest.importorskip("pydantic")
    with pytest.raises(StructureError, match="stream: schema"):
        llm.stream("x", schema={"enum": []})
    with pytest.raises(OptionError, match="got schema and regex"):
        llm.generate("x", schema=int, regex="a")
    with pytest.raises(OptionError, match="token 5000 is not in the model's vocabulary"):
        llm.generate("x", banned_tokens=[5000])


def test_tokens_without_a_choice_are_marked(llm):
    tokens = llm.generate("x", regex="[0-9]qqqq", seed=1).tokens
    assert tokens[0].source == "target"
    assert {t.source for t in tokens[1:]} == {"forced"}


def test_with_the_other_features(llm):
    """Guidance, speculation and banned texts beside a structure: the answer still fits it."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 5}
    plain = llm.generate("Colours:", schema=schema, seed=3)
    for more in ({"speculation": "ngram"}, {"negative_ids": (1, 50, 70), "cfg_scale": 1.5}, {"banned_strings": ["green"]}):
        completion = llm.generate("Colours:", schema=schema, seed=3, **more)
        jsonschema.validate(completion.parsed, schema)
        if "speculation" in more:
            assert completion.text == plain.text
        if "banned_strings" in more:
            assert "green" not in completion.text
    with pytest.raises(OptionError, match="token_healing and a structure"):
        llm.generate("Colours:", schema=schema, token_healing=True)


def test_async_takes_a_structure_too(llm):
    completion = asyncio.run(llm.agenerate("x", choice=["one", "two"], seed=1))
    assert completion.parsed in ("one", "two")
