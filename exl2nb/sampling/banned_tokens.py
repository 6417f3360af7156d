"""Tokens that must not be chosen, and tokens that alone may be."""

from __future__ import annotations

import numpy as np


def ban(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """A copy with -inf at `ids` (int64)."""
    out = logits.copy()
    out[ids] = -np.inf
    return out


def allow(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """A copy with -inf everywhere but at `ids` (int64)."""
    out = np.full_like(logits, -np.inf)
    out[ids] = logits[ids]
    return out
