"""Masks and penalties: pure functions on a row of raw logits, f32 `(V,)`. A greedy request uses them too. Knows no request."""

from __future__ import annotations

import numpy as np

DRY_MAX_PENALTY = 1e4  # of a logit; enough for any model, and far from overflow


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


def mask_ends(logits: np.ndarray, end_ids: np.ndarray) -> np.ndarray:
    """A copy with -inf at `end_ids` (int64), unless nothing would be left: a grammar that is complete has nothing but the end."""
    out = logits.copy()
    out[end_ids] = -np.inf
    return out if out.max() > -np.inf else logits


def logit_bias(logits: np.ndarray, ids: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A copy with `bias` (f32) added at `ids` (int64, all different)."""
    out = logits.copy()
    out[ids] += bias
    return out


def repetition_penalty(logits: np.ndarray, seen: np.ndarray, penalty: float, strength: np.ndarray | None = None) -> np.ndarray:
    """Divide positive and multiply negative logits of seen tokens by `penalty`, once per token however often it was seen.

    Args:
        seen: int64 `(n,)` ids of prompt and text so far; without `strength`, repeats do not matter.
        penalty: above 1 discourages, below 1 encourages.
        strength: f64 `(n,)` from 0 (no penalty) to 1, for ids that are all different.

    Source: Keskar et al., "CTRL", 2019; RepetitionPenaltyLogitsProcessor of Transformers.
    """
    factor = np.float32(penalty) if strength is None else (1.0 + (penalty - 1.0) * strength).astype(np.float32)
    values = logits[seen]
    out = logits.copy()
    out[seen] = np.where(values < 0, values * factor, values / factor)
    return out


def subtract(logits: np.ndarray, ids: np.ndarray, amounts: np.ndarray | float) -> np.ndarray:
    """Subtract from the logits of `ids`, which are all different.

    Presence penalty: amount = beta (times its strength, where penalties fade). Frequency penalty: amount = alpha * count.

    Args:
        ids: int64 `(n,)`.
        amounts: one number, or f64 `(n,)`.

    Source: presence_penalty and frequency_penalty of OpenAI's API, which count sampled tokens and not the prompt.
    """
    out = logits.copy()
    out[ids] -= np.asarray(amounts, np.float32)
    return out


def fading(distance: np.ndarray, reach: int, decay: int) -> np.ndarray:
    """Strength of a penalty for a token `distance` (1 = the last one) ago: 1 up to `reach`, then linearly down to 0 after `decay` more.

    Example:
        >>> fading(np.array([1, 2, 3, 4, 5]), 2, 2).round(2).tolist()
        [1.0, 1.0, 0.67, 0.33, 0.0]
    """
    return np.clip((reach + decay + 1 - distance) / (decay + 1), 0.0, 1.0)


def faded(ids: np.ndarray, reach: int, decay: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens that penalties count in a text: the last `reach`, and fading over `decay` earlier ones.

    Returns:
        Distinct ids; the strength of the latest occurrence of each; the sum of strengths over all its occurrences.
    """
    window = ids[max(0, len(ids) - reach - decay) :][::-1]
    found, first, inverse = np.unique(window, return_index=True, return_inverse=True)
    strength = fading(np.arange(1, len(window) + 1), reach, decay)
    return found, strength[first], np.bincount(inverse.reshape(-1), strength, len(found))


def dry(
    logits: np.ndarray, ids: np.ndarray, *, multiplier: float, base: float, allowed_length: int, max_ngram: int, breakers: frozenset[int]
) -> np.ndarray:
    """Subtract `multiplier * base ** (n - allowed_length)` from a token whose choice would repeat n + 1 tokens, for n >= allowed_length.

    Args:
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
    out[tokens] -= np.minimum(multiplier * np.exp(np.minimum(exponents * np.log(base), 600.0)), DRY_MAX_PENALTY).astype(np.float32)
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
