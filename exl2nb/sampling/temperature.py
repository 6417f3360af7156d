"""Temperature: flatter or sharper."""

from __future__ import annotations

from torch import Tensor


def temperature(logits: Tensor, value: float) -> Tensor:
    """Divide by the temperature.

    Args:
        logits: f32 `(..., V)`.
        value: more than 0; below 1 sharpens, above 1 flattens.
    """
    assert value > 0, value
    return logits / value
