"""Temperature: flatter or sharper."""

from __future__ import annotations

import numpy as np

COLD = 1e-30  # below it quotients leave f32: then those below the highest are as far away from it as f32 can say


def temperature(logits: np.ndarray, value: float) -> np.ndarray:
    """Divide by the temperature.

    Args:
        logits: f32 `(V,)`.
        value: more than 0; below 1 sharpens, above 1 flattens.
    """
    assert value > 0, value
    if value >= COLD:
        return logits / np.float32(value)
    highest = logits.max().astype(np.float64)
    with np.errstate(over="ignore"):
        apart = np.where(logits == highest, 0.0, (logits - highest) / value)
    return np.where(np.isneginf(logits), -np.inf, np.maximum(apart, np.finfo(np.float32).min)).astype(np.float32)
