"""DRY, don't repeat yourself: a token that would continue a repetition loses the more the longer that is."""

from __future__ import annotations

import numpy as np

MOST = 1e4  # of a logit; enough for any model, and far from overflow


def dry(
    logits: np.ndarray, ids: np.ndarray, *, multiplier: float, base: float, allowed_length: int, max_ngram: int, breakers: frozenset[int]
) -> np.ndarray:
    """Subtract `multiplier * base ** (n - allowed_length)` from a token whose choice would repeat n + 1 tokens, for n >= allowed_length.

    Args:
        logits: f32 `(V,)`.
        ids: int64 `(S,)`, prompt and text so far.
        multiplier: more than 0. base: at least 1. allowed_length: repetitions up to this long are free.
        max_ngram: n is counted up to here.
        breakers: tokens over which no repetition reaches, such as those of punctuation.

    Source: Weidmann, "DRY", text-generation-webui, 2024.
    """
    tokens, lengths = repetitions(ids, max_ngram, breakers)
    hit = lengths >= allowed_length
    if not hit.any():
        return logits
    tokens, lengths = tokens[hit], lengths[hit]
    longest = np.zeros(logits.shape[0], np.int64)
    np.maximum.at(longest, tokens, lengths)
    out = logits.copy()
    tokens = np.unique(tokens)
    exponents = (longest[tokens] - allowed_length).astype(np.float64)
    out[tokens] -= np.minimum(multiplier * np.exp(np.minimum(exponents * np.log(base), 600.0)), MOST).astype(np.float32)
    return out


def repetitions(ids: np.ndarray, max_ngram: int, breakers: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
    """For every earlier place of the last token: the token that came after it, and how many tokens before that equal the end of the text.

    Returns:
        Tokens and lengths `(n,)` int64; a token may stand there several times.

    Example: "1 2" at the end was followed by 3 when it stood there first.
        >>> tokens, lengths = repetitions(np.array([1, 2, 3, 1, 2]), 50, frozenset())
        >>> tokens.tolist(), lengths.tolist()
        ([3], [2])
    """
    size = len(ids)
    nothing = np.empty(0, np.int64)
    if size < 2 or int(ids[-1]) in breakers:
        return nothing, nothing
    places = np.flatnonzero(ids[:-1] == ids[-1])
    after = ids[places + 1]
    if breakers and len(places):
        free = np.array([int(t) not in breakers for t in after], bool)
        places, after = places[free], after[free]
    lengths = np.ones(len(places), np.int64)
    alive = np.arange(len(places))
    for n in range(1, min(max_ngram, size)):
        earlier = int(ids[size - 1 - n])
        alive = alive[places[alive] >= n]
        if earlier in breakers or not len(alive):
            break
        alive = alive[ids[places[alive] - n] == earlier]
        lengths[alive] = n + 1
    return after, lengths
