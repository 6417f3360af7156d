"""Structured output through the real engine and the demo model: every answer parses and fits."""

import dataclasses
import random
from typing import Annotated

import pytest

import exl2nb
from exl2nb.core.errors import OptionError, StructureError


@pytest.fixture(scope="module")
def llm():
    with exl2nb.demo(progress=None) as model:
        yield model


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


def test_together_as_alone(llm):
    """Masks of one request never reach another, nor do its neighbours change its text."""
    options = [
        {"schema": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 6}, "seed": 1},
        {"regex": "[A-Z][a-z]{2,9}( [a-z]{1,9}){3}\\.", "seed": 2, "temperature": 0.8},
        {"choice": ["red", "green", "blue"], "seed": 3, "min_p": 0.02},
        {"grammar": 'root ::= ("ab" | "cd")+ "!"', "seed": 4, "repetition_penalty": 1.1},
        {"seed": 5, "temperature": 0.9},
    ] * 3
    prompts = [f"Text {i}:" for i in range(len(options))]
    alone = [llm.generate(p, max_tokens=24, **o).text for p, o in zip(prompts, options)]
    handles = [llm.stream(p, max_tokens=24, **o) for p, o in zip(prompts, options)]
    assert [h.result().text for h in handles] == alone


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


def test_length_ends_midway(llm):
    completion = llm.generate("Names:", schema={"type": "array", "items": {"type": "string"}, "minItems": 50}, seed=1, max_tokens=12)
    assert completion.finish_reason == "length"
    with pytest.raises(StructureError, match="before the schema was complete"):
        _ = completion.parsed


def test_length_after_a_complete_answer_is_read(llm):
    completion = llm.generate("Letters:", regex="[a-z]+", seed=1, max_tokens=3, banned_tokens=list(llm.tokenizer.eos_ids))
    assert completion.finish_reason == "length"
    assert completion.parsed == completion.text


def test_a_stop_text_ends_midway(llm):
    completion = llm.generate("Go:", regex="abc[0-9]", stop="c", temperature=0)
    assert (completion.text, completion.finish_reason) == ("ab", "stop")
    with pytest.raises(StructureError, match="before the regex was complete"):
        _ = completion.parsed


def test_without_a_structure_there_is_nothing_to_read(llm):
    with pytest.raises(StructureError, match="no structure"):
        _ = llm.generate("x", max_tokens=1).parsed


def test_min_tokens_gives_way_to_a_complete_grammar(llm):
    completion = llm.generate("x", choice=["yes"], min_tokens=50, seed=1)
    assert completion.parsed == "yes"


def test_ban_and_structure_that_exclude_everything(llm):
    ids = llm.tokenizer.encode("y", add_special=False) + llm.tokenizer.encode("yes", add_special=False)
    banned = [i for i in range(llm.config.vocab_size) if llm.tokenizer.piece(i).startswith("y")]
    with pytest.raises(exl2nb.errors.GenerationError, match="no token is left"):
        llm.generate("x", choice=["yes"], banned_tokens=sorted({*ids, *banned}))
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
    """Guidance, guesses, banned texts and a stop id beside a structure: the answer still fits it."""
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


def test_chat_and_async_take_it_too(llm):
    import asyncio

    completion = asyncio.run(llm.agenerate("x", choice=["one", "two"], seed=1))
    assert completion.parsed in ("one", "two")
