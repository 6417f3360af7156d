"""The invariant: the texts of the shown tokens side by side are the answer, at every moment and at the end."""

import copy
import math
import pickle
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.generator.output import Alternatives, Output
from exl2nb.generator.request import Alternative
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
    return fakes.tokenizer().encode(text, add_special=False)


def test_tokens_of_a_stop_text_are_not_shown():
    tokenizer = fakes.tokenizer()
    output = Output(tokenizer, (), ("\n\nEND",))
    ids = encode("First line.\n\nEND of it")
    pushed, found = feed(output, ids)
    assert found
    assert output.text == "First line."
    assert len(pushed) < len(ids)
    assert "".join(t.text for t in output.tokens) == "First line."


def test_stop_inside_a_token_cuts_its_text():
    output = Output(fakes.tokenizer(), (), ("ater",))
    assert feed(output, encode(" the water"))[1]
    assert output.text == " the w"


def test_a_held_beginning_comes_out_when_it_is_none():
    output = Output(fakes.tokenizer(), (), ("dark knight",))
    feed(output, encode("a dark night"))
    assert output.text == "a dark night"


def test_stop_of_many_bytes_per_character():
    for stop in ("🎉", "é🎉", "🎉é"):
        output = Output(fakes.tokenizer(), (), (stop,))
        assert feed(output, encode("Caf" + "é🎉é" + " and more"))[1]
        assert output.text == "Caf" + "é🎉é"[: "é🎉é".index(stop)]


def test_incomplete_character_at_the_end():
    tokenizer = fakes.tokenizer()
    ids = encode("ok 🎉")[:-1]
    output = Output(tokenizer, (), ())
    feed(output, ids)
    assert output.text == tokenizer.decode(ids)
    assert output.text.endswith("�")
    assert "".join(t.text for t in output.tokens) == output.text


def test_alternatives_are_made_when_looked_at():
    asked = []

    def piece(number):
        asked.append(number)
        return f"<{number}>"

    found = Alternatives([(3, -0.5), (9, -2.0)], piece)
    assert (len(found), bool(found), asked) == (2, True, [])
    made = (Alternative(3, "<3>", -0.5, math.exp(-0.5)), Alternative(9, "<9>", -2.0, math.exp(-2.0)))
    assert tuple(found) == made == found
    assert found == Alternatives([(3, -0.5), (9, -2.0)], piece) != Alternatives([(3, -0.5)], piece)
    assert (found[1], found[:1], repr(found), hash(found)) == (made[1], made[:1], repr(made), hash(made))
    assert copy.deepcopy(found) == pickle.loads(pickle.dumps(found)) == made
    assert asked.count(9) == 2, "once for each that was compared"
