"""Repetition penalty: tokens that were there before become less likely."""

from __future__ import annotations

import numpy as np


def repetition_penalty(logits: np.ndarray, seen: np.ndarray, penalty: float, strength: np.ndarray | None = None) -> np.ndarray:
    """Divide positive and multiply negative logits of seen tokens by `penalty`, once per token however often it was seen.

    Args:
        logits: f32 `(V,)`.
        seen: int64 `(n,)` ids of prompt and text so far; without `strength`, repeats do not matter.
        penalty: above 1 discourages, below 1 encourages.
        strength: f64 `(n,)` from 0 (no penalty) to 1, for ids that are all different.

    Source: Keskar et al., "CTRL", 2019; RepetitionPenaltyLogitsProcessor of Transformers.
    """
    factor = np.float32(penalty) if strength is None else (1.0 + (penalty - 1.0) * strength).astype(np.float32)
    values = logits[seen]
    out = logits.copy()
    out[seen] = np.where(values < 0, values * factor, values / factor)
    return out
