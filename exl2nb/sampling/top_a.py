"""Top-a: a floor that falls with the square of the best probability."""

from __future__ import annotations

import numpy as np


def top_a(logits: np.ndarray, a: float, *, left_out: float = 0.0) -> np.ndarray:
    """Remove tokens less probable than `a` times the square of the highest probability.

    Args:
        logits: f32 `(V,)`.
        a: 0 to 1.
        left_out: probability of less probable tokens that `narrow` has taken away already; counts as removed.

    Returns:
        A copy with -inf where a token is removed; the most probable one always stays.

    Source: KoboldAI's top-a sampling, after BlinkDL.

    Example: the floor is 0.5 * 0.5**2 = 0.125.
        >>> np.isfinite(top_a(np.log(np.float32([0.5, 0.3, 0.15, 0.05])), 0.5)).tolist()
        [True, True, True, False]
    """
    relative = np.exp(logits - logits.max())
    total = float(relative.sum(dtype=np.float64)) / (1.0 - left_out)
    return np.where(relative < np.float32(a / total), np.float32(-np.inf), logits)
