"""Locally typical sampling: keep the tokens whose surprise is nearest to the surprise expected."""

from __future__ import annotations

import numpy as np


def typical(logits: np.ndarray, mass: float) -> np.ndarray:
    """Sort tokens by `| -log p - H |`, H the entropy, and keep them until their probability reaches `mass`, the crossing one included.

    Tokens as far away as the last one kept stay too, so the order of the vocabulary does not matter. The most probable token may go.

    Args:
        logits: f32 `(V,)`.
        mass: more than 0, at most 1.

    Returns:
        A copy with -inf where a token is removed; at least one stays.

    Source: Meister et al., "Locally Typical Sampling", 2022; TypicalLogitsWarper of Transformers.

    Example: the entropy is 1.14 nats, that of a token of probability 0.32.
        >>> np.isfinite(typical(np.log(np.float32([0.5, 0.3, 0.15, 0.05])), 0.6)).tolist()
        [True, True, False, False]
    """
    alive = np.flatnonzero(logits > -np.inf)
    shifted = logits[alive].astype(np.float64)
    shifted -= shifted.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    entropy = np.log(total) - float((weights * shifted).sum()) / total
    probs = weights / total
    # Tokens this improbable lie further from H than any probable one and weigh less than 1 - mass together: no need to sort them.
    few = np.flatnonzero(probs >= min((1.0 - mass) / len(probs), np.exp(-2.0 * entropy)) * 0.999)
    distance = np.abs(np.log(total) - shifted[few] - entropy)
    order = distance.argsort(kind="stable")
    reached = int(probs[few][order].cumsum().searchsorted(mass, side="left"))
    limit = distance[order[min(reached, len(order) - 1)]]
    out = np.full_like(logits, -np.inf)
    kept = alive[few[distance <= limit]]
    out[kept] = logits[kept]
    return out
