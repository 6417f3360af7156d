"""Top-k: the k most probable tokens."""

from __future__ import annotations

import numpy as np


def top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Remove every token whose logit is below the k-th largest; tokens equal to it stay, so ties may keep more than k.

    Args:
        logits: f32 `(V,)`.
        k: at least 1; more than V keeps all.

    Returns:
        A copy with -inf where a token is removed.

    Example:
        >>> top_k(np.float32([1, 3, 3, 0]), 1).tolist()
        [-inf, 3.0, 3.0, -inf]
    """
    assert k >= 1, k
    at = max(0, logits.shape[0] - k)
    return np.where(logits < np.partition(logits, at)[at], np.float32(-np.inf), logits)
