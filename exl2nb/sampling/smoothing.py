"""Quadratic smoothing: logits fall off from the best one as a parabola, so near rivals come closer and far ones vanish."""

from __future__ import annotations

import numpy as np


def smoothing(logits: np.ndarray, factor: float, curve: float = 1.0) -> np.ndarray:
    """Replace a logit that lies d >= 0 below the highest by `-factor * (k * d**2 + s * d**3)`, k = (3 - curve) / 2, s = (curve - 1) / 2.

    Ranks do not change, and the best token becomes 0.

    Args:
        logits: f32 `(V,)`.
        factor: more than 0; larger is sharper.
        curve: 1 (a pure parabola) to 3 (a pure cubic).

    Source: smoothing_factor and smoothing_curve of text-generation-webui.

    Example:
        >>> smoothing(np.float32([3, 2, 1]), 0.5).tolist()
        [-0.0, -0.5, -2.0]
    """
    depth = logits.max() - logits
    k, s = np.float32(factor * (3.0 - curve) / 2.0), np.float32(factor * (curve - 1.0) / 2.0)
    bent = depth * depth
    bent *= k + s * depth if s else k
    return np.negative(bent, out=bent)
