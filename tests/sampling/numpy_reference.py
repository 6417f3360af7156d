"""Each filter once more, in float64 NumPy, written from its definition and not from the code under test. Slow and plain on purpose."""

import math

import numpy as np


def softmax(x):
    x = np.asarray(x, np.float64)
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def keep(x, kept):
    return np.where(kept, x, -np.inf)


def temperature(x, value):
    return x / value


def dynamic_temperature(x, low, high, exponent):
    probs = [p for p in softmax(x) if p > 0]
    if len(probs) < 2:
        return x / max(low, 1e-3)
    entropy = -sum(p * math.log(p) for p in probs)
    alive = int(np.isfinite(x).sum())
    return x / max(low + (high - low) * min(1.0, entropy / math.log(alive)) ** exponent, 1e-3)


def smoothing(x, factor, curve):
    k, s = (3 - curve) / 2, (curve - 1) / 2
    out = []
    for value in x:
        d = value - x.max()
        out.append(-math.inf if d == -math.inf else -k * factor * d**2 + s * factor * d**3)
    return np.array(out)


def top_k(x, k):
    kth = np.sort(x)[::-1][min(k, len(x)) - 1]
    return keep(x, x >= kth)


def nucleus(x, cost, mass):
    """Walk from the lowest cost up until the total probability before the token has reached `mass`."""
    probs, kept, total = softmax(x), np.zeros(len(x), bool), 0.0
    for i in np.argsort(cost, kind="stable"):
        if total >= mass and kept.any():
            break
        kept[i] = True
        total += probs[i]
    return keep(x, kept)


def top_p(x, p):
    return nucleus(x, -x, p)


def top_a(x, a):
    probs = softmax(x)
    return keep(x, probs >= a * probs.max() ** 2)


def min_p(x, share):
    probs = softmax(x)
    return keep(x, probs >= share * probs.max())


def tail_free(x, z):
    order = [i for i in np.argsort(-x, kind="stable") if x[i] > -math.inf]
    probs = softmax(x)
    p = [probs[i] for i in order]
    if len(p) < 3:
        return x
    first = [p[i + 1] - p[i] for i in range(len(p) - 1)]
    second = [abs(first[i + 1] - first[i]) for i in range(len(first) - 1)]
    if sum(second) <= 1e-12 * p[0]:
        return x
    kept, total = 1, 0.0
    for value in second:
        total += value / sum(second)
        if total > z:
            break
        kept += 1
    return keep(x, x >= x[order[kept - 1]])


def typical(x, mass):
    probs = softmax(x)
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    return nucleus(x, np.array([abs(-math.log(p) - entropy) if p > 0 else math.inf for p in probs]), mass)


def mirostat(x, mu):
    probs = softmax(x)
    with np.errstate(divide="ignore"):
        kept = -np.log2(probs) <= mu
    kept |= probs == probs.max()
    return keep(x, kept)


def xtc(x, probability, threshold, protected=()):
    """The mixture of two distributions, spelled out."""
    probs = softmax(x)
    top = [i for i in range(len(x)) if probs[i] >= threshold and x[i] > -np.inf and i not in protected]
    if len(top) < 2:
        return x
    least = min(probs[i] for i in top)
    without = np.array([0.0 if i in top and probs[i] > least else p for i, p in enumerate(probs)])
    with np.errstate(divide="ignore"):
        return np.log((1 - probability) * probs + probability * without / without.sum())


def skew(x, value):
    """Probability that u ** exp(-value) falls into the place of each token on the sorted line."""
    probs, out, below = softmax(x), np.zeros(len(x)), 0.0
    for i in np.argsort(-x, kind="stable"):
        above = min(1.0, below + probs[i])
        out[i] = above ** math.exp(value) - below ** math.exp(value)
        below = above
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(out, 0.0))


def strength(distance, reach, decay):
    if reach == 0 or distance <= reach:
        return 1.0
    return max(0.0, (reach + decay + 1 - distance) / (decay + 1))


