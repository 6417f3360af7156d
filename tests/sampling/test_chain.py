"""The chain of filters: its order, its reference, what it draws, and functions that watch the draw."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from exl2nb.core.errors import GenerationError, OptionError
from exl2nb.sampling.chain import filtered, preselect, sample, sample_row
from exl2nb.sampling.draw import inverse_cdf, uniform
from exl2nb.sampling.filters import ALL_TOKENS, Candidates, active_filters
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.replay import explain_state
from exl2nb.sampling.sampler_state import Bounds, SamplerState, prepare

from . import numpy_reference as reference
from .test_sampler_state import Countdown, Words

PROMPT, NEW = [1, 4, 4, 30, 2, 7, 4, 30], [2, 7, 4, 30, 2, 9, 9]
COMMON = {
    "temperature": st.sampled_from([0.05, 0.3, 0.8, 1.0, 2.0, 10.0]),
    "top_k": st.sampled_from([0, 1, 5, 40, 300, 10**6]),
    "top_p": st.sampled_from([1e-6, 0.2, 0.5, 0.9, 0.99, 1.0]),
    "min_p": st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
    "seed": st.integers(0, 2**64 - 1),
}
ALL = {
    **COMMON,
    "top_a": st.sampled_from([0.0, 0.01, 0.3]),
    "tfs": st.sampled_from([1.0, 0.95, 0.5]),
    "typical_p": st.sampled_from([1.0, 0.9, 0.3]),
    "smoothing_factor": st.sampled_from([0.0, 0.2]),
    "smoothing_curve": st.sampled_from([1.0, 2.0]),
    "mirostat": st.booleans(),
    "mirostat_tau": st.sampled_from([1.0, 4.0]),
    "xtc_probability": st.sampled_from([0.0, 0.5]),
    "skew": st.sampled_from([0.0, 0.4]),
    "presence_penalty": st.sampled_from([0.0, 0.5]),
    "frequency_penalty": st.sampled_from([0.0, 0.3]),
    "penalty_range": st.sampled_from([0, 3]),
    "dry_multiplier": st.sampled_from([0.0, 1.0]),
    "dry_breakers": st.just((9,)),
    "logit_bias": st.sampled_from([(), ((3, 2.5), (5, -4.0))]),
    "banned_tokens": st.sampled_from([(), (0, 6)]),
    "min_tokens": st.sampled_from([0, 100]),
    "temperature_last": st.booleans(),
    "xtc_ignore": st.just((11,)),
}
# Most requests switch on a few of them; two in a row that both cut hard leave nothing to compare.
PARAMS = st.lists(st.sampled_from(sorted(ALL)), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: ALL[name] for name in names}).map(lambda kwargs: SamplingParams(**kwargs))
)


def logits(seed, size, spread=3.0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) * np.float32(spread)


def state_of(params, **kwargs):
    state = SamplerState(params, PROMPT, end_ids=[2], **kwargs)
    for token in NEW:
        state.push(token)
    return state


@given(params=PARAMS, seed=st.integers(0, 1000), size=st.sampled_from([40, 257, 1500]), spread=st.sampled_from([0.01, 0.5, 3.0, 12.0]))
@settings(max_examples=250, deadline=None)
def test_chain_equals_its_reference(params, seed, size, spread):
    assume(
        spread > 0.1 or not params.smoothing_factor
    )  # smoothing makes float32 ties out of so flat a row, and a cut may fall between them
    x = logits(seed, size, spread)
    got = filtered(x, state_of(params)).astype(np.float64)
    protected = params.xtc_ignore if params.xtc_ignore is not None else [2]
    wanted = reference.chain(x, params, PROMPT, NEW, end_ids=[2], breakers=params.dry_breakers, protected=protected)
    # a token may stand exactly on a border: then float32 and float64 may part, by tokens whose weight does not matter
    np.testing.assert_allclose(reference.softmax(got), reference.softmax(wanted), atol=2e-4)
    both = np.isfinite(got) & np.isfinite(wanted)
    assert both.any()
    if not (params.xtc_probability or params.skew):  # those give logits up to a constant
        np.testing.assert_allclose(got[both], wanted[both], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"temperature": 0, "top_k": 5, "repetition_penalty": 1.1}, ["repetition_penalty"]),
        (  # the default order is that of Transformers
            {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
            ["repetition_penalty", "temperature", "top_k", "top_p", "min_p"],
        ),
        ({"temperature": 0.5, "min_p": 0.1, "xtc_probability": 0.5, "top_k": 4}, ["temperature", "top_k", "min_p", "xtc"]),
        (
            {"temperature": 0.5, "min_p": 0.1, "xtc_probability": 0.5, "top_k": 4, "temperature_last": True},
            ["top_k", "min_p", "temperature", "xtc"],
        ),
        ({"order": ["min_p", "temperature", "top_p"], "min_p": 0.05, "temperature": 2.0, "top_p": 0.9}, ["min_p", "temperature", "top_p"]),
        ({"order": ["min_p", "temperature", "top_p", "skew"], "top_p": 0.5}, ["top_p"]),
        (
            {"order": ["dry", "logit_bias", "top_k"], "dry_multiplier": 1.0, "logit_bias": {1: 1}, "banned_tokens": [2]},
            ["banned_tokens", "dry", "logit_bias"],
        ),
    ],
)
def test_order_of_the_filters(options, names):
    assert [f.name for f in active_filters(SamplingParams(**options))] == names


def test_orders_draw_what_the_reference_chain_says():
    rng = np.random.default_rng(0)
    cuts = {"temperature": 1.7, "top_k": 30, "top_p": 0.8, "min_p": 0.02, "top_a": 0.05, "typical": 0.9, "tail_free": 0.97, "xtc": 0.5}
    fields = {"typical": "typical_p", "tail_free": "tfs", "xtc": "xtc_probability"}
    for trial in range(60):
        order = rng.permutation(sorted(cuts))[: rng.integers(2, 6)].tolist()
        params = SamplingParams(order=order, seed=trial, **{fields.get(n, n): cuts[n] for n in order})
        x = logits(trial, 3000)
        state = SamplerState(params)
        probs = reference.softmax(reference.chain(x, params))
        np.testing.assert_allclose(reference.softmax(filtered(x, state)), probs, atol=1e-6)
        line = probs.cumsum()
        chosen, u = sample_row(x, state).id, state.copy()
        u.rewind(1)
        assert line[chosen] - probs[chosen] - 1e-5 <= u.uniform() <= line[chosen] + 1e-5, order


@given(params=PARAMS, seed=st.integers(0, 1000), spread=st.sampled_from([0.5, 3.0, 12.0]), size=st.sampled_from([3000, 32_000]))
@example(params=SamplingParams(top_p=0.9, top_a=0.3), seed=0, spread=3.0, size=3000)  # top_a alone would leave out more than top_p
@example(params=SamplingParams(top_p=0.9, top_a=0.01, min_p=0.2), seed=0, spread=3.0, size=3000)
@settings(max_examples=150, deadline=None)
def test_narrowing_changes_nothing(params, seed, spread, size):
    """Leaving certain losers out first and then cutting gives every token the probability that cutting the whole row gives it."""
    x = logits(seed, size, spread)
    whole = reference.softmax(filtered(x, state_of(params)))
    state, row = state_of(params), x
    for step in state.chain.penalties + state.chain.early_cuts:
        row = step.apply(row, state, ALL_TOKENS)
    ids, left_out = preselect(row, state.chain.bounds) if state.chain.bounds is not None else (None, 0.0)
    few = row if ids is None else row[ids]
    for place, step in enumerate(state.chain.late_cuts):
        few = step.apply(few, state, Candidates(ids, left_out if place == state.chain.left_out_at else 0.0))
    again = np.zeros(size)
    again[slice(None) if ids is None else ids] = reference.softmax(few)
    np.testing.assert_allclose(again, whole, atol=2e-5)


@pytest.mark.parametrize(
    ("kwargs", "bounds", "early"),
    [
        ({"temperature": 0.5, "top_k": 4, "min_p": 0.1}, Bounds(temperature=0.5, top_k=4, min_p=0.1), 0),
        ({"temperature": 0.5, "top_k": 4, "temperature_last": True}, Bounds(top_k=4), 0),
        ({"smoothing_factor": 0.2, "temperature": 0.5, "top_p": 0.9}, Bounds(temperature=0.5, top_p=0.9), 1),
        ({"order": ["min_p", "top_k"], "top_k": 4, "min_p": 0.1}, Bounds(min_p=0.1), 0),
        ({"order": ["top_p", "typical", "top_k"], "top_k": 4, "top_p": 0.9, "typical_p": 0.9}, Bounds(top_p=0.9), 0),
        ({"order": ["typical", "top_k"], "top_k": 4, "typical_p": 0.9}, Bounds(top_k=4), 1),
        ({"typical_p": 0.9}, None, 0),
        ({"temperature": 0, "top_k": 4}, None, 0),
    ],
)
def test_bounds_of_preselection(kwargs, bounds, early):
    found = prepare(SamplingParams(**kwargs))
    assert found.bounds == bounds
    assert len(found.early_cuts) == early


@pytest.mark.parametrize("kwargs", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 1.7, "top_p": 0.95, "top_k": 20}])
def test_draws_follow_the_filtered_distribution(kwargs):
    """Chi-square over 6000 draws."""
    x = logits(11, 400, 2.0)
    state = SamplerState(SamplingParams(seed=5, **kwargs))
    wanted = reference.softmax(filtered(x, state).astype(np.float64))
    counts = np.zeros(400)
    for _ in range(6_000):
        counts[sample_row(x, state).id] += 1
    assert counts[wanted == 0].sum() == 0
    often = wanted * 6_000 >= 5
    chi2 = ((counts[often] - wanted[often] * 6_000) ** 2 / (wanted[often] * 6_000)).sum()
    freedom = max(1, often.sum() - 1)
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_greedy_takes_the_best():
    x = logits(3, 500)
    assert sample_row(x, SamplerState(SamplingParams(temperature=0))).id == int(x.argmax())


def test_logprob_rank_and_top_are_unfiltered():
    x = logits(4, 500)
    logprobs = torch.from_numpy(x).double().log_softmax(0)
    state = SamplerState(SamplingParams(seed=3, temperature=2.0, top_k=50))
    for _ in range(20):
        chosen = sample_row(x, state, top=7)
        assert abs(chosen.logprob - float(logprobs[chosen.id])) < 1e-5
        assert chosen.rank == int((x > x[chosen.id]).sum()) + 1
        best = logprobs.topk(7)
        assert [i for i, _ in chosen.top] == best.indices.tolist()
        np.testing.assert_allclose([lp for _, lp in chosen.top], best.values, atol=1e-5)


def test_top_lists_ties_by_id():
    state = SamplerState(SamplingParams(temperature=0))
    for top in (3, 100):
        assert [i for i, _ in sample_row(np.zeros(10, np.float32), state, top=top).top] == list(range(min(top, 10)))


def test_same_seed_same_tokens_whatever_the_neighbours():
    rows = torch.from_numpy(np.stack([logits(seed, 1000) for seed in range(6)]))
    params = SamplingParams(seed=9, top_p=0.95)

    def run(neighbours):
        state = SamplerState(params)
        others = [SamplerState(SamplingParams(seed=i)) for i in range(neighbours)]
        found = []
        for step in range(20):
            block = torch.stack([rows[step % 6], *(rows[(step + i) % 6] for i in range(neighbours))])
            found.append(sample(block, [state, *others])[0])
        return found

    assert run(0) == run(1) == run(4)


def test_without_a_seed_runs_differ_and_the_seed_is_reported():
    states = [SamplerState(SamplingParams()) for _ in range(3)]
    assert len({s.seed for s in states}) == 3
    x = np.zeros(1000, np.float32)
    first = [sample_row(x, states[0]).id for _ in range(5)]
    assert first == [sample_row(x, again).id for again in [SamplerState(SamplingParams(seed=states[0].seed))] for _ in range(5)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kwargs", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}])
def test_logits_that_are_no_distribution(bad, kwargs):
    x = logits(1, 500)
    x[77] = bad
    with pytest.raises(GenerationError, match="finite"):
        sample_row(x, SamplerState(SamplingParams(**kwargs)))


def test_inverse_cdf_at_the_ends():
    x = np.array([-np.inf, 0.0, 0.0, -np.inf], np.float32)
    assert inverse_cdf(x, 0.0) == 1
    assert inverse_cdf(x, 0.49999) == 1
    assert inverse_cdf(x, 0.50001) == 2
    assert inverse_cdf(x, 1 - 2**-53) == 2


def test_uniform_is_uniform():
    draws = np.array([uniform(seed, i) for seed in (0, 1, 2**63) for i in range(4000)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert abs(counts - 600).max() < 120
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(draws[:4000], draws[4000:8000])[0, 1]) < 0.06


# ---- logits beyond the tokenizer's last token

PADDED = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"mirostat": True, "mirostat_tau": 3.0},
    {"tfs": 0.9},
    {"top_a": 0.2, "top_p": 0.95},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"skew": 0.5},
    {"smoothing_factor": 0.3},
    {"min_temp": 0.5, "max_temp": 1.5},
    {"dry_multiplier": 1.0, "top_k": 30},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0, "logit_bias": {295: 100.0}},
    {"allowed_tokens": [3, 4, 295, 299], "top_p": 0.9},
    {"banned_tokens": [5, 299]},
    {"order": ["min_p", "temperature", "top_p"], "min_p": 0.05, "temperature": 2.0, "top_p": 0.9},
]


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("kwargs", PADDED, ids=str)
def test_padding_is_never_drawn(kwargs, grammar):
    """The tokens of rows that end at the last token; log probability, rank and alternatives are those of the raw row."""
    columns, size = 290, 300

    def make(highest_id):
        params = SamplingParams(**kwargs, seed=7)
        constraint = Countdown() if grammar else None
        return SamplerState(params, [5, 6, 5, 7], tokenizer=Words(highest_id), end_ids=[0, 298], constraint=constraint)

    for seed in range(8):
        x = logits(seed, size)
        x[columns:] += 30
        masked = x.copy()
        masked[columns:] = -np.inf
        raw = x.copy()
        assert np.isfinite(filtered(x, make(columns - 1))).nonzero()[0].max() < columns
        expected = sample_row(masked, make(size - 1)).id
        found = sample_row(x, make(columns - 1), top=2)
        assert found.id == expected < columns
        assert found.rank > size - columns
        assert found.logprob == pytest.approx(float(np.log(reference.softmax(raw.astype(np.float64))[found.id])), abs=1e-4)
        assert min(token for token, _ in found.top) >= columns
        explained = explain_state(x, make(columns - 1), tokenizer=Words())
        assert explained.token == expected
        assert [step.name for step in explained.steps[:2]] == ["logits", "padding"]
        assert explained.steps[1].removed.tolist() == list(range(columns, size))
        assert (x == raw).all()


def test_rows_without_padding_have_no_step_for_it():
    x = logits(1, 300)
    for words in (None, Words(299), Words(400), Words(-1)):
        state = SamplerState(SamplingParams(top_p=0.9, seed=1), tokenizer=words)
        assert [step.name for step in explain_state(x, state).steps] == ["logits", "top_p"]
        assert sample_row(x, state).id == sample_row(x, SamplerState(SamplingParams(top_p=0.9, seed=1))).id


@pytest.mark.parametrize("kwargs", [{"temperature": 0}, {"top_k": 3}, {"typical_p": 0.5}])
def test_padding_alone_leaves_nothing(kwargs):
    state = SamplerState(SamplingParams(**kwargs, allowed_tokens=[295]), tokenizer=Words(289))
    with pytest.raises(GenerationError, match="no token is left"):
        sample_row(logits(1, 300), state)


def test_a_function_cannot_take_padding():
    state = SamplerState(SamplingParams(post_sampling=lambda draw: draw.columns), tokenizer=Words(289))
    with pytest.raises(OptionError, match="returned 290; expected None or a token id from 0 to 289"):
        sample_row(logits(1, 300), state)


# ---- post_sampling


def test_functions_see_the_draw_and_may_change_it():
    seen = []

    def look(draw):
        seen.append((draw.id, draw.index, draw.prob, draw.candidates[0].tolist()))

    def next_one(draw):
        return (draw.id + 1) % 4

    state = SamplerState(SamplingParams(temperature=1.0, top_k=2, seed=1, post_sampling=[look, next_one]))
    x = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
    tokens = [sample_row(x, state).id for _ in range(5)]
    assert tokens == [(i + 1) % 4 for i, *_ in seen]
    assert [index for _, index, *_ in seen] == list(range(5))
    assert all(ids == [0, 1] for *_, ids in seen)
    assert {round(p, 3) for *_, p, _ in seen} <= {0.625, 0.375}


def test_a_single_function_needs_no_list():
    assert sample_row(np.zeros(4, np.float32), SamplerState(SamplingParams(post_sampling=lambda draw: 3))).id == 3


@pytest.mark.parametrize("answer", ["x", 4, -1, True, 1.0])
def test_answers_that_are_no_token(answer):
    with pytest.raises(OptionError, match="post_sampling function returned"):
        sample_row(np.zeros(4, np.float32), SamplerState(SamplingParams(post_sampling=lambda draw: answer)))


def test_a_function_cannot_leave_the_structure():
    state = SamplerState(SamplingParams(post_sampling=lambda draw: 250, seed=1), constraint=Countdown([100]))
    with pytest.raises(GenerationError, match="structure does not allow"):
        sample_row(np.zeros(300, np.float32), state)
