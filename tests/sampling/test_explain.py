"""The explanation is what happened: every step, and the token that generation draws; and an answer drawn again from its logits."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb import sampling
from exl2nb.core.errors import GenerationError, OptionError
from exl2nb.sampling import explain
from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.filters import active_filters
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.replay import Replay, explain_state, seeded
from exl2nb.sampling.sampler_state import SamplerState

from . import numpy_reference as reference
from .test_chain import PARAMS, logits, state_of
from .test_sampler_state import Words

ROW = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))


def assert_draws(found, token):
    """The explanation drew this token, or its random number falls on a border: it uses whole rows, sampling narrowed ones."""
    if found.token != token:
        assert found.uniform is not None
        line, at = found.probs.cumsum(), int(found.ids.searchsorted(token))
        assert found.ids[at] == token
        assert min(abs(line[at] - found.uniform), abs(line[at] - found.probs[at] - found.uniform)) < 1e-5


@given(params=PARAMS, seed=st.integers(0, 1000), size=st.sampled_from([200, 3000, 32_000]), spread=st.sampled_from([0.5, 3.0, 8.0]))
@settings(max_examples=120, deadline=None)
def test_explanation_draws_what_sampling_draws(params, seed, size, spread):
    x = logits(seed, size, spread)
    state = state_of(params)
    found = explain_state(x, state)
    assert_draws(found, sample_row(x, state).id)
    assert found.index + 1 == state.count


@given(params=PARAMS, seed=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_the_steps_add_up(params, seed):
    x = logits(seed, 400)
    state = state_of(params)
    found = explain_state(x, state)
    names = [step.name for step in found.steps]
    assert names == ["logits", *(f.name for f in active_filters(params)), *(["greedy"] if params.greedy else [])]
    np.testing.assert_allclose(found.steps[0].after, reference.softmax(x), atol=1e-9)
    before = found.steps[0]
    for step in found.steps[1:]:
        assert set(step.ids) | set(step.removed) == set(before.ids)
        assert not set(step.ids) & set(step.removed)
        assert step.after.sum() == pytest.approx(1.0)
        assert step.before.sum() + step.removed_mass == pytest.approx(1.0)
        np.testing.assert_allclose(step.before, [before.prob_of(i) for i in step.ids], atol=1e-12)
        before = step
    assert found.prob == found.steps[-1].prob_of(found.token) > 0
    if not params.greedy:
        assert found.steps[-1].temperature == pytest.approx(params.temperature)


def test_dynamic_temperature_is_reported():
    found = explain(ROW, min_temp=0.5, max_temp=1.5, seed=1)
    entropy = -sum(p * np.log(p) for p in (0.5, 0.3, 0.15, 0.05)) / np.log(4)
    assert found.steps[-1].temperature == pytest.approx(0.5 + entropy, rel=1e-4)


def test_frames_text_and_html():
    found = explain(ROW, top_p=0.6, temperature=0.9, xtc_probability=0.3, seed=3)
    frame = found.to_frame()
    assert list(frame["step"]) == ["logits", "temperature", "top_p", "xtc"]
    assert list(frame["survivors"]) == [4, 4, 2, 2]
    assert frame["settings"][2] == "top_p=0.6"
    assert frame["removed_mass"][2] == pytest.approx(found.steps[2].removed_mass)
    tokens = found.tokens_frame()
    assert isinstance(tokens, pd.DataFrame)
    assert list(tokens["id"]) == [0, 1, 2, 3]
    np.testing.assert_allclose(tokens["logits"], [0.5, 0.3, 0.15, 0.05], atol=1e-6)
    assert tokens["top_p"].sum() == pytest.approx(1)
    text, html = str(found), found._repr_html_()
    for part in ("temperature=0.9", "top_p=0.6", "<- drawn", "of seed 3"):
        assert part in text
    assert html.count("<tr") == 1 + 4 + 1 + 4
    assert "&times;" in html
    assert "<script" not in html
    assert repr(found).startswith("Explanation(4 steps, 2 left, drew #")
    assert repr(found.steps[2]).startswith("Step(top_p: 2 left")


def test_names_are_escaped():
    found = explain(ROW, tokenizer=Words(), temperature=0)
    assert "&lt;b&gt;&amp;" in found._repr_html_()
    assert "<b>" not in found._repr_html_()
    assert list(found.tokens_frame()["text"]) == ["<b>&"] * 4
    assert found.uniform is None
    assert found.steps[-1].name == "greedy"
    assert found.probs.tolist() == [1.0]


def test_history_and_draw_number_count():
    params = SamplingParams(seed=5, repetition_penalty=2.0, frequency_penalty=0.5)
    state = SamplerState(params, [1, 2])
    x = logits(1, 50)
    ids = []
    for _ in range(10):
        found = explain(x, params, prompt_ids=[1, 2], new_ids=ids)
        ids.append(sample_row(x, state).id)
        assert found.token == ids[-1]


def test_nothing_is_changed():
    x, state = logits(1, 300), state_of(SamplingParams(mirostat=True, top_p=0.9, seed=1))
    before = (x.copy(), state.mu, state.count)
    explain_state(x, state)
    assert (x == before[0]).all()
    assert (state.mu, state.count) == before[1:]


@given(params=PARAMS, seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_a_replay_draws_what_was_drawn(params, seed):
    """Sampling draws ten tokens, one after another; the replay finds each of them, with all that came before counted in."""
    params = replace(params, seed=seed)
    rows, before = np.stack([logits(seed + place, 300) for place in range(10)]), [5, 6, 7, 5, 6]
    state = SamplerState(params, before)
    ids = [sample_row(row, state).id for row in rows]
    replay = Replay.of(rows, ids, before)
    for at, token in enumerate(ids):
        assert_draws(replay.explain(at, params), token)


def test_a_replay_of_one_row_counts_the_history():
    replay = Replay.of(torch.from_numpy(ROW), [0, 0, 1], [2])
    assert len(replay) == 4
    plain, fined = (replay.explain(3, temperature=0, frequency_penalty=penalty) for penalty in (0.0, 2.0))
    assert (plain.token, fined.token, plain.index) == (0, 2, 3)


def test_a_seed_is_kept():
    assert seeded(SamplingParams(seed=5)).seed == 5
    first, second = seeded(SamplingParams()), seeded(SamplingParams())
    assert first.seed != second.seed
    assert first.seed < 2**53, "a page can hold it exactly"


REPLAY = Replay.of(np.zeros((3, 5), np.float32), [1, 2, 3])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: explain(np.stack([ROW, ROW])), OptionError, r"shape \(2, 4\)"),
        (lambda: explain("abc"), OptionError, "logits are 'abc'; expected one row of numbers"),
        (lambda: explain(ROW, SamplingParams(), top_k=3), OptionError, "also top_k"),
        (lambda: explain(ROW, topk=3), OptionError, "unknown keyword 'topk'"),
        (lambda: explain(ROW, banned_tokens=[4]), OptionError, "token 4 is not"),
        (lambda: explain(np.float32([np.nan, 1])), GenerationError, "finite"),
        (lambda: explain(ROW, banned_tokens=[0, 1, 2, 3]), GenerationError, "no token is left"),
        (lambda: Replay.of(np.zeros((3, 5), np.float32), [1, 2, 3, 4, 0]), OptionError, r"shape \(3, 5\) for 5 tokens"),
        (lambda: REPLAY.explain(3), OptionError, "at is 3; expected 0 to 2"),
        (lambda: REPLAY.explain(0, banned_tokens=[9]), OptionError, "token 9 is not in the model's vocabulary"),
        (lambda: REPLAY.explain(0, topp=0.5), OptionError, "did you mean 'top_p'"),
        (lambda: sampling.sampler, AttributeError, "public names: CHAIN"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- through the real engine


OPTIONS = [
    {"seed": 1},
    {"temperature": 0},
    {"seed": 2, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.15},
    {"seed": 3, "min_p": 0.03, "xtc_probability": 0.7, "dry_multiplier": 0.9, "temperature_last": True, "temperature": 1.4},
    {"seed": 4, "mirostat": True, "mirostat_tau": 4.0, "presence_penalty": 0.4},
    {"seed": 5, "typical_p": 0.8, "skew": 0.3, "min_temp": 0.6, "max_temp": 1.6, "frequency_penalty": 0.3, "penalty_range": 8},
    {"seed": 6, "tfs": 0.95, "top_a": 0.1, "smoothing_factor": 0.2, "logit_bias": {300: 3.0}, "banned_tokens": [5, 6]},
    {"seed": 7, "regex": "[A-Za-z ,.]+", "top_p": 0.95},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
def test_every_step_of_a_generation_is_explained_and_replayed(llm, options):
    """Each token of an answer, generated beside another request, from the logits the engine had."""
    prompt = "It was a cold morning and"
    drawn, found = [], []

    def look(draw):
        found.append(draw.explain())
        drawn.append(draw.id)
        assert draw.prob == pytest.approx(
            found[-1].steps[-2 if "temperature" in options and not options["temperature"] else -1].prob_of(draw.id)
        )

    other = llm.stream("Something else", max_tokens=30, seed=9, ignore_eos=True)
    done = llm.generate(prompt, max_tokens=12, return_logits=True, post_sampling=look, **options)
    other.cancel()
    ids = [t.id for t in done.tokens]
    assert [e.token for e in found] == drawn == ids[: len(drawn)]
    assert [e.index for e in found] == list(range(len(found)))
    if "regex" not in options:  # a replay has no grammar
        replay = Replay.of(done.logits, ids, llm.tokenizer.encode(prompt), tokenizer=llm.tokenizer)
        assert [replay.explain(at, SamplingParams(**{"seed": done.seed, **options})).token for at in range(len(replay))] == ids


def test_llm_explain_gives_the_generated_token(llm):
    options = {"seed": 8, "top_p": 0.9, "temperature": 1.2, "dry_multiplier": 0.8}
    completion = llm.generate("Once upon a time", max_tokens=6, **options)
    for at in (0, 3, 5):
        found = llm.explain("Once upon a time", at=at, **options)
        assert found.token == completion.tokens[at].id
        assert found.index == at
        assert found.name_of(found.token) == repr(llm.tokenizer.piece(found.token))
    assert "constraint" in [s.name for s in llm.explain("x", choice=["a", "b"]).steps]


def test_llm_explain_refuses(llm):
    with pytest.raises(OptionError, match="explain: unknown keyword 'max_tokens'"):
        llm.explain("x", max_tokens=3)
    with pytest.raises(OptionError, match="at is -1"):
        llm.explain("x", at=-1)
    with pytest.raises(GenerationError, match="ended after 1 tokens"):
        llm.explain("x", at=5, choice=["a"])


def test_tensors_and_names_of_the_package():
    assert sampling.explain(torch.from_numpy(ROW), temperature=0).token == 0
    assert sampling.SamplingParams is SamplingParams


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "cut",
    [{"top_p": 0.9, "top_a": 0.2}, {"min_p": 0.1, "skew": 0.1}, {"xtc_probability": 1.0}, {"smoothing_factor": 0.3}, {"mirostat": True}],
    ids=str,
)
def test_a_row_without_tokens_is_refused_before_the_cuts(cut):
    """Numpy would warn of differences of infinities, which says nothing to anybody."""
    params = SamplingParams(allowed_tokens=(0, 1), logit_bias={0: 1.0}, **cut)
    row = np.float32([-np.inf, -np.inf, 1.0, 0.5])
    with pytest.raises(GenerationError, match="no token is left"):
        explain(row, params)
    with pytest.raises(GenerationError, match="no token is left"):
        sample_row(row, SamplerState(params))
