"""Every filter against its NumPy reference, and against Transformers' processor where there is one."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from exl2nb import sampling
from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.filters import (
    dynamic_temperature,
    entropy_temperature,
    min_p,
    mirostat,
    next_mu,
    skew,
    smoothing,
    tail_free,
    temperature,
    top_a,
    top_k,
    top_p,
    typical,
    xtc,
)
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.penalties import allow, ban, dry, faded, fading, logit_bias, mask_ends, repetition_penalty, repetitions, subtract
from exl2nb.sampling.sampler_state import SamplerState

from . import numpy_reference as reference

SEEN = [3, 5, 5, 0]
SIZES = [(0, 7, 1.0), (1, 50, 3.0), (2, 333, 8.0), (3, 4096, 2.5)]
SEEN_IDS = np.array(SEEN)
FILTERS = [  # ours, the reference, Transformers' processor, values of the last argument
    (temperature, reference.temperature, hf.TemperatureLogitsWarper, [0.7, 3.5]),
    (top_k, reference.top_k, hf.TopKLogitsWarper, [1, 2, 7, 10_000]),
    (top_p, reference.top_p, hf.TopPLogitsWarper, [1e-6, 0.3, 0.6, 0.9, 0.999]),
    (min_p, reference.min_p, hf.MinPLogitsWarper, [0.01, 0.1, 0.5, 1.0]),
    (typical, reference.typical, hf.TypicalLogitsWarper, [0.05, 0.3, 0.6, 0.9, 0.99]),
    (
        lambda x, r: repetition_penalty(x, SEEN_IDS, r),
        lambda x, r: reference.repetition_penalty(x, SEEN, r),
        hf.RepetitionPenaltyLogitsProcessor,
        [1.3, 0.8],
    ),
    (top_a, reference.top_a, None, [0.01, 0.2, 1.0]),
    (tail_free, reference.tail_free, None, [0.1, 0.5, 0.95, 0.999]),
    (mirostat, reference.mirostat, None, [-3.0, 0.5, 4.0, 9.0]),
    (lambda x, c: smoothing(x, 0.3, c), lambda x, c: reference.smoothing(x, 0.3, c), None, [1.0, 1.7, 3.0]),
    (
        lambda x, a: dynamic_temperature(x, *a),
        lambda x, a: reference.dynamic_temperature(x, *a),
        None,
        [(0.0, 2.0, 1.0), (0.5, 1.5, 0.5), (0.7, 0.7, 3.0)],
    ),
    (
        lambda x, a: xtc(x, *a, np.array([2])),
        lambda x, a: reference.xtc(x, *a, [2]),
        None,
        [(1.0, 0.1), (0.5, 0.02), (0.3, 0.0), (1.0, 0.5)],
    ),
    (skew, reference.skew, None, [-2.0, -0.3, 0.5, 2.0]),
]
CASES = [
    (lambda x, f=ours, v=value: f(x, v), lambda x, f=slow, v=value: f(x, v), theirs and theirs(value))
    for ours, slow, theirs, values in FILTERS
    for value in values
]
DISTRIBUTIONS = range(len(CASES) - 8, len(CASES))  # logits up to a constant: what counts are the probabilities
CUTS = [
    lambda x: top_p(x, 0.7),
    lambda x: typical(x, 0.7),
    lambda x: tail_free(x, 0.8),
    lambda x: top_a(x, 0.3),
    lambda x: xtc(x, 0.6, 0.03),
    lambda x: mirostat(x, 3.0),
]


def same(got, wanted, *, shifted):
    if shifted:
        np.testing.assert_allclose(reference.softmax(got), reference.softmax(wanted), rtol=2e-5, atol=1e-12)
    else:
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize(("seed", "size", "spread"), SIZES)
def test_filter(case, seed, size, spread):
    ours, numpy_reference, theirs = CASES[case]
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    got = ours(x.numpy())
    assert got.dtype == np.float32
    same(got, numpy_reference(x.numpy().astype(np.float64)), shifted=case in DISTRIBUTIONS)
    if theirs is not None:
        same(got, theirs(torch.tensor([SEEN]), x[None].clone())[0].numpy(), shifted=False)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_tokens_removed_before_stay_removed_and_count_for_nothing(case):
    """A filter on a row with -inf equals the filter on the rest of the row."""
    ours = CASES[case][0]
    x = np.random.default_rng(case).normal(size=60).astype(np.float32) * 3
    x[-3:] = -np.inf
    alive = np.isfinite(x)
    got = ours(x)
    assert not np.isfinite(got[~alive]).any()
    np.testing.assert_allclose(got[alive], ours(x[alive]), rtol=1e-6)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_one_token_and_equal_tokens(case):
    ours = CASES[case][0]
    for x in (np.float32([2.5, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf]), np.full(6, 1.5, np.float32)):
        got = ours(x)
        assert np.isfinite(got.max())
        if case not in DISTRIBUTIONS and ours(np.float32([1, 2, 3, 4, 5, 6])).argmax() == 5:
            assert np.isfinite(got[0])


def test_input_is_left_alone():
    x = np.random.default_rng(0).normal(size=50).astype(np.float32)
    before = x.copy()
    for case in CASES:
        case[0](x)
    assert (x == before).all()


@pytest.mark.parametrize(
    "cut",
    [lambda x: top_k(x, 1), lambda x: top_p(x, 0.1), lambda x: typical(x, 0.1), lambda x: tail_free(x, 0.01), lambda x: mirostat(x, 0.0)],
)
def test_ties_stay_together(cut):
    assert np.isfinite(cut(np.float32([1, 3, 3, 0]))).tolist() == [False, True, True, False]


@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.1, 1.0, 4.0]))
@settings(max_examples=40, deadline=None)
def test_the_order_of_the_vocabulary_does_not_matter(seed, spread):
    """Every cut keeps the same tokens however the ids are dealt; XTC gives them the same probabilities."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=40) * spread).astype(np.float32)
    dealt = rng.permutation(40)
    for cut in CUTS:
        np.testing.assert_allclose(reference.softmax(cut(x))[dealt], reference.softmax(cut(x[dealt])), atol=1e-6)


