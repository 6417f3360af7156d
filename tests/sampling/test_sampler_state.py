"""What a request remembers, and that it can be taken back and copied."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.core.errors import StructureError
from exl2nb.sampling.chain import filtered, sample_row
from exl2nb.sampling.constraint import Allowed
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.sampler_state import History, SamplerState, Tally

SIZE = 300
EVERYTHING = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "dry_multiplier": 0.8, "mirostat": True}
EVERYTHING |= {"mirostat_tau": 3.0, "min_tokens": 4, "top_p": 0.95}


class Words:
    """A tokenizer of single characters; the pieces it shows hold HTML."""

    eos_ids = frozenset({0})

    def __init__(self, highest_id=4999):
        self.highest_id = highest_id

    def piece(self, token_id, /):
        return "<b>&"

    def encode(self, text, add_special=True):
        return [ord(c) for c in text]


class Countdown:
    """A grammar in which every token must be smaller than the one before; 0 ends it."""

    def __init__(self, ids=()):
        self.ids = list(ids)

    @property
    def finished(self):
        return bool(self.ids) and self.ids[-1] == 0

    accepting = finished

    def allowed(self):
        limit = self.ids[-1] if self.ids else SIZE
        return Allowed.of(np.arange(SIZE) < limit)

    def accept(self, token_id, /):
        if self.ids and token_id >= self.ids[-1]:
            raise StructureError("too large")
        self.ids.append(token_id)

    def rewind(self, count, /):
        del self.ids[len(self.ids) - count :]

    def copy(self):
        return Countdown(self.ids)

    def forced(self):
        return [0] if self.ids and self.ids[-1] == 1 else []


def row(seed):
    return (np.random.default_rng(seed).normal(size=SIZE) * 3).astype(np.float32)


def make(seed=1, constraint=None, **kwargs):
    return SamplerState(SamplingParams(seed=seed, **kwargs), [5, 6, 5, 7], tokenizer=Words(), end_ids=[0], constraint=constraint)


def run(state, count, start=0):
    return [sample_row(row(start + i), state).id for i in range(count)]


@pytest.mark.parametrize("more", [{}, {"penalty_range": 3, "penalty_decay": 2}])
@given(steps=st.lists(st.integers(-3, 4), max_size=12))
@settings(max_examples=30, deadline=None)
def test_rewind_leaves_no_trace(more, steps):
    """After any mixture of tokens and rewinds a state samples as one that only saw what is left."""
    state = make(**EVERYTHING, **more)
    kept: list[int] = []
    for step in steps:
        if step < 0:
            back = min(-step, len(kept))
            state.rewind(back)
            del kept[len(kept) - back :]
        for _ in range(max(step, 0)):
            kept.append(sample_row(row(len(kept)), state).id)
    fresh = make(**EVERYTHING, **more)
    assert run(fresh, len(kept)) == kept
    assert (state.mu, state.count) == (fresh.mu, fresh.count)
    np.testing.assert_array_equal(filtered(row(99), state), filtered(row(99), fresh))


@pytest.mark.parametrize("more", [{}, {"penalty_range": 3}])
def test_copies_are_independent(more):
    state = make(**EVERYTHING, **more)
    run(state, 5)
    twin, other = state.copy(), state.copy(seed=77)
    assert run(twin, 8, 5) == (after := run(state, 8, 5))
    assert run(other, 8, 5) != after
    run(twin, 3)
    assert run(make(**EVERYTHING, **more), 5) + after == run(make(**EVERYTHING, **more), 13)


def test_a_constraint_is_rewound_and_copied():
    state = make(constraint=Countdown(), temperature=2.0)
    tokens = run(state, 3)
    assert tokens == sorted(tokens, reverse=True)
    twin = state.copy()
    state.rewind(2)
    assert state.constraint.ids == tokens[:1]
    assert twin.constraint.ids == tokens
    assert run(state, 2, 1) == tokens[1:]
    while not twin.finished:
        run(twin, 1)
    assert twin.constraint.ids[-1] == 0


class Many(Allowed):
    """Never listed."""

    def few(self):
        return None


def test_a_constraint_on_short_and_long_rows():
    """The allowed ids as a list and as a mask give the same draws, whatever else is on."""
    for kwargs in ({}, {"top_p": 0.8}, {"min_p": 0.1, "xtc_probability": 0.5}, {"temperature": 0}, {"skew": 0.5, "banned_tokens": [3, 4]}):
        for seed in range(20):
            listed, masked = (make(seed, constraint=Countdown([15]), **kwargs) for _ in range(2))
            masked.constraint.allowed = lambda: Many(Countdown([15]).allowed().bits)
            assert run(listed, 1, seed) == run(masked, 1, seed)


def test_mirostat_belongs_to_the_request():
    """Two requests of one SamplingParams do not share mu, and a token that was not drawn leaves it alone."""
    params = SamplingParams(mirostat=True, mirostat_tau=2.0, seed=1)
    one, two = SamplerState(params), SamplerState(params)
    run(one, 10)
    assert one.mu != 4.0
    assert two.mu == 4.0
    before = one.mu
    one.push(5)
    assert one.mu == before


def test_dry_belongs_to_the_request():
    params = SamplingParams(dry_multiplier=50.0, temperature=0)
    one, two = SamplerState(params, [1, 2, 3, 1, 2]), SamplerState(params, [7, 8, 9])
    x = np.zeros(10, np.float32)
    x[3] = 1.0
    assert sample_row(x, two).id == 3
    assert sample_row(x, one).id != 3


def test_dry_breakers_are_found_as_text_and_as_ids():
    state = make(dry_multiplier=1.0, dry_breakers=(".", 7))
    assert state.breakers == {ord("."), 7}
    assert SamplerState(SamplingParams(dry_multiplier=1.0)).breakers == frozenset()  # texts mean nothing without a tokenizer


def test_xtc_protects_the_end_and_line_breaks_unless_told_otherwise():
    assert make(xtc_probability=1.0).protected.tolist() == [0, 10]
    assert make(xtc_probability=1.0, xtc_ignore=[3]).protected.tolist() == [3]
    x = np.full(SIZE, -20.0, np.float32)
    x[[10, 20, 30]] = [2.0, 1.9, 1.8]
    assert {sample_row(x, make(i, xtc_probability=1.0)).id for i in range(40)} == {10, 30}
    assert {sample_row(x, make(i, xtc_probability=1.0, xtc_ignore=[])).id for i in range(40)} == {30}


def test_protected_tokens_are_found_on_a_narrowed_row():
    x = np.full(5000, -20.0, np.float32)
    x[[10, 2000, 3000]] = [2.0, 1.9, 1.8]
    for more in ({}, {"min_p": 0.1}, {"top_k": 3}, {"top_p": 0.99}):
        assert {sample_row(x, make(i, xtc_probability=1.0, **more)).id for i in range(30)} == {10, 3000}


def test_min_tokens_masks_the_end_until_then():
    x = np.zeros(SIZE, np.float32)
    x[0] = 50.0
    state = make(min_tokens=3)
    for _ in range(2):
        assert [sample_row(x, state).id == 0 for _ in range(5)] == [False, False, False, True, True]
        state.rewind(5)


def test_presence_and_frequency_count_new_tokens_and_repetition_also_the_prompt():
    x = np.ones(SIZE, np.float32)
    state = make(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    for token in (9, 9, 5):
        state.push(token)
    out = filtered(x, state)
    assert out[9] == pytest.approx(0.5 - 0.5 - 0.5)
    assert out[5] == pytest.approx(0.5 - 0.5 - 0.25)
    assert out[6] == pytest.approx(0.5)
    assert out[8] == 1.0


@pytest.mark.parametrize("reach", [0, 4])
def test_presence_and_frequency_count_the_prompt_where_that_is_asked_for(reach):
    x = np.ones(SIZE, np.float32)
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "penalty_range": reach}
    state = SamplerState(SamplingParams(penalty_prompt=True, **options), [3, 7, 7, 6])
    for token in (6, 5):
        state.push(token)
    out = filtered(x, state)
    assert out[6] == pytest.approx(1 - 0.5 - 0.5)
    assert out[7] == pytest.approx(1 - 0.5 - (0.25 if reach else 0.5))
    assert out[3] == (1.0 if reach else 0.25)
    state.rewind(2)
    assert filtered(x, state)[6] == pytest.approx(0.25)
    without = SamplerState(SamplingParams(**options), [3, 7, 7, 6])
    assert filtered(x, without)[7] == 1.0
    assert not state.device_ready


def test_tally_and_history():
    rng = np.random.default_rng(0)
    tally, ids = Tally([1, 1, 2]), [1, 1, 2]
    history = History([1, 1, 2])
    for _ in range(400):
        if len(ids) > 3 and rng.random() < 0.4:
            gone = ids.pop()
            tally.remove(gone)
            assert history.pop() == gone
        else:
            ids.append(int(rng.integers(0, 90)))
            tally.add(ids[-1])
            history.push(ids[-1])
    assert dict(zip(tally.ids.tolist(), tally.counts.tolist())) == {i: ids.count(i) for i in set(ids)}
    assert history.ids.tolist() == ids
    assert history.new_ids.tolist() == ids[3:]
    assert len(history.copy()) == len(ids)


def test_device_ready():
    assert make(temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logit_bias={3: 1.0}).device_ready
    assert make().device_ready
    assert not make(constraint=Countdown()).device_ready
    for kwargs in ({"tfs": 0.9}, {"min_tokens": 3}, {"penalty_range": 5}, {"temperature_last": True}, {"order": ["top_k"]}):
        assert not make(**kwargs).device_ready
