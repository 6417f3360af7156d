"""Tail-free sampling: cut where the curve of sorted probabilities has become flat."""

from __future__ import annotations

import numpy as np


def tail_free(logits: np.ndarray, z: float) -> np.ndarray:
    """Keep the tokens before the share `z` of the curvature of the sorted probabilities is used up.

    With probabilities p sorted from high to low, the curvature at i is `|p[i] - 2 p[i + 1] + p[i + 2]|`, normalised to a sum of 1. Token 0
    stays, token i + 1 stays while the sum up to curvature i is at most z. Fewer than three tokens, or a straight line, are left alone; so
    are tokens as probable as the last one kept.

    Args:
        logits: f32 `(V,)`.
        z: more than 0, at most 1.

    Returns:
        A copy with -inf where a token is removed.

    Source: Bricken, "Tail Free Sampling", 2019, with the cut centred as in its reference code.
    """
    values = np.sort(logits[logits > -np.inf])[::-1]
    if len(values) < 3:
        return logits.copy()
    probs = np.exp(values.astype(np.float64) - values[0])
    curvature = np.abs(np.diff(probs, 2))
    total = float(curvature.sum())
    if total <= 1e-12 * probs[0]:
        return logits.copy()
    kept = 1 + int((curvature.cumsum() / total).searchsorted(z, side="right"))
    return np.where(logits < values[min(kept, len(values) - 1) - 1], np.float32(-np.inf), logits)
