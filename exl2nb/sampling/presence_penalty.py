"""Presence and frequency penalty: tokens of the new text lose a constant, once or for every time they occurred."""

from __future__ import annotations

import numpy as np


def subtract(logits: np.ndarray, ids: np.ndarray, amounts: np.ndarray | float) -> np.ndarray:
    """Subtract from the logits of `ids`, which are all different.

    Presence penalty: amount = beta (times its strength, where penalties fade). Frequency penalty: amount = alpha * count.

    Args:
        logits: f32 `(V,)`.
        ids: int64 `(n,)`.
        amounts: one number, or f64 `(n,)`.

    Source: presence_penalty and frequency_penalty of OpenAI's API, which count sampled tokens and not the prompt.
    """
    out = logits.copy()
    out[ids] -= np.asarray(amounts, np.float32)
    return out
