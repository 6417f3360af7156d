"""Choosing one option per linear so that the predicted damage is least within a budget of bits: a multiple-choice knapsack, solved exactly.

A Lagrange multiplier (a price per bit) gives a lower bound and a nearly optimal start; options whose reduced cost exceeds the gap between
the two can be in no better solution, and a dynamic programme over what is left finds the optimum. Ties are broken by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exl2nb.core.errors import ConversionError

LIMIT_STATES = 200_000  # above this the programme keeps the best state per cell of bits


@dataclass(frozen=True)
class _Item:
    """Options of one linear after pruning: position in the menu, bits, error, cost at the price over the cheapest."""

    index: np.ndarray
    bits: np.ndarray
    error: np.ndarray
    reduced: np.ndarray


def allocate(menus: Sequence[Sequence[tuple[int, float]]], budget: int) -> list[int]:
    """Pick one option per menu: least sum of errors with at most `budget` bits in all.

    Args:
        menus: per linear, options as (bits, error), any order.
        budget: bits.

    Returns:
        The index of the chosen option in each menu; the same for the same input.

    Raises:
        ConversionError: even the smallest options exceed the budget; names the reachable range.
    """
    return allocate_arrays(
        [np.array([option[0] for option in menu], dtype=np.int64) for menu in menus],
        [np.array([option[1] for option in menu], dtype=np.float64) for menu in menus],
        budget,
    )


def allocate_arrays(
    bits: Sequence[np.ndarray], errors: Sequence[np.ndarray], budget: int, *, limit_states: int = LIMIT_STATES
) -> list[int]:
    """`allocate` on arrays: per linear, int64 bits and f64 errors of its options.

    limit_states: fewer are faster and may miss the optimum by a hair (at 4000 states the demo model's is found within 1e-4 of the error).
    """
    least, most = sum(int(b.min()) for b in bits), sum(int(b.max()) for b in bits)
    if least > budget:
        raise ConversionError(f"a budget of {budget} bits cannot be met; expected at least {least} (up to {most} can be used)")
    best = [int(np.lexsort((b, e))[0]) for b, e in zip(bits, errors)]
    if _bits(bits, best) <= budget:
        return best
    price = _price(bits, errors, budget)
    start = _improve(bits, errors, _cheapest(bits, errors, price), budget)
    relaxed = sum(float((e + price * b).min()) for b, e in zip(bits, errors)) - price * budget
    gap = max(0.0, _error(errors, start) - relaxed)
    items = [_prune(b, e, price, gap * (1 + 1e-9) + 1e-300) for b, e in zip(bits, errors)]
    found = _programme(items, budget, gap * (1 + 1e-9) + 1e-300, limit_states)
    return found if found is not None and _error(errors, found) <= _error(errors, start) else start


def _bits(bits: Sequence[np.ndarray], picks: Sequence[int]) -> int:
    return sum(int(b[i]) for b, i in zip(bits, picks))


def _error(errors: Sequence[np.ndarray], picks: Sequence[int]) -> float:
    return float(sum(e[i] for e, i in zip(errors, picks)))


def _cheapest(bits: Sequence[np.ndarray], errors: Sequence[np.ndarray], price: float) -> list[int]:
    return [int(np.lexsort((b, e + price * b))[0]) for b, e in zip(bits, errors)]


def _price(bits: Sequence[np.ndarray], errors: Sequence[np.ndarray], budget: int) -> float:
    """The lowest price per bit (to float precision) at which the cheapest options fit."""
    wide = max(map(len, bits))
    table = np.stack([np.pad(b, (0, wide - len(b))) for b in bits])
    cost = np.stack([np.pad(e, (0, wide - len(e)), constant_values=np.inf) for e in errors])

    def used(price: float) -> int:
        total = cost + price * table
        cheap = total <= total.min(1, keepdims=True)
        return int(np.where(cheap, table, np.iinfo(np.int64).max).min(1).sum())

    low, high = 0.0, 1e-12
    while used(high) > budget:
        low, high = high, high * 4
    for _ in range(100):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if used(middle) > budget:
            low = middle
        else:
            high = middle
    return high


def _improve(bits: Sequence[np.ndarray], errors: Sequence[np.ndarray], picks: list[int], budget: int) -> list[int]:
    """Spend what is left: again and again the single change that lowers the error most and still fits."""
    left = budget - _bits(bits, picks)
    while True:
        best, change = 0.0, None
        for i, (b, e) in enumerate(zip(bits, errors)):
            gains = np.where(b - b[picks[i]] <= left, e[picks[i]] - e, -1.0)
            j = int(gains.argmax())
            if gains[j] > best:
                best, change = float(gains[j]), (i, j)
        if change is None:
            return picks
        i, j = change
        left -= int(bits[i][j] - bits[i][picks[i]])
        picks[i] = j


def _prune(bits: np.ndarray, error: np.ndarray, price: float, gap: float) -> _Item:
    cost = error + price * bits
    reduced = cost - cost.min()
    keep = np.flatnonzero(reduced <= gap)
    keep = keep[np.lexsort((keep, error[keep], bits[keep]))]
    return _Item(keep, bits[keep], error[keep], reduced[keep])


def _programme(items: Sequence[_Item], budget: int, gap: float, limit: int) -> list[int] | None:
    """Exact search: states are (bits, error) that no other state beats, one linear at a time."""
    floor = [*np.cumsum([int(item.bits.min()) for item in reversed(items)])[::-1].tolist(), 0]
    states = (np.zeros(1, np.int64), np.zeros(1), np.zeros(1))  # bits, error, reduced cost
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for position, item in enumerate(items):
        count = len(item.index)
        bits = (states[0][:, None] + item.bits).ravel()
        error = (states[1][:, None] + item.error).ravel()
        reduced = (states[2][:, None] + item.reduced).ravel()
        alive = np.flatnonzero((reduced <= gap) & (bits <= budget - floor[position + 1]))
        alive = alive[np.lexsort((alive, error[alive], bits[alive]))]
        lowest = np.minimum.accumulate(error[alive])
        alive = alive[np.concatenate(([True], error[alive][1:] < lowest[:-1]))] if len(alive) else alive
        alive = _thin(alive, bits, limit)
        if not len(alive):
            return None
        states = (bits[alive], error[alive], reduced[alive])
        trail.append((alive // count, item.index[alive % count]))
    at, picks = int(states[1].argmin()), []
    for parent, index in reversed(trail):
        picks.append(int(index[at]))
        at = int(parent[at])
    return picks[::-1]


def _thin(alive: np.ndarray, bits: np.ndarray, limit: int) -> np.ndarray:
    if len(alive) <= limit:
        return alive
    low, high = int(bits[alive[0]]), int(bits[alive[-1]])
    cell = (bits[alive] - low) * limit // (high - low + 1)
    first = np.concatenate((cell[1:] != cell[:-1], [True]))  # within a cell the last state has the least error
    return alive[first]
