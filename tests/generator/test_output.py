"""The invariant: the texts of the shown tokens side by side are the answer, at every moment and at the end."""

import copy
import math
import pickle
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.generator.output import Alternatives, Output, StopMatcher
from exl2nb.generator.request import TokenAlternative
from exl2nb.sampling.draw import Sampled
from exl2nb.tokenizer.tokenizer import Tokenizer

from . import fakes

MAKERS = runpy.run_path(str(Path(__file__).parents[1] / "tokenizer" / "makers.py"))["MAKERS"]
KINDS = {kind: Tokenizer(make()) for kind, make in MAKERS.items()}


def feed(output, ids):
    """Push until a stop; the ids pushed."""
    for n, token_id in enumerate(ids):
        shown = output.text
        found = output.push(Sampled(token_id, -1.0, 1))
        assert output.text.startswith(shown)
        if found:
            return ids[: n + 1], True
    return ids, output.finish()


@pytest.mark.parametrize("kind", MAKERS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_text_is_what_decode_says_up_to_the_stop(kind, data):
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    whole = tokenizer.decode(ids)
    cuts = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 5)).map(lambda c: whole[c[0] : c[0] + c[1]])
    stops = tuple(s for s in data.draw(st.lists(st.one_of(cuts, st.text(min_size=1, max_size=3)), max_size=2)) if s)
    output = Output(tokenizer, (), stops)
    _, found = feed(output, ids)
    hits = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    assert found == bool(hits)
    assert output.text == (whole[: min(hits)[1]] if hits else whole)
    assert len(output.tokens) <= len(ids)
    assert [t.id for t in output.tokens] == ids[: len(output.tokens)]


def encode(text):
    return fakes.TOKENIZER.encode(text, add_special=False)


def test_tokens_of_a_stop_text_are_not_shown():
    output, ids = Output(fakes.TOKENIZER, (), ("\n\nEND",)), encode("First line.\n\nEND of it")
    pushed, found = feed(output, ids)
    assert found
    assert output.text == "".join(t.text for t in output.tokens) == "First line."
    assert len(pushed) < len(ids)


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        ("ater", " the water", " the w"),  # inside a token
        ("🎉", "Café🎉é and more", "Café"),
        ("é🎉", "Café🎉é and more", "Caf"),
        ("🎉é", "Café🎉é and more", "Café"),
        ("dark knight", "a dark night", None),  # its beginning is held back, and comes out
    ],
)
def test_text_before_a_stop(stop, text, shown):
    output = Output(fakes.TOKENIZER, (), (stop,))
    assert feed(output, encode(text))[1] == (shown is not None)
    assert output.text == (text if shown is None else shown)


def test_incomplete_character_at_the_end():
    ids = encode("ok 🎉")[:-1]
    output = Output(fakes.TOKENIZER, (), ())
    feed(output, ids)
    assert output.text == fakes.TOKENIZER.decode(ids)
    assert output.text.endswith("�")
    assert "".join(t.text for t in output.tokens) == output.text


def test_alternatives_are_made_when_read():
    asked = []

    def piece(number):
        asked.append(number)
        return f"<{number}>"

    found = Alternatives([(3, -0.5), (9, -2.0)], piece)
    assert (len(found), bool(found), asked) == (2, True, [])
    made = (TokenAlternative(3, "<3>", -0.5, math.exp(-0.5)), TokenAlternative(9, "<9>", -2.0, math.exp(-2.0)))
    assert tuple(found) == made == found
    assert found == Alternatives([(3, -0.5), (9, -2.0)], piece) != Alternatives([(3, -0.5)], piece)
    assert (found[1], found[:1], repr(found), hash(found)) == (made[1], made[:1], repr(made), hash(made))
    assert copy.deepcopy(found) == pickle.loads(pickle.dumps(found)) == made
    assert asked.count(9) == 2, "once for each that was compared"


# ---- stop texts


LETTERS = st.text("ab🎉", max_size=4)


@given(pieces=st.lists(LETTERS, max_size=12), stops=st.lists(st.text("ab🎉", min_size=1, max_size=4), max_size=3))
@settings(max_examples=500, deadline=None)
def test_any_cut_of_any_text(pieces, stops):
    """Whatever the pieces: nothing of a stop text is shown, nothing else is lost, and only what may become one is held."""
    matcher, text, visible = StopMatcher(stops), "", 0
    for piece in pieces:
        before, text = text, text + piece
        now, found = matcher.feed(piece)
        assert now >= visible
        visible = now
        hits = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        assert found == bool(hits)
        if found:
            assert visible == min(hits)[1]
            return
        assert not any(stop in before for stop in stops)
        held = text[visible:]
        assert not held or any(stop.startswith(held) for stop in stops)
        for n in range(len(held) + 1, len(text) + 1):
            assert not any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_across_pieces(size):
    text = "a long <|text|> with its <|end|> inside"
    matcher, results = StopMatcher(["<|end|>", "<|never|>"]), []
    for i in range(0, len(text), size):
        results.append(matcher.feed(text[i : i + size]))
        if results[-1][1]:
            break
    assert results[-1] == (text.index("<|end|>"), True)
    assert max(v for v, _ in results) == text.index("<|end|>")


def test_no_stops():
    assert StopMatcher(()).feed("abc") == (3, False)