@pytest.mark.parametrize(("cut", "values"), [(top_p, [0.1, 0.6, 0.9, 0.97, 0.995]), (top_a, [0.1, 0.17, 0.5, 0.61, 1.0])])
def test_probability_left_out_before_counts(cut, values):
    logits = np.log(np.float32([0.5, 0.3, 0.15, 0.04, 0.01]))
    for value in values:
        assert np.isfinite(cut(logits[:4], value, left_out=0.01)).tolist() == np.isfinite(cut(logits, value)).tolist()[:4]


def test_entropy_temperature_lies_between_its_ends():
    assert entropy_temperature(np.float32([100, 0, 0]), 0.3, 1.7, 1.0) == pytest.approx(0.3, abs=1e-6)
    assert entropy_temperature(np.zeros(50, np.float32), 0.3, 1.7, 1.0) == pytest.approx(1.7)
    assert entropy_temperature(np.float32([100, 0]), 0.0, 1.0, 1.0) == 1e-3


def test_smoothing_keeps_ranks():
    x = np.random.default_rng(2).normal(size=500).astype(np.float32) * 5
    for curve in (1.0, 2.0, 3.0):
        assert (np.argsort(-smoothing(x, 0.2, curve), kind="stable") == np.argsort(-x, kind="stable")).all()


def test_xtc_is_the_coin_flip():
    """Chi-square of the mixture against a simulation of the original: flip, remove, renormalise, draw."""
    rng = np.random.default_rng(0)
    logits = np.log(np.float32([0.05, 0.3, 0.15, 0.35, 0.11, 0.04]))
    wanted = reference.softmax(xtc(logits, 0.4, 0.1))
    counts, draws = np.zeros(6), 40_000
    for flip in (True, False):
        probs = reference.softmax(logits)
        if flip:
            probs[[1, 2, 3]] = 0.0  # at least 0.1, all but 0.11
        times = int(draws * 0.4) if flip else draws - int(draws * 0.4)
        counts += rng.multinomial(times, probs / probs.sum())
    assert ((counts - wanted * draws) ** 2 / (wanted * draws)).sum() < 25