def repetition_penalty(x, seen, penalty, reach=0, decay=0):
    out = x.copy()
    for i in set(seen):
        distance = min(len(seen) - at for at, token in enumerate(seen) if token == i)
        factor = 1 + (penalty - 1) * strength(distance, reach, decay)
        out[i] = x[i] * factor if x[i] < 0 else x[i] / factor
    return out


def presence_penalty(x, new, beta, reach=0, decay=0):
    out = x.copy()
    for i in set(new):
        distance = min(len(new) - at for at, token in enumerate(new) if token == i)
        out[i] -= beta * strength(distance, reach, decay)
    return out


def frequency_penalty(x, new, alpha, reach=0, decay=0):
    out = x.copy()
    for at, token in enumerate(new):
        out[token] -= alpha * strength(len(new) - at, reach, decay)
    return out


def dry(x, ids, multiplier, base, allowed_length, max_ngram, breakers):
    """For every token: the longest end of the text that stood somewhere before, followed by this token."""
    out, ids = x.copy(), list(ids)
    for token in set(ids) - set(breakers):
        longest = 0
        for at, other in enumerate(ids):
            if other != token:
                continue
            n = 0
            while n < max_ngram and at - 1 - n >= 0 and ids[at - 1 - n] == ids[-1 - n] and ids[-1 - n] not in breakers:
                n += 1
            longest = max(longest, n)
        if longest >= allowed_length:
            out[token] -= min(multiplier * base ** (longest - allowed_length), 1e4)
    return out


def chain(x, params, prompt=(), new=(), *, end_ids=(), breakers=(), protected=(), mu=None):
    """All filters in the order in which they apply by default."""
    p, seen = params, [*prompt, *new]
    x = x.astype(np.float64)
    if p.allowed_tokens:
        x = keep(x, np.isin(np.arange(len(x)), p.allowed_tokens))
    x = keep(x, ~np.isin(np.arange(len(x)), p.banned_tokens))
    if len(new) < p.min_tokens:
        x = keep(x, ~np.isin(np.arange(len(x)), end_ids))
    x = repetition_penalty(x, seen, p.repetition_penalty, p.penalty_range, p.penalty_decay)
    x = presence_penalty(x, new, p.presence_penalty, p.penalty_range, p.penalty_decay)
    x = frequency_penalty(x, new, p.frequency_penalty, p.penalty_range, p.penalty_decay)
    if p.dry_multiplier:
        ids = seen[-p.dry_range :] if p.dry_range else seen
        x = dry(x, ids, p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_max_ngram, breakers)
    for i, b in p.logit_bias:
        x[i] += b
    if p.greedy:
        return x
    steps = {
        "smoothing": (p.smoothing_factor > 0, lambda x: smoothing(x, p.smoothing_factor, p.smoothing_curve)),
        "temperature": (p.temperature != 1, lambda x: temperature(x, p.temperature)),
        "top_k": (p.top_k > 0, lambda x: top_k(x, p.top_k)),
        "top_p": (p.top_p < 1, lambda x: top_p(x, p.top_p)),
        "top_a": (p.top_a > 0, lambda x: top_a(x, p.top_a)),
        "min_p": (p.min_p > 0, lambda x: min_p(x, p.min_p)),
        "tail_free": (p.tfs < 1, lambda x: tail_free(x, p.tfs)),
        "typical": (p.typical_p < 1, lambda x: typical(x, p.typical_p)),
        "mirostat": (p.mirostat, lambda x: mirostat(x, 2 * p.mirostat_tau if mu is None else mu)),
        "temperature_last": (p.temperature != 1, lambda x: temperature(x, p.temperature)),
        "dynamic_temperature": (p.max_temp > 0, lambda x: dynamic_temperature(x, p.min_temp, p.max_temp, p.temp_exponent)),
        "xtc": (p.xtc_probability > 0, lambda x: xtc(x, p.xtc_probability, p.xtc_threshold, protected)),
        "skew": (p.skew != 0, lambda x: skew(x, p.skew)),
    }
    left_out = "temperature" if p.temperature_last else "temperature_last"
    for name in p.order if p.order is not None else [n for n in steps if n != left_out]:
        if name in steps and steps[name][0]:
            x = steps[name][1](x)
    return x
