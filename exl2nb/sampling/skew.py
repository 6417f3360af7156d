"""Skew: draw towards the less or the more probable tokens without removing any."""

from __future__ import annotations

import numpy as np


def skew(logits: np.ndarray, value: float) -> np.ndarray:
    """Raise the cumulative distribution over tokens sorted from high to low to the power `exp(value)`.

    That is the distribution one gets from drawing with `u ** exp(-value)` in place of a uniform u from the sorted tokens, written as
    probabilities, so that the draw itself stays what it is. Positive values favour the less probable. Tokens of the same probability
    count in order of id.

    Args:
        logits: f32 `(V,)`.
        value: 0 changes nothing.

    Example:
        >>> np.exp(skew(np.log(np.float32([0.5, 0.5])), np.log(2))).round(3).tolist()
        [0.25, 0.75]
    """
    alive = np.flatnonzero(logits > -np.inf)
    order = alive[np.argsort(-logits[alive], kind="stable")]
    weights = np.exp((logits[order] - logits[order[0]]).astype(np.float64))
    power = np.exp(value)
    total = weights.sum()
    below = np.concatenate(([0.0], weights.cumsum() / total))
    below[-1] = 1.0
    # F**k - (F - p)**k, by way of p / F: exact also where the two are nearly equal
    share = np.minimum(weights / total / below[1:], 1.0)
    with np.errstate(divide="ignore"):
        new = power * np.log(below[1:]) + np.log(-np.expm1(power * np.log1p(-share)))
    out = np.full_like(logits, -np.inf)
    out[order] = new
    return out