def test_skew_is_a_bent_uniform():
    """Drawing with u ** exp(-s) from the sorted tokens gives the probabilities that skew says."""
    x = np.log(np.float32([0.1, 0.4, 0.2, 0.3]))
    for value in (-1.0, 0.7):
        u = np.random.default_rng(1).random(60_000) ** np.exp(-value)
        order = np.argsort(-x, kind="stable")
        counts = np.bincount(order[np.searchsorted(reference.softmax(x)[order].cumsum(), u, side="right").clip(0, 3)], minlength=4)
        wanted = reference.softmax(skew(x, value)) * 60_000
        assert ((counts - wanted) ** 2 / wanted).sum() < 20


IDS = st.lists(st.integers(0, 5), max_size=60)


@given(
    ids=IDS,
    breakers=st.frozensets(st.integers(0, 5), max_size=2),
    allowed=st.integers(1, 4),
    max_ngram=st.integers(1, 12),
    base=st.sampled_from([1.0, 1.75, 4.0]),
)
@settings(max_examples=200, deadline=None)
def test_dry(ids, breakers, allowed, max_ngram, base):
    x = np.random.default_rng(0).normal(size=8).astype(np.float32)
    array = np.array(ids, np.int64)
    got = dry(x, array, multiplier=0.8, base=base, allowed_length=allowed, max_ngram=max_ngram, breakers=breakers)
    wanted = reference.dry(x.astype(np.float64), ids, 0.8, base, allowed, max_ngram, breakers)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_dry_of_a_long_loop_stays_finite():
    ids = np.array([1, 2] * 2000)
    got = dry(np.zeros(4, np.float32), ids, multiplier=100.0, base=10.0, allowed_length=1, max_ngram=1000, breakers=frozenset())
    assert np.isfinite(got).all()
    assert got[1] == -1e4
    tokens, lengths = repetitions(ids, 50, frozenset())
    assert lengths.max() == 50
    assert set(tokens.tolist()) == {1}


@given(ids=IDS, reach=st.integers(1, 20), decay=st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_penalties_with_range_and_decay(ids, reach, decay):
    x = np.random.default_rng(1).normal(size=8)
    found, latest, sums = faded(np.array(ids, np.int64), reach, decay)
    f32 = x.astype(np.float32)
    np.testing.assert_allclose(
        repetition_penalty(f32, found, 1.4, latest), reference.repetition_penalty(x, ids, 1.4, reach, decay), rtol=1e-5
    )
    np.testing.assert_allclose(
        subtract(f32, found, 0.5 * latest), reference.presence_penalty(x, ids, 0.5, reach, decay), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        subtract(f32, found, 0.3 * sums), reference.frequency_penalty(x, ids, 0.3, reach, decay), rtol=1e-4, atol=1e-6
    )


def test_fading_is_linear():
    np.testing.assert_allclose(fading(np.arange(1, 9), 3, 3), [1, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    np.testing.assert_allclose(fading(np.arange(1, 5), 2, 0), [1, 1, 0, 0])


def test_masks_by_id():
    x = np.float32([1, 2, 3, 4])
    ids = np.array([1, 3])
    assert np.isfinite(ban(x, ids)).tolist() == [True, False, True, False]
    assert np.isfinite(allow(x, ids)).tolist() == [False, True, False, True]
    assert logit_bias(x, ids, np.float32([5, -5])).tolist() == [1, 7, 3, -1]
    assert np.isfinite(mask_ends(x, ids)).tolist() == [True, False, True, False]
    only_ends = allow(x, ids)
    assert (mask_ends(only_ends, ids) == only_ends).all()
    assert x.tolist() == [1, 2, 3, 4]


def test_mirostat_holds_the_surprise_of_a_stationary_source():
    """Drawing from one distribution again and again, the mean surprise of what was drawn comes to tau."""
    x = (np.random.default_rng(0).normal(size=2000) * 1.5).astype(np.float32)
    for tau in (3.0, 6.0):
        state = SamplerState(SamplingParams(mirostat=True, mirostat_tau=tau, mirostat_eta=0.1, seed=1))
        surprises = []
        for _ in range(600):
            before = state.mu
            sample_row(x, state)
            surprises.append(tau - (state.mu - before) / 0.1)
        assert abs(np.mean(surprises[200:]) - tau) < 0.1
    assert next_mu(6.0, 2.0**-5, 3.0, 0.1) == pytest.approx(5.8)


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(sampling.__path__)])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(f"exl2nb.sampling.{name}")).failed == 0
