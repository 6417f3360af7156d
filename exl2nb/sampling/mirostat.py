"""Mirostat 2: a floor on probability that moves so that the text stays at a chosen surprise per token."""

from __future__ import annotations

import numpy as np


def mirostat(logits: np.ndarray, mu: float) -> np.ndarray:
    """Remove tokens whose surprise `-log2 p` is above `mu`.

    Args:
        logits: f32 `(V,)`.
        mu: bits; of the request's state, see `next_mu`.

    Returns:
        A copy with -inf where a token is removed; the most probable one always stays.

    Source: Basu et al., "Mirostat", 2021; version 2 of the authors' code.
    """
    relative = np.exp(logits - logits.max())
    floor = min(2.0**-mu * float(relative.sum(dtype=np.float64)), 1.0)
    return np.where(relative < np.float32(floor), np.float32(-np.inf), logits)


def next_mu(mu: float, prob: float, tau: float, eta: float) -> float:
    """The limit after a token whose probability, among those it was drawn from, was `prob`: `mu - eta * (-log2(prob) - tau)`.

    Example:
        >>> next_mu(10.0, 0.25, 5.0, 0.1)
        10.3
    """
    return mu - eta * (-float(np.log2(max(prob, 1e-300))) - tau)
