"""Dynamic temperature: the less sure the model is, the higher the temperature."""

from __future__ import annotations

import numpy as np

LEAST = 1e-3  # a temperature of 0 has no quotient; this one is greedy but for ties


def dynamic_temperature(logits: np.ndarray, low: float, high: float, exponent: float) -> np.ndarray:
    """Divide by `entropy_temperature` of the tokens that are left.

    Args:
        logits: f32 `(V,)`.
        low: temperature where one token has all the probability.
        high: temperature where all tokens left are equally probable.
        exponent: of the share of entropy between the two.
    """
    return logits / np.float32(entropy_temperature(logits, low, high, exponent))


def entropy_temperature(logits: np.ndarray, low: float, high: float, exponent: float) -> float:
    """`low + (high - low) * (H / log n) ** exponent` with the entropy H of the n tokens left, at least `LEAST`.

    Source: dynamic temperature sampling as in KoboldCpp and text-generation-webui.

    Example:
        >>> entropy_temperature(np.float32([0, 0, -np.inf]), 0.5, 1.5, 1.0)
        1.5
    """
    alive = logits[logits > -np.inf].astype(np.float64)
    if len(alive) < 2:
        return max(low, LEAST)
    shifted = alive - alive.max()
    weights = np.exp(shifted)
    total = weights.sum()
    entropy = np.log(total) - float((weights * shifted).sum() / total)
    share = min(1.0, max(0.0, float(entropy / np.log(len(alive)))))
    return max(low + (high - low) * share**exponent, LEAST)
