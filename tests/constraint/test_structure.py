"""Structures that are accepted or refused, their masks, and the values of answers."""

import copy
import dataclasses
import enum
import functools
import pickle
import sys
import threading
from typing import Annotated, Literal

import numpy as np
import pydantic
import pytest
import tokenizers

from exl2nb.constraint.structure import Structure, structure_of
from exl2nb.core.errors import MissingDependency, OptionError, StructureError
from exl2nb.sampling.constraint import SPARSE_MASK_RATIO, Allowed, Constraint
from exl2nb.tokenizer.tokenizer import Tokenizer
from tests.generator.fakes import TOKENIZER as WORDS
from tests.generator.fakes import VOCAB, tokenizer

EOS = next(iter(WORDS.eos_ids))


def structure(kind, source) -> Structure:
    return Structure(kind, source, WORDS, VOCAB)


def walk(constraint: Constraint, text: str) -> None:
    for token in WORDS.encode(text, add_special=False):
        assert token in constraint.allowed(), f"{WORDS.piece(token)!r} of {text!r} is not allowed"
        constraint.accept(token)


CHOICES = [
    ["yes", "no"],
    ["a", "ab", "abc"],
    ["line\nbreak", "ü€", 'say "x"', "back\\slash", "/path/", "a b", "[a-z]+", "{}", "\u2028"],
]


@pytest.mark.parametrize("texts", CHOICES)
def test_a_choice_takes_no_other_text(texts):
    constraint = structure("choice", texts).start()
    with pytest.raises(StructureError, match="does not fit the choice"):
        constraint.accept(WORDS.encode("Z", add_special=False)[0])
    walk(constraint, texts[0])  # a refused token changes nothing


def test_choices_by_the_thousand_and_too_many_rules():
    texts = [f"number {i}" for i in range(3000)]
    constraint = structure("choice", texts).start()
    walk(constraint, texts[2917])
    assert constraint.accepting
    with pytest.raises(StructureError, match=r"too complex \(.*max is 2000.*\); write alternatives as one regex"):
        walk(structure("grammar", "start: " + " | ".join(f'"{text}"' for text in texts)).start(), texts[0])


def test_finished_means_that_nothing_can_follow():
    constraint = structure("choice", ["a", "ab"]).start()
    walk(constraint, "a")
    assert constraint.accepting
    assert not constraint.finished
    assert EOS in constraint.allowed()
    constraint.accept(EOS)
    assert constraint.finished
    constraint.rewind(1)
    walk(constraint, "b")
    assert constraint.finished


def test_end_of_text_only_where_the_grammar_may_end():
    constraint = structure("regex", "[0-9]{2,3}").start()
    for place, ends in enumerate((False, False, True)):
        assert (EOS in constraint.allowed()) == ends, place
        walk(constraint, "7")


def test_masks_of_bits_and_of_ids_agree():
    for kind, source in (("regex", "[0-9]+"), ("regex", "[^0-9]+"), ("choice", ["x"])):
        allowed = structure(kind, source).start().allowed()
        row = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
        some = np.flatnonzero(np.isfinite(allowed.masked(row)))
        np.testing.assert_array_equal(allowed.masked(row)[some], row[some])
        assert some.tolist() == [i for i in range(VOCAB) if i in allowed]
        np.testing.assert_array_equal(Allowed.of(np.isin(np.arange(VOCAB), some)).bits, allowed.bits)
        few = allowed.few()
        assert (few is None) == (len(some) * SPARSE_MASK_RATIO > VOCAB)
        if few is not None:
            assert few.tolist() == some.tolist()


def test_counting_and_listing_bits(monkeypatch):
    rng = np.random.default_rng(0)
    for share in (0.0, 0.001, 0.3, 1.0):
        flags = rng.random(4096) < share
        bits = Allowed.of(flags).bits
        listed = Allowed(bits).few()
        assert listed.tolist() == np.flatnonzero(flags).tolist() if share < 0.01 else listed is None
        with monkeypatch.context() as older:
            older.delattr(np, "bitwise_count", raising=False)
            assert (Allowed(bits).few() is None) == (listed is None)


@pytest.mark.parametrize("vocab", [VOCAB, VOCAB + 1, VOCAB + 77])
def test_padding_of_the_vocabulary_is_never_allowed(vocab):
    allowed = Structure("regex", "(?s:.)+", WORDS, vocab).start().allowed()
    row = allowed.masked(np.zeros(vocab, np.float32))
    assert np.isfinite(row[:VOCAB]).any()
    assert not np.isfinite(row[VOCAB:]).any()


def test_copy_and_rewind():
    """Any walk forwards, back and in copies leaves the mask of the text alone."""
    made = structure("regex", "[a-d]{3}[0-9]+(x|y)")
    text = WORDS.encode("abc12", add_special=False)
    masks = []
    constraint = made.start()
    for token in text:
        masks.append(constraint.allowed().bits.copy())
        constraint.accept(token)
    twin = constraint.copy()
    for back in range(1, len(text) + 1):
        again = twin.copy()
        again.rewind(back)
        np.testing.assert_array_equal(again.allowed().bits, masks[len(text) - back])
    walk(twin, "9")
    assert not constraint.finished
    walk(constraint, "x")
    assert constraint.finished
    assert not twin.finished


