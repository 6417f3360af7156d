"""Speculation's Python half: passes, wrong guesses, figures, bad sources, the static twin."""

import pytest

from exl2nb.core.errors import OptionError
from exl2nb.widgets import Speculation
from tests.widgets.page import exported, state

PASSAGE = "It was a dark and stormy night. The old man had a boat and a dog. The rain fell on the roof of the house. "
ASKED = {"max_tokens": 80, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def answer(llm):
    return llm.generate(PASSAGE * 3, speculation={"kind": "ngram", "adaptive": False, "earlier": False}, **ASKED)


def test_every_guess_is_told_once(llm, answer):
    seen, told = Speculation(answer, tokenizer=llm.tokenizer), answer.speculation
    tokens = seen.to_frame()
    assert tokens.text.tolist() == [token.text for token in answer.tokens]
    assert tokens.source.tolist() == [token.source for token in answer.tokens]
    assert tokens.step.max() + 1 == tokens.step.nunique()
    assert sum(tokens.wrong.map(len)) == told.proposed - told.accepted
    runs = tokens[tokens.source == "ngram"].groupby("step").size()
    assert sorted(runs) == sorted(n for n, count in enumerate(told.lengths) for _ in range(count) if n)[-len(runs) :]
    piece = llm.tokenizer.piece
    for verified in told.trail:
        place = verified.at + verified.accepted
        if verified.accepted < len(verified.ids) and place < len(tokens):
            assert tokens.wrong[place] == [piece(i) for i in verified.ids[verified.accepted :]]
    assert seen.stats["lengths"] == list(told.lengths)
    assert seen.stats["plain_tps"] is None


def test_each_pass_ends_in_a_token_of_the_models_own(answer):
    tokens = Speculation(answer).to_frame()
    for _, run in list(tokens.groupby("step"))[:-1]:
        assert run.source.iloc[-1] == "target"
        assert (run.source.iloc[:-1] == "ngram").all()


def test_an_llm_answers_twice(llm):
    seen = Speculation(llm, PASSAGE * 2, max_tokens=30, temperature=0.8)
    assert seen.stats["same"] is True, "one seed for both"
    assert seen.stats["plain_tps"] > 0
    assert seen.stats["kind"] == "ngram"
    assert state(seen, "_prompt") == PASSAGE * 2
    assert "without" in repr(seen)
    assert Speculation(llm, PASSAGE, plain=False, max_tokens=4).stats["same"] is None


def test_bad_sources_are_named(llm, answer):
    with pytest.raises(OptionError, match="there is no prompt"):
        Speculation(llm)
    with pytest.raises(OptionError, match="got 'int'"):
        Speculation(3)
    with pytest.raises(OptionError, match="no draft tokens were proposed"):
        Speculation(llm.generate("It was", max_tokens=1, speculation="off"))
    with pytest.raises(OptionError, match="got max_tokens with a finished answer"):
        Speculation(answer, max_tokens=3)
    with pytest.raises(OptionError, match="did you mean 'temperature'"):
        Speculation(llm, "It was", temprature=1)


def test_static_twin_and_export(answer, tmp_path):
    seen = Speculation(answer, title="<script>alert(1)</script>")
    data, _ = seen._repr_mimebundle_()
    assert "<script" not in data["text/html"]
    assert "<del" in data["text/html"]
    assert data["text/plain"].startswith(
        f"Speculation({answer.speculation.accepted} of {answer.speculation.proposed} draft tokens accepted"
    )
    seen.to_html(tmp_path / "seen.html")
    assert (tmp_path / "seen.html").stat().st_size < 200_000
    exported(seen)
