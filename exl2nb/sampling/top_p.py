"""Top-p (nucleus): the smallest set of most probable tokens that reaches probability p."""

from __future__ import annotations

import numpy as np


def top_p(logits: np.ndarray, p: float, *, left_out: float = 0.0) -> np.ndarray:
    """Remove the least probable tokens as long as their total stays at or below 1 - p; the token that crosses p is kept.

    Tokens as probable as the last one kept stay too, so the order of the vocabulary does not matter.

    Args:
        logits: f32 `(V,)`.
        p: more than 0, at most 1.
        left_out: probability of less probable tokens that `narrow` has taken away already; counts as removed.

    Returns:
        A copy with -inf where a token is removed; at least the most probable one stays.

    Example:
        >>> np.isfinite(top_p(np.log(np.float32([0.05, 0.5, 0.15, 0.3])), 0.6)).tolist()
        [False, True, False, True]
    """
    values = np.sort(logits)
    weights = np.exp(values - values[-1])
    below = weights.cumsum(dtype=np.float64)
    limit = (1.0 - p - left_out) / (1.0 - left_out) * below[-1]
    removed = min(int(below.searchsorted(limit, side="right")), len(values) - 1)
    return np.where(logits < values[removed], np.float32(-np.inf), logits)
