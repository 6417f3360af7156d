"""What the sampling kernel reads beside logits, on the GPU: how often each token stands in a text, and what is added to its logit."""

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
BIASES = frozenset(("logit_bias", "banned_tokens", "allowed_tokens"))
IN_PROMPT = -(1 << 15)  # added to the count of a token that stands in the prompt


def penalised(params: SamplingParams) -> bool:
    """Whether a request's draws depend on what was drawn before."""
    return not PENALTIES.isdisjoint(params.changed)


def biased(params: SamplingParams) -> bool:
    """Whether a request adds to logits, or takes tokens out, whatever was drawn before."""
    return bool(params.logit_bias or params.banned_tokens or params.allowed_tokens)


def writable(params: SamplingParams, vocab_size: int) -> bool:
    """Whether `write_bias` can write a request: its ids are the model's, and they do not rule out every token."""
    ids = (*params.banned_tokens, *params.allowed_tokens, *(i for i, _ in params.logit_bias))
    return max(ids, default=0) < vocab_size and len(params.banned_tokens) < vocab_size


def write_bias(bias: Tensor, draws: Sequence[Draw]) -> None:
    """Write what is added to the logits of requests.

    Args:
        bias: f32 `(R, V)` on the GPU; 0 for rows without, -inf for tokens that are out.
        draws: of the first rows.
    """
    bias.zero_()
    rows, ids, values = [], [], []
    for row, (state, _, _) in enumerate(draws):
        params = state.params
        added = dict(params.logit_bias)
        if params.allowed_tokens:
            bias[row].fill_(-torch.inf)
            added = {i: added.get(i, 0.0) for i in params.allowed_tokens}
        added.update(dict.fromkeys(params.banned_tokens, -torch.inf))
        rows += [row] * len(added)
        ids += added.keys()
        values += added.values()
    if rows:
        places, amounts = torch.tensor([rows, ids]), torch.tensor(values, dtype=torch.float32)
        if bias.is_cuda:
            places, amounts = places.pin_memory(), amounts.pin_memory()
        at = places.to(bias.device, non_blocking=True)
        bias[at[0], at[1]] = amounts.to(bias.device, non_blocking=True)


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
