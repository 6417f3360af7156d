"""What is told about a chosen token: its log probability, its rank and the best alternatives, all before any filter."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from exl2nb.core.errors import GenerationError
from exl2nb.sampling.scratch import weights_of


class Sampled(NamedTuple):
    """One choice. logprob: natural log of the unfiltered probability. rank: 1 = the most probable. top: (id, logprob), best first."""

    id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def highest_logit(row: np.ndarray) -> np.floating:
    """The largest logit.

    Raises:
        GenerationError: the row has no distribution (NaN, +inf, or nothing but -inf).
    """
    highest = row.max()
    if not np.isfinite(highest):
        raise GenerationError(f"the model's largest logit is {float(highest)}; expected finite numbers: check the weights")
    return highest


def report(row: np.ndarray, highest: np.floating, token: int, top: int) -> Sampled:
    """Describe `token` under softmax(row).

    Args:
        row: f32 `(V,)`, raw logits.
        highest: the largest of them.
        token: the chosen id.
        top: how many alternatives to list; ties are listed in order of id.
    """
    log_total = float(highest) + math.log(float(weights_of(row, highest).sum()))
    value = row[token]
    rank = 1 if value == highest else int(np.count_nonzero(row > value)) + 1
    return Sampled(int(token), float(value) - log_total, rank, alternatives(row, log_total, top))


def alternatives(row: np.ndarray, log_total: float, top: int) -> tuple[tuple[int, float], ...]:
    """The `top` most probable ids of a row and their log probabilities; log_total: what is subtracted from a logit."""
    if top <= 0:
        return ()
    top = min(top, row.shape[0])
    floor = np.partition(row, row.shape[0] - top)[row.shape[0] - top]
    ids = np.flatnonzero(row >= floor)
    ids = ids[np.lexsort((ids, -row[ids]))][:top]
    return tuple((int(i), float(row[i]) - log_total) for i in ids)
