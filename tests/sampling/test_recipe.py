"""Which filters a request goes through, in which order, and functions that watch it."""

import numpy as np
import pytest

from exl2nb.core.errors import GenerationError, OptionError
from exl2nb.sampling.chain import filtered, sample_row
from exl2nb.sampling.filters import active_filters
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.state import Bounds, SamplerState, recipe

from . import numpy_reference as reference
from .test_chain import logits
from .test_state import Countdown


def names(**kwargs):
    return [f.name for f in active_filters(SamplingParams(**kwargs))]


def test_temperature_last():
    assert names(temperature=0.5, min_p=0.1, xtc_probability=0.5, top_k=4) == ["temperature", "top_k", "min_p", "xtc"]
    assert names(temperature=0.5, min_p=0.1, xtc_probability=0.5, top_k=4, temperature_last=True) == [
        "top_k",
        "min_p",
        "temperature",
        "xtc",
    ]


def test_an_order_of_ones_own():
    wanted = ["min_p", "temperature", "top_p"]
    params = SamplingParams(order=wanted, min_p=0.05, temperature=2.0, top_p=0.9)
    assert [f.name for f in active_filters(params)] == wanted
    x = logits(0, 2000)
    state = SamplerState(params)
    np.testing.assert_allclose(reference.softmax(filtered(x, state)), reference.softmax(reference.chain(x, params)), atol=1e-6)
    assert names(order=[*wanted, "skew"], top_p=0.5) == ["top_p"]
    assert names(order=["dry", "logit_bias", "top_k"], dry_multiplier=1.0, logit_bias={1: 1}, banned_tokens=[2]) == [
        "banned_tokens",
        "dry",
        "logit_bias",
    ]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"order": ["top_q"]}, "order holds 'top_q'; known: repetition_penalty"),
        ({"order": ["banned_tokens"]}, "masks always come first"),
        ({"order": ["top_p", "top_p"]}, "each filter once"),
        ({"order": ["top_p", "dry"]}, "before the others"),
        ({"order": ["top_p"], "top_p": 0.9, "min_p": 0.1}, "leaves out min_p"),
        ({"order": "top_p"}, "expected a list"),
        ({"order": ["temperature"], "temperature_last": True, "temperature": 2.0}, "put 'temperature' where"),
    ],
)
def test_orders_that_cannot_be(kwargs, message):
    with pytest.raises(OptionError, match=message):
        SamplingParams(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "bounds", "lead"),
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
def test_what_narrowing_may_count_on(kwargs, bounds, lead):
    found = recipe(SamplingParams(**kwargs))
    assert found.bounds == bounds
    assert len(found.lead) == lead


def test_orders_draw_what_their_slow_chain_says():
    rng = np.random.default_rng(0)
    cuts = {"temperature": 1.7, "top_k": 30, "top_p": 0.8, "min_p": 0.02, "top_a": 0.05, "typical": 0.9, "tail_free": 0.97, "xtc": 0.5}
    fields = {"typical": "typical_p", "tail_free": "tfs", "xtc": "xtc_probability"}
    for trial in range(60):
        order = rng.permutation(sorted(cuts))[: rng.integers(2, 6)].tolist()
        params = SamplingParams(order=order, seed=trial, **{fields.get(n, n): cuts[n] for n in order})
        x = logits(trial, 3000)
        state = SamplerState(params)
        probs = reference.softmax(reference.chain(x, params))
        line = probs.cumsum()
        chosen, u = sample_row(x, state).id, state.copy()
        u.rewind(1)
        assert line[chosen] - probs[chosen] - 1e-5 <= u.uniform() <= line[chosen] + 1e-5, order


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


def test_one_function_is_enough():
    assert sample_row(np.zeros(4, np.float32), SamplerState(SamplingParams(post_sampling=lambda draw: 3))).id == 3


@pytest.mark.parametrize("answer", ["x", 4, -1, True, 1.0])
def test_answers_that_are_no_token(answer):
    with pytest.raises(OptionError, match="post_sampling function returned"):
        sample_row(np.zeros(4, np.float32), SamplerState(SamplingParams(post_sampling=lambda draw: answer)))


def test_a_function_cannot_leave_the_structure():
    state = SamplerState(SamplingParams(post_sampling=lambda draw: 250, seed=1), constraint=Countdown([100]))
    with pytest.raises(GenerationError, match="structure does not allow"):
        sample_row(np.zeros(300, np.float32), state)


def test_a_function_that_raises_ends_its_request_alone():
    import exl2nb

    def broken(draw):
        raise RuntimeError("oops")

    with exl2nb.demo(progress=None) as llm:
        other = llm.stream("x", max_tokens=10, seed=1)
        with pytest.raises(GenerationError, match="oops"):
            llm.generate("x", post_sampling=broken)
        assert len(other.result().tokens) == 10
