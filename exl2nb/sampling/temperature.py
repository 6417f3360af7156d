"""Temperature: flatter or sharper."""

from __future__ import annotations

import numpy as np


def temperature(logits: np.ndarray, value: float) -> np.ndarray:
    """Divide by the temperature.

    Args:
        logits: f32 `(V,)`.
        value: more than 0; below 1 sharpens, above 1 flattens.
    """
    assert value > 0, value
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        made = logits / np.float32(value)
    if np.isfinite(made).sum() == np.isfinite(logits).sum():
        return made
    highest = logits.max().astype(np.float64)  # so cold that numbers leave f32: those below the highest are as far away as it can say
    with np.errstate(over="ignore", invalid="ignore"):
        apart = np.where(logits == highest, 0.0, (logits - highest) / value)
    return np.where(np.isneginf(logits), -np.inf, np.maximum(apart, np.finfo(np.float32).min)).astype(np.float32)
