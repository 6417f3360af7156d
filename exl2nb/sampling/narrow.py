"""Leave out tokens that the cuts would remove anyway, before the cuts run: on a vocabulary of 100 000 they then see a few hundred."""

from __future__ import annotations

import math

import numpy as np

from exl2nb.sampling.params import SamplingParams

SLACK = 1e-4  # of a logit: larger than the rounding by which the cuts themselves may differ from the bounds below
SMALL = 256  # candidates; narrowing costs more than it saves below this


def narrow(row: np.ndarray, params: SamplingParams) -> tuple[np.ndarray | None, float]:
    """Find a superset of the tokens that temperature, top_k, top_p and min_p keep.

    top_k keeps logits from the k-th largest on. n tokens of at most (1 - top_p) / V each weigh at most 1 - top_p together, so top_p removes
    them all. min_p keeps what lies within `-temperature * log(min_p)` of the largest.

    Args:
        row: f32 `(V,)` logits before temperature.
        params: not greedy.

    Returns:
        Ids in ascending order, or None for all; and the probability at `temperature` of what was left out, as top_p counts it: top_k comes
        before top_p and renormalises, so after top_k it is 0.
    """
    size = row.shape[0]
    if size <= SMALL:
        return None, 0.0
    if params.top_k > 0:
        if params.top_k >= size:
            return None, 0.0
        floor = float(np.partition(row, size - params.top_k)[size - params.top_k])
        return np.flatnonzero(row >= np.float32(floor - SLACK * max(1.0, abs(floor)))), 0.0
    if params.top_p >= 1.0 and params.min_p <= 0.0:
        return None, 0.0
    highest, heat = float(row.max()), params.temperature
    weights = np.exp((row - np.float32(highest)) * np.float32(1.0 / heat))
    total = float(weights.sum())
    floor = params.min_p * (1.0 - SLACK)  # as a share of the highest weight, which is 1
    if params.top_p < 1.0:
        floor = max(floor, (1.0 - params.top_p) / size * total * (1.0 - SLACK))
    ids = np.flatnonzero(weights >= np.float32(floor))
    if not len(ids) or not math.isfinite(total):
        return None, 0.0
    return ids, max(0.0, 1.0 - float(weights[ids].sum()) / total)
