"""XTC, exclude top choices: now and then leave out all the obvious tokens but the least obvious of them."""

from __future__ import annotations

import numpy as np


def xtc(logits: np.ndarray, probability: float, threshold: float, protected: np.ndarray | None = None) -> np.ndarray:
    """Mix two distributions: with `probability` the one without the top choices, otherwise the given one.

    The top choices are the tokens of at least `threshold`, except the least probable of them. Flipping a coin per token and drawing from
    one of the two is the same as drawing from their mixture, which needs no second random number and can be looked at.

    Args:
        logits: f32 `(V,)`.
        probability: of leaving them out, 0 to 1.
        threshold: probability from which on a token is a top choice; above 0.5 there is never more than one, so nothing happens.
        protected: ids that are never left out (end of text, line breaks).

    Returns:
        Logits of the mixture, up to a constant; -inf where a token is removed for certain.

    Source: "Exclude Top Choices", text-generation-webui, 2024.

    Example:
        >>> mixed = xtc(np.log(np.float32([0.05, 0.5, 0.15, 0.3])), 1.0, 0.1)
        >>> (np.exp(mixed) / np.exp(mixed).sum()).round(3).tolist()
        [0.25, 0.0, 0.75, 0.0]
    """
    weights = np.exp((logits - logits.max()).astype(np.float64))
    probs = weights / weights.sum()
    top = (probs >= threshold) & (logits > -np.inf)
    if protected is not None and len(protected):
        top[protected] = False
    if np.count_nonzero(top) < 2:
        return logits
    removed = top & (probs > probs[top].min())
    if not removed.any():
        return logits
    with np.errstate(divide="ignore"):
        less = np.float32(np.log(1.0 - probability))
    more = np.float32(np.log(1.0 - probability + probability / float(probs[~removed].sum())))
    return logits + np.where(removed, less, more)