def test_accepting_many_tokens_without_reading_masks():
    """As speculation does it: a mask in progress that is not read is dropped or waited for."""
    made = structure("regex", "[a-z ]+")
    tokens = WORDS.encode("once upon a time there was a little house", add_special=False)
    for _ in range(20):
        constraint = made.start()
        for token in tokens:
            constraint.accept(token)
        fresh = made.start()
        walk(fresh, WORDS.decode(tokens))
        np.testing.assert_array_equal(constraint.allowed().bits, fresh.allowed().bits)


def test_forced_tokens():
    constraint = structure("grammar", 'root ::= "begin " [0-9] " end"').start()
    forced = constraint.forced()
    assert forced
    assert "begin ".startswith(WORDS.decode(forced))
    for token in forced:
        constraint.accept(token)


def test_masks_from_several_threads():
    made = structure("regex", "[a-z ]+[0-9]")
    wanted, seen = made.start().allowed().bits.copy(), []

    def run():
        for _ in range(20):
            constraint = made.start()
            seen.append((constraint.allowed().bits == wanted).all())
            walk(constraint, "ab ")

    threads = [threading.Thread(target=run) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert seen == [True] * 80


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    colour: Colour


class Cat(pydantic.BaseModel):
    kind: str = pydantic.Field(pattern="^cat$")
    lives: int = pydantic.Field(ge=0, le=9)

    @pydantic.field_validator("lives")
    @classmethod
    def not_seven(cls, value):
        if value == 7:
            raise ValueError("seven brings bad luck")
        return value


class A(pydantic.BaseModel):
    tag: Literal["a"]


class B(pydantic.BaseModel):
    tag: Literal["b"]
    number: int


UNION = Annotated[A | B, pydantic.Field(discriminator="tag")]
INTEGER_A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("kind", "source", "text", "value"),
    [
        ("schema", INTEGER_A, '{"a": 5}', {"a": 5}),
        ("schema", {**INTEGER_A, "additionalProperties": False}, '{\n  "a": 1\n}', {"a": 1}),
        ("schema", '{"type": "array", "items": {"type": "boolean"}}', "[true, false]", [True, False]),
        ("schema", Point, '{"x": -3, "colour": "blue"}', Point(-3, Colour.BLUE)),
        ("schema", Cat, '{"kind": "cat", "lives": 9}', Cat(kind="cat", lives=9)),
        ("schema", list[int], "[1, 2]", [1, 2]),
        ("schema", Colour, '"red"', Colour.RED),
        ("schema", set[int], "[1, 2, 1]", {1, 2}),
        ("schema", int | None, "null", None),
        ("schema", UNION, '{"tag": "a"}', A(tag="a")),
        ("schema", UNION, '{"tag": "b", "number": 4}', B(tag="b", number=4)),
        ("grammar", 'root ::= "a" digits\ndigits ::= [0-9]+', "a42", "a42"),
        ("grammar", 'start: "a" DIGITS\nDIGITS: /[0-9]+/', "a42", "a42"),
        *(("choice", texts, text, text) for texts in CHOICES for text in texts),
    ],
)
def test_accepted_texts_and_their_values(kind, source, text, value):
    made = structure(kind, source)
    constraint = made.start()
    walk(constraint, text)
    assert constraint.accepting
    assert made.parse(text) == value


def test_classes_forbid_extra_properties_and_schemas_allow_them():
    extra = '{"x": 1, "colour": "red", "more": 2}'
    constraint = structure("schema", Point).start()
    walk(constraint, '{"x": 1, "colour": "red"')
    assert WORDS.encode(",", add_special=False)[0] not in constraint.allowed()
    walk(structure("schema", {"type": "object", "properties": {"x": {"type": "integer"}}}).start(), extra)


def test_json_is_indented_by_one_line_break_at_most():
    constraint = structure("schema", {**INTEGER_A, "additionalProperties": False}).start()
    walk(constraint, "{\n")
    line_break = WORDS.encode("\n", add_special=False)[0]
    assert line_break not in constraint.allowed()


