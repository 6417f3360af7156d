"""What exllamav2's samplers get wrong, each with the case that shows it."""

import dataclasses

import numpy as np
import pytest

from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.filters import smoothing, top_p, typical, xtc
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.penalties import dry
from exl2nb.sampling.state import SamplerState

PROBS = np.float32([0.5, 0.3, 0.15, 0.05])
ORDERS = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]]


def kept(logits):
    return set(np.flatnonzero(np.isfinite(logits)).tolist())


@pytest.mark.parametrize("order", ORDERS)
def test_top_p_keeps_the_crossing_token_in_any_order(order):
    """There: {0.5, 0.05} or {0.5}, depending on the order of the vocabulary."""
    assert {order[i] for i in kept(top_p(np.log(PROBS[order]), 0.6))} == {0, 1}


@pytest.mark.parametrize("order", ORDERS)
def test_typical_measures_surprise_against_entropy(order):
    """There: only {0.3}, from p + log p and without the crossing token."""
    assert {order[i] for i in kept(typical(np.log(PROBS[order]), 0.6))} == {0, 1}
    assert {order[i] for i in kept(typical(np.log(PROBS[order]), 0.25))} == {1}


@pytest.mark.parametrize("order", ORDERS)
def test_xtc_on_any_order(order):
    """There: only right on a sorted list; weights summed to 2.25 and more otherwise."""
    found = np.exp(xtc(np.log(PROBS[order]), 1.0, 0.1))
    found /= found.sum()
    np.testing.assert_allclose(found[np.argsort(order)], [0, 0, 0.75, 0.25], atol=1e-6)


def test_smoothing_of_a_row_does_not_depend_on_its_neighbours():
    """There: the temperature was divided again for every row of a batch."""
    x = np.random.default_rng(0).normal(size=50).astype(np.float32)
    first = smoothing(x, 0.3)
    for _ in range(5):
        smoothing(x + 1, 0.3)
    assert (smoothing(x, 0.3) == first).all()


def test_params_hold_no_state():
    """There: DRY's tables and mirostat's mu were fields of the settings, and leaked into the next request."""
    params = SamplingParams(mirostat=True, dry_multiplier=1.0, seed=4)
    before = dataclasses.asdict(params)
    state = SamplerState(params, [1, 2, 1])
    for _ in range(30):
        sample_row(np.zeros(40, np.float32), state)
    assert dataclasses.asdict(params) == before


def test_a_greedy_copy_keeps_the_base_of_dry():
    """There: greedy_clone() set dry_base from dry_allowed_length."""
    params = dataclasses.replace(SamplingParams(dry_multiplier=1.0, dry_base=3.0, dry_allowed_length=2), temperature=0.0)
    assert (params.dry_base, params.dry_allowed_length) == (3.0, 2)
    x = np.zeros(5, np.float32)
    ids = np.array([1, 2, 3, 4, 1, 2, 3])
    out = dry(x, ids, multiplier=1.0, base=params.dry_base, allowed_length=2, max_ngram=20, breakers=frozenset())
    assert out[4] == -3.0


def test_unset_settings_are_neutral():
    """There: unset settings mean temperature 0.8, top_k 50, top_p 0.8 and a repetition penalty."""
    assert SamplingParams().changed == {}
    assert SamplingParams.preset("exllamav2").changed == {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "repetition_penalty": 1.025}


def test_a_ban_that_ends_does_not_outlive_min_tokens():
    """There: min_new_tokens wrote into the list of banned tokens of a checkpoint."""
    x = np.zeros(20, np.float32)
    x[0] = 9.0
    state = SamplerState(SamplingParams(min_tokens=2, temperature=0), end_ids=[0])
    assert [sample_row(x, state).id == 0 for _ in range(4)] == [False, False, True, True]
    state.rewind(4)
    assert [sample_row(x, state).id == 0 for _ in range(4)] == [False, False, True, True]
