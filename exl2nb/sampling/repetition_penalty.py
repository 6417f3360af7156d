"""Repetition penalty: tokens that were there before become less likely."""

from __future__ import annotations

import numpy as np


def repetition_penalty(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    """Divide positive and multiply negative logits of seen tokens by `penalty`, once per token however often it was seen.

    Args:
        logits: f32 `(V,)`.
        seen: int64 `(n,)` ids of prompt and text so far; repeats do not matter.
        penalty: above 1 discourages, below 1 encourages.
    """
    values = logits[seen]
    out = logits.copy()
    out[seen] = np.where(values < 0, values * np.float32(penalty), values / np.float32(penalty))
    return out
