"""Min-p: a floor relative to the most probable token."""

from __future__ import annotations

import numpy as np


def min_p(logits: np.ndarray, share: float) -> np.ndarray:
    """Remove tokens less probable than `share` times the most probable one.

    Args:
        logits: f32 `(V,)`.
        share: 0 to 1.

    Returns:
        A copy with -inf where a token is removed; the most probable one always stays.
    """
    relative = np.exp(logits - logits.max())  # the sum of softmax cancels
    return np.where(relative < np.float32(share), np.float32(-np.inf), logits)