def test_answers_that_are_not_read():
    with pytest.raises(StructureError, match="seven brings bad luck"):
        structure("schema", Cat).parse('{"kind": "cat", "lives": 7}')
    with pytest.raises(StructureError, match=r"ended before the schema was complete.*raise max_tokens"):
        structure("schema", list[int]).parse("[1, 2", complete=False)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("schema", {"type": "integer", "minimum": 5, "maximum": 1}, "Unsatisfiable.*minimum"),
        ("schema", {"enum": []}, "Unsatisfiable"),
        ("schema", {"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' is unsatisfiable"),
        ("schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ("schema", {"type": "array", "uniqueItems": True}, "Unimplemented keys.*uniqueItems.*; leave them out"),
        ("schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf.*not supported; write anyOf"),
        ("schema", {"type": "nonsense"}, "Invalid type: nonsense"),
        ("schema", {"$ref": "#/$defs/missing"}, "missing"),
        ("schema", {"type": "string", "pattern": "("}, "unclosed group"),
        ("schema", "{not json", "no JSON"),
        ("schema", 5, "expected a JSON schema"),
        ("schema", {"enum": [object()]}, "which JSON cannot express"),
        ("schema", {"const": float("nan")}, "holds the number nan"),
        ("schema", '{"maximum": Infinity}', "holds the number inf"),
        ("schema", {"const": "x" * (1 << 20)}, "expected at most 1048576"),
        ("schema", functools.reduce(lambda inner, _: {"type": "array", "items": inner}, range(300), {}), "nested more than 100"),
        ("schema", {"multipleOf": 10**400}, "more than 100000 remainders"),
        ("schema", {"multipleOf": 975332900}, "multipleOf 975332900, with more than 100000 remainders"),
        ("schema", {"multipleOf": 8192000}, "multipleOf 8192000, with more than"),
        (
            "schema",
            {"multipleOf": ["x" * 97 + "\ufffd" * 9]},
            "cannot be used",
        ),  # a panic of the library: it cuts its message in a character
        ("schema", {"multipleOf": 1.000003}, "multipleOf 1.000003, with more than"),
        ("schema", {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "with more than 100000 remainders"),
        ("regex", "a(", "unclosed group"),
        ("regex", "\\", "ends with a backslash that escapes nothing"),
        ("regex", "a\\\\\\", "ends with a backslash that escapes nothing"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "", "not empty"),
        ("regex", 7, "expected a text"),
        ("choice", [], "expected a list of texts"),
        ("choice", "yes", "expected a list of texts"),
        ("choice", ["yes", 3], "expected a list of texts"),
        ("grammar", "root ::= missing", "'missing' not found"),
        ("grammar", "start: missing", "unknown name"),
        ("grammar", "what is this", "expected ::="),
        ("grammar", "root ::= root", "no text is complete under it"),
    ],
)
def test_bad_structures_are_refused_at_once(kind, source, message):
    with pytest.raises(StructureError, match=rf"(?s)generate: {kind}.*{message}"):
        structure_of({kind: source}, WORDS, VOCAB, where="generate")


def test_one_structure_at_a_time():
    with pytest.raises(OptionError, match="got regex and choice"):
        structure_of({"regex": "a", "choice": ["b"]}, WORDS, VOCAB, where="generate")
    assert structure_of({"max_tokens": 3}, WORDS, VOCAB, where="generate") is None
    options = {"regex": "a", "choice": None, "top_k": 3}
    assert structure_of(options, WORDS, VOCAB, where="generate").kind == "regex"
    assert options == {"top_k": 3}


def test_copies_and_pickles_still_parse():
    made = structure("schema", Point)
    assert copy.deepcopy(made) is made
    again = pickle.loads(pickle.dumps(made))
    assert again.parse('{"x": 1, "colour": "red"}') == Point(1, Colour.RED)
    with pytest.raises(StructureError, match="belongs to no model"):
        again.start()


def byte_fallback_tokenizer() -> Tokenizer:
    """A vocabulary as SentencePiece makes it: words with a lower block for the space, and a token for every byte."""
    pieces = ["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcxyz0123456789-", "\u2581ab", "abc", "\u2581xyz"]
    model = tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token=None)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence(steps)
    words = Tokenizer(backend)
    words.eos_ids = frozenset({1})
    return words


def test_a_vocabulary_of_words_and_bytes():
    words = byte_fallback_tokenizer()

    def pieces(constraint):
        return {words.backend.id_to_token(int(i)) for i in range(words.vocab_size) if i in constraint.allowed()}

    constraint = Structure("regex", "[a-c ]+", words, words.vocab_size).start()
    letters = {"a", "b", "c", "abc", "\u2581", "\u2581ab", *(f"<0x{ord(c):02X}>" for c in "abc ")}
    assert pieces(constraint) == letters
    constraint.accept(words.token_id("\u2581ab"))
    assert pieces(constraint) == letters | {"</s>"}
    constraint = Structure("regex", "(é|ü)[0-9]", words, words.vocab_size).start()
    for wanted in ("<0xC3>", "<0xA9>"):
        assert wanted in pieces(constraint)
        assert "\u2581" not in pieces(constraint)
        constraint.accept(words.token_id(wanted))
    assert {"0", "9"} <= pieces(constraint)
    assert "a" not in pieces(constraint)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependency, match=r"llguidance.*exl2nb\[structured\]"):
        structure("regex", "a")
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(MissingDependency, match=r"pydantic.*exl2nb\[structured\]"):
        structure("schema", Point)
    with pytest.raises(ImportError):
        structure("schema", Point)


def test_a_tokenizer_without_an_end(monkeypatch):
    words = tokenizer()
    words.eos_ids = frozenset()
    with pytest.raises(StructureError, match="no end-of-text token"):
        Structure("regex", "a", words, VOCAB)
    words.eos_ids = tokenizer().eos_ids
    assert Structure("regex", "a", words, VOCAB).start(), "the vocabulary without an end was kept"
