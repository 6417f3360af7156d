"""From a filtered row to a token: the random number, the draw, and what is reported about the token.

Random numbers come by counter: number `i` of a seed is a function of (seed, i) alone, so a request draws the same tokens whatever else runs
in its batch.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import numpy as np

from exl2nb.core.errors import GenerationError

BLOCK_TOKENS = 512  # tokens; one cumulative sum over the blocks and one inside the block that was hit
_U64_MASK = 2**64 - 1
_local = threading.local()


def uniform(seed: int, index: int) -> float:
    """Number `index` of the stream `seed`: a float in [0, 1) with 53 random bits.

    Source: the splitmix64 finaliser (Steele, Lea and Flood, 2014) over the mixed seed plus index steps of the golden ratio.

    Example:
        >>> uniform(1, 0) == uniform(1, 0) != uniform(1, 1)
        True
    """
    return (_mix((_mix(seed & _U64_MASK) + (index + 1) * 0x9E3779B97F4A7C15) & _U64_MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64_MASK
    return z ^ (z >> 31)


def weights_of(logits: np.ndarray, highest: np.floating | float, scale: float = 1.0) -> np.ndarray:
    """`exp((logits - highest) * scale)`, f32 `(n,)`. The next call on this thread overwrites it: use it at once."""
    size = logits.shape[0]
    buffer = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.buffer = np.empty(size, np.float32)
    out = buffer[:size]
    np.subtract(logits, np.float32(highest), out=out)
    if scale != 1.0:
        np.multiply(out, np.float32(scale), out=out)
    return np.exp(out, out=out)


def inverse_cdf(logits: np.ndarray, uniform: float) -> int:
    """The index at which the cumulative probability of softmax(logits), in order of ids, passes `uniform` in [0, 1)."""
    highest = logits.max()
    check_left(highest)
    weights = weights_of(logits, highest)
    first, before = 0, 0.0
    if len(weights) > BLOCK_TOKENS:
        sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK_TOKENS), dtype=np.float64).cumsum()
        target = uniform * float(sums[-1])
        block = min(int(sums.searchsorted(target, side="right")), len(sums) - 1)
        first, before = block * BLOCK_TOKENS, float(sums[block - 1]) if block else 0.0
        inner = weights[first : first + BLOCK_TOKENS].cumsum(dtype=np.float64)
    else:
        inner = weights.cumsum(dtype=np.float64)
        target = uniform * float(inner[-1])
    index = int(inner.searchsorted(target - before, side="right"))
    if index == len(inner):  # rounding points past the end: the last token that has any probability
        index = int(inner.searchsorted(inner[-1]))
    return first + index


def prob_of(logits: np.ndarray, index: int) -> float:
    """The probability of one place under softmax(logits)."""
    weights = weights_of(logits, logits.max())
    return float(weights[index]) / float(weights.sum(dtype=np.float64))


def check_left(highest: np.floating) -> None:
    """Raise GenerationError where the best logit says that every token is excluded."""
    if highest == -np.inf:
        raise GenerationError(
            "no token is left to choose from: allowed_tokens, banned_tokens and the structure exclude every one; loosen one of them"
        )


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
