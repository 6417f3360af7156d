"""SamplerMicroscope's Python half: sources, settings, places, bad ones, the line of probabilities, the static twin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.core.errors import OptionError
from exl2nb.sampling import explain
from exl2nb.widgets import SamplerMicroscope
from exl2nb.widgets.microscope import line_of
from exl2nb.widgets.protocol import LINE_PROB
from tests.widgets.page import exported, state, tell

ROW = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
PROMPT = "It was a dark night, and the old man"


@pytest.fixture(scope="module")
def scope(llm):
    return SamplerMicroscope(llm, PROMPT, max_tokens=12, temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=7)


def test_an_llm_answers_and_every_place_draws_its_token(llm, scope):
    answer = llm.generate(PROMPT, max_tokens=12, temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=7)
    assert [i for i, _ in state(scope, "_answer")] == [token.id for token in answer.tokens]
    for at in range(len(answer.tokens)):
        assert scope.look(at).token == answer.tokens[at].id
        assert scope.seed == "7"
        assert state(scope, "_index") == at


def test_a_completion_is_taken_with_its_seed(llm):
    done = llm.generate(PROMPT, max_tokens=6, return_logits=True, temperature=0.9)
    scope = SamplerMicroscope(done, tokenizer=llm.tokenizer, temperature=0.9, at=4)
    assert scope.token == done.tokens[4].id
    assert state(scope, "_prompt") == PROMPT
    with pytest.raises(OptionError, match="return_logits=True"):
        SamplerMicroscope(llm.generate(PROMPT, max_tokens=1))


@given(st.integers(0, 50), st.floats(0.1, 2.0), st.floats(0.1, 1.0), st.integers(0, 50), st.floats(0.0, 0.4))
@settings(max_examples=30, deadline=None)
def test_what_the_page_gets_is_the_explanation(seed, temperature, top_p, top_k, min_p):
    row = np.random.default_rng(seed).normal(0, 3, 200).astype(np.float32)
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    scope, truth = SamplerMicroscope(row, **options), explain(row, **options)
    assert (scope.token, scope.uniform) == (truth.token, truth.uniform)
    steps = state(scope, "_steps")
    told = [[step["name"], step["settings"], step["survivors"]] for step in steps]
    assert told == [[s["step"], s["settings"], s["survivors"]] for s in truth.rows()]
    shown = [i for i, _ in state(scope, "_tokens")]
    for told, step in zip(steps, truth.steps):
        for token, prob in zip(shown, told["probs"]):
            assert (prob is None) == (token not in step.ids)
            assert (prob or 0.0) == pytest.approx(step.prob_of(token), abs=1e-6)
    assert sum(part[2] for part in state(scope, "_line")) == pytest.approx(1, abs=1e-4)
    before = 0.0
    for token, _, prob in state(scope, "_line"):
        if token == truth.token:
            assert before - 1e-5 <= truth.uniform <= before + prob + 1e-5, "the number points at the drawn token"
        before += prob
    exported(scope)


def test_tiny_neighbours_are_one_piece():
    found = explain(np.zeros(5000, np.float32), seed=1)
    parts = line_of(found, str)
    assert len(parts) <= 3
    assert sum(1 for part in parts if part.id >= 0) == 1, "only the drawn one stands alone"
    assert all(part.prob >= LINE_PROB or part.id in (-1, found.token) for part in parts)


def test_settings_from_python_and_page(scope):
    heard = []
    scope.on_change(lambda one: heard.append(one.params.top_k))
    scope.set(top_k=3)
    assert scope.settings["top_k"] == 3
    tell(scope, {"type": "sample", "at": 2, "settings": {"top_k": 5.0, "seed": 12}})
    assert (scope.at, scope.params.top_k, scope.params.seed, scope.status) == (2, 5, 12, "idle")
    assert heard == [3, 5]
    before = state(scope, "_steps")
    tell(scope, {"type": "sample", "at": 2, "settings": {"top_p": 0}})
    assert "top_p is 0" in scope.error
    assert state(scope, "_steps") == before
    tell(scope, {"type": "sample", "at": 2, "settings": {"order": ["top_k"]}})
    assert "invalid settings" in scope.error
    tell(scope, {"type": "sample", "at": 10**9, "settings": {}})
    assert (scope.at, scope.error) == (11, "")
    scope.at = 1
    assert scope.explanation.index == 1
    with pytest.raises(OptionError, match="at is 99"):
        scope.at = 99
    assert scope.at == 1
    with pytest.raises(OptionError, match="did you mean 'min_p'"):
        scope.set(min_pp=0.1)


def test_bad_sources_are_named(llm):
    with pytest.raises(OptionError, match="there is no prompt"):
        SamplerMicroscope(llm)
    with pytest.raises(OptionError, match="got 'int'"):
        SamplerMicroscope(3)
    with pytest.raises(OptionError, match="unknown keyword 'temprature'; did you mean 'temperature'"):
        SamplerMicroscope(ROW, temprature=1)
    with pytest.raises(OptionError, match="at is 7"):
        SamplerMicroscope(ROW, at=7)


def test_static_twin_and_export(llm, tmp_path):
    scope = SamplerMicroscope(llm, "<script>alert(1)</script>", max_tokens=3, seed=1, min_p=0.1)
    data, _ = scope._repr_mimebundle_()
    assert "<script" not in data["text/html"]
    assert "min_p" in data["text/html"]
    assert data["text/plain"].startswith("SamplerMicroscope(token 0 of 3: ")
    scope.to_html(tmp_path / "scope.html")
    page = (tmp_path / "scope.html").read_text()
    assert len(page) < 200_000
    assert "<script>alert" not in page
