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
    return logits / np.float32(value)
