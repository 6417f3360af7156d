"""Logit bias: chosen tokens become more or less likely by a constant."""

from __future__ import annotations

import numpy as np


def logit_bias(logits: np.ndarray, ids: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A copy with `bias` (f32) added at `ids` (int64, all different)."""
    out = logits.copy()
    out[ids] += bias
    return out
