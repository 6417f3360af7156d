"""The counts and biases that a device reads are those of the text, the token in flight included. On the CPU; draws: test_gpu_draws."""

import random
from collections import Counter

import pytest
import torch

from exl2nb.generator.executor import Draw
from exl2nb.generator.gpu_executor import IN_PROMPT, biased, penalised, writable, write_bias, write_counts
from exl2nb.sampling.filters import WHOLE
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.state import SamplerState


@pytest.mark.parametrize("seed", range(5))
def test_counts(seed):
    chance = random.Random(seed)
    params = [{"repetition_penalty": 1.2}, {}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.1, "temperature": 0}]
    draws, wanted = [], torch.zeros(5, 50, dtype=torch.int16)
    for row, kwargs in enumerate(params):
        prompt, new = chance.choices(range(50), k=chance.randrange(1, 30)), chance.choices(range(50), k=chance.randrange(30))
        state = SamplerState(SamplingParams(**kwargs), prompt)
        for token in new:
            state.push(token)
        draws.append(Draw(state, len(new), 0))
        assert penalised(state.params) == bool(kwargs)
        if kwargs:
            for token, times in Counter(new).items():
                wanted[row, token] += times
            for token in set(prompt):
                wanted[row, token] += IN_PROMPT
    counts = torch.full((5, 50), 9, dtype=torch.int16)
    write_counts(counts, draws, ([0, 2], torch.tensor([7, 9], dtype=torch.int32)))
    wanted[0, 7] += 1
    wanted[2, 9] += 1
    assert torch.equal(counts, wanted)


def test_nothing_to_count():
    counts = torch.ones(2, 8, dtype=torch.int16)
    write_counts(counts, [Draw(SamplerState(SamplingParams(), [1]), 0, 0)], None)
    assert not counts.any()


def test_bias_is_what_masks_and_logit_bias_do():
    """Row by row: masks first, then penalties, then the bias, as the host's chain has them."""
    kinds = [
        {},
        {"banned_tokens": [3, 7, 49]},
        {"logit_bias": {0: 1.5, 7: -2.0}},
        {"allowed_tokens": [1, 2, 30], "logit_bias": {2: 0.25, 9: 4.0}},
        {"banned_tokens": [9], "logit_bias": {9: 5.0, 10: 1.0}, "temperature": 0},
    ]
    states = [SamplerState(SamplingParams(**kwargs)) for kwargs in kinds]
    bias = torch.full((6, 50), 9.0)
    write_bias(bias, [Draw(state, 0, 0) for state in states])
    row = torch.linspace(-2, 2, 50)
    for r, (state, kwargs) in enumerate(zip(states, kinds)):
        assert biased(state.params) == bool(kwargs)
        wanted = row.numpy()
        for link in state.recipe.first:
            wanted = link.apply(wanted, state, WHOLE)
        assert torch.equal(row + bias[r], torch.from_numpy(wanted))
    assert not bias[5].any()


def test_what_a_device_must_not_be_given():
    assert writable(SamplingParams(banned_tokens=[49], logit_bias={3: 1.0}), 50)
    assert not writable(SamplingParams(banned_tokens=[50]), 50)
    assert not writable(SamplingParams(logit_bias={50: 1.0}), 50)
    assert not writable(SamplingParams(allowed_tokens=[50]), 50)
    assert not writable(SamplingParams(banned_tokens=range(50)), 50)
