"""How often each token stands in the texts of a step, on the GPU: what the sampling kernel's penalties read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from exl2nb.generator.stepper import Draw

if TYPE_CHECKING:
    from exl2nb.sampling.params import SamplingParams

PENALTIES = frozenset(("repetition_penalty", "presence_penalty", "frequency_penalty"))
IN_PROMPT = -(1 << 15)  # added to the count of a token that stands in the prompt


def penalised(params: SamplingParams) -> bool:
    """Whether a request's draws depend on what was drawn before."""
    return not PENALTIES.isdisjoint(params.changed)


def write_counts(counts: Tensor, draws: Sequence[Draw], fresh: tuple[Sequence[int], Tensor] | None) -> None:
    """Count the texts of requests anew.

    Args:
        counts: int16 `(R, V)` on the GPU; rows without penalties become 0.
        draws: of the first rows.
        fresh: rows whose last token only the GPU knows, and those tokens, int32 on the GPU.
    """
    counts.zero_()
    rows: list[np.ndarray] = []
    for row, (state, _, _) in enumerate(draws):
        if not penalised(state.params):
            continue
        ids, times = np.unique(state.history.new_ids, return_counts=True)
        before = np.unique(state.history.ids[: state.history.prompt_length])
        every = np.union1d(ids, before)
        values = np.where(np.isin(every, before), IN_PROMPT, 0)
        values[every.searchsorted(ids)] += np.minimum(times, 0x7FFF)
        rows.append(np.stack([np.full_like(every, row), every, values]))
    if rows:
        places = torch.from_numpy(np.concatenate(rows, axis=1))
        places = (places.pin_memory() if counts.is_cuda else places).to(counts.device, non_blocking=True)
        counts[places[0], places[1]] = places[2].to(torch.int16)
    if fresh is not None and len(fresh[0]):
        at, tokens = torch.tensor(fresh[0], device=counts.device), fresh[1].long()
        counts[at, tokens] += 1
