"""An answer drawn again from its logits: the same tokens with the same settings, at every place, from the engine and from the chain."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exl2nb
from exl2nb.core.errors import OptionError
from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.replay import Replay, seeded
from exl2nb.sampling.state import SamplerState

from .test_chain import PARAMS, logits


@given(params=PARAMS, seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_every_place_draws_what_was_drawn(params, seed):
    """The quick chain draws ten tokens, one after another; the replay finds each of them, with all that came before counted in."""
    params = replace(params, seed=seed)
    rows, before = np.stack([logits(seed + place, 300) for place in range(10)]), [5, 6, 7, 5, 6]
    state = SamplerState(params, before)
    ids = [sample_row(row, state).id for row in rows]
    told = Replay.of(rows, ids, before)
    for at, token in enumerate(ids):
        found = told.explain(at, params)
        if found.token != token:  # only where the number falls on a border
            line, place = found.probs.cumsum(), int(found.ids.searchsorted(token))
            assert found.ids[place] == token
            assert min(abs(line[place] - found.uniform), abs(line[place] - found.probs[place] - found.uniform)) < 1e-5


@pytest.fixture(scope="module")
def llm():
    with exl2nb.demo(progress=None) as llm:
        yield llm


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_p": 0.9, "seed": 7},
        {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "seed": 3},
        {"mirostat": True, "mirostat_tau": 3.0, "seed": 11},
        {"dry_multiplier": 0.8, "xtc_probability": 0.5, "typical_p": 0.9, "seed": 2},
        {"temperature": 0},
    ],
    ids=lambda options: "-".join(options),
)
def test_it_is_what_the_engine_drew(llm, options):
    prompt = "It was a dark night, and the old man"
    done = llm.generate(prompt, max_tokens=20, return_logits=True, **options)
    told = Replay.of(done.logits, [t.id for t in done.tokens], llm.tokenizer.encode(prompt), tokenizer=llm.tokenizer)
    params = SamplingParams(**{"seed": done.seed, **options})
    assert [told.explain(at, params).token for at in range(len(told))] == [t.id for t in done.tokens]


def test_one_row_and_what_stood_before():
    row = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    told = Replay.of(row, [0, 0, 1], [2])
    assert len(told) == 4
    plain = told.explain(3, temperature=0)
    fined = told.explain(3, temperature=0, frequency_penalty=2.0)
    assert (plain.token, fined.token, plain.index) == (0, 2, 3)


def test_what_does_not_fit_is_named():
    rows = np.zeros((3, 5), np.float32)
    with pytest.raises(OptionError, match=r"shape \(3, 5\) beside 5 tokens"):
        Replay.of(rows, [1, 2, 3, 4, 0])
    told = Replay.of(rows, [1, 2, 3])
    with pytest.raises(OptionError, match="at is 3; expected 0 to 2"):
        told.explain(3)
    with pytest.raises(OptionError, match="token 9 is not in the model's vocabulary"):
        told.explain(0, banned_tokens=[9])
    with pytest.raises(OptionError, match="did you mean 'top_p'"):
        told.explain(0, topp=0.5)


def test_a_seed_is_kept():
    assert seeded(SamplingParams(seed=5)).seed == 5
    first, second = seeded(SamplingParams()), seeded(SamplingParams())
    assert first.seed != second.seed
    assert first.seed < 2**53, "a page can hold it exactly"
