"""Each filter once more, in float64 NumPy, written from its definition and not from the code under test."""

import numpy as np


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def temperature(x, value):
    return x / value


def top_k(x, k):
    kth = np.sort(x)[::-1][min(k, len(x)) - 1]
    return np.where(x >= kth, x, -np.inf)


def top_p(x, p):
    """Walk from the most probable token down until the total before the token has reached p."""
    probs, kept, total = softmax(x), np.zeros(len(x), bool), 0.0
    for i in np.argsort(-x, kind="stable"):
        if total >= p and kept.any():
            break
        kept[i] = True
        total += probs[i]
    return np.where(kept, x, -np.inf)


def min_p(x, share):
    probs = softmax(x)
    return np.where(probs >= share * probs.max(), x, -np.inf)


def repetition_penalty(x, seen, penalty):
    out = x.copy()
    for i in set(seen):
        out[i] = x[i] * penalty if x[i] < 0 else x[i] / penalty
    return out


def chain(x, params, seen):
    """All filters in the order of Transformers."""
    x = x.astype(np.float64)
    if params.repetition_penalty != 1.0:
        x = repetition_penalty(x, seen, params.repetition_penalty)
    if params.greedy:
        return x
    x = temperature(x, params.temperature)
    if params.top_k:
        x = top_k(x, params.top_k)
    if params.top_p < 1:
        x = top_p(x, params.top_p)
    if params.min_p:
        x = min_p(x, params.min_p)
    return x
