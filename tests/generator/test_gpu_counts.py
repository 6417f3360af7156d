"""The counts that penalties on a device read are those of the text, the token in flight included. On the CPU; draws: test_gpu_draws."""

import random
from collections import Counter

import pytest
import torch

from exl2nb.generator.gpu_counts import IN_PROMPT, penalised, write_counts
from exl2nb.generator.stepper import Draw
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
