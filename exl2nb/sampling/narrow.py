"""Leave out tokens that the cuts would remove anyway, before the cuts run: on a vocabulary of 100 000 they then see a few hundred."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from exl2nb.sampling.scratch import weights_of

if TYPE_CHECKING:
    from exl2nb.sampling.params import SamplingParams
    from exl2nb.sampling.plan import Bounds

SLACK = 1e-4  # of a logit: larger than the rounding by which the cuts themselves may differ from the bounds below
SMALL = 256  # candidates; narrowing costs more than it saves below this


def narrow(row: np.ndarray, bounds: Bounds | SamplingParams) -> tuple[np.ndarray | None, float]:
    """Find a superset of the tokens that temperature, top_k, top_p, top_a and min_p, following each other, keep.

    top_k keeps logits from the k-th largest on. n tokens of at most (1 - top_p) / V each weigh at most 1 - top_p together, so top_p removes
    them all. min_p keeps what lies within `-temperature * log(min_p)` of the largest. top_a keeps nothing below `top_a` times the square of
    the largest probability, which cuts before it can only raise.

    Args:
        row: f32 `(V,)` logits before temperature.
        bounds: the settings of these cuts; not greedy.

    Returns:
        Ids in ascending order, or None for all; and the probability at `temperature` of what was left out, as top_p counts it: top_k comes
        before top_p and renormalises, so after top_k it is 0.
    """
    size = row.shape[0]
    if size <= SMALL:
        return None, 0.0
    if bounds.top_k > 0:
        if bounds.top_k >= size:
            return None, 0.0
        floor = float(np.partition(row, size - bounds.top_k)[size - bounds.top_k])
        return np.flatnonzero(row >= np.float32(floor - SLACK * max(1.0, abs(floor)))), 0.0
    if bounds.top_p >= 1.0 and bounds.min_p <= 0.0 and bounds.top_a <= 0.0:
        return None, 0.0
    highest, heat = float(row.max()), bounds.temperature
    weights = weights_of(row, highest, min(1.0 / heat, 1e30))
    total = float(weights.sum())
    floor = max(bounds.min_p, bounds.top_a / total if total > 0 else 0.0) * (1.0 - SLACK)  # as a share of the highest weight, which is 1
    if bounds.top_p < 1.0:
        if bounds.top_a > 0.0:  # it counts what top_p leaves: tokens that top_p would have kept must not be missing
            floor = 0.0
        floor = max(floor, (1.0 - bounds.top_p) / size * total * (1.0 - SLACK))
    ids = np.flatnonzero(weights >= np.float32(floor))
    if not len(ids) or not math.isfinite(total):
        return None, 0.0
    return ids, max(0.0, 1.0 - float(weights[ids].sum()) / total)
