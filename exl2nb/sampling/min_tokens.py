"""Minimum length: the tokens that end a text are masked until it is reached."""

from __future__ import annotations

import numpy as np


def not_yet(logits: np.ndarray, end_ids: np.ndarray) -> np.ndarray:
    """A copy with -inf at `end_ids` (int64), unless nothing would be left: a grammar that is complete has nothing but the end."""
    out = logits.copy()
    out[end_ids] = -np.inf
    return out if out.max() > -np.inf else logits
