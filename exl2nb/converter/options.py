"""The Pareto front of one linear: every mix of widths worth considering, with its bits and its predicted KL. Knows nothing of files.

GPTQ's loss is a sum over groups of rows, and a group's share hardly depends on the widths of the others. So a few runs at one width
throughout ("anchors") predict every mix: the top rows from a wide run, the rest from a narrow one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from exl2nb.quant.bits import WIDTHS, padded, stored_bits

GROUP_SIZES = (32, 64, 128)
DESCENDING = tuple(sorted(WIDTHS, reverse=True))
PRICES = 96  # Lagrange multipliers tried per group size
_FEW_GROUPS = 4  # 126 mixes
Anchors = Mapping[tuple[int, int], Sequence[float]]
Groups = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class ParetoFront:
    """Options of one linear that no other option beats in both bits and error, as arrays, smallest first.

    bits: int64 `(M,)`, on disk. error: f64 `(M,)`, predicted KL in nats. mix: int64 `(M, 7)`: group size, then how many groups each width
    of DESCENDING has. fixed: the groups of a front with one option that no mix describes.
    """

    in_features: int
    bits: np.ndarray
    error: np.ndarray
    mix: np.ndarray
    fixed: Groups | None = None

    def __len__(self) -> int:
        return len(self.bits)

    def groups(self, index: int) -> Groups:
        """(bits, rows) per group of one option."""
        if self.fixed is not None:
            return self.fixed
        size, *counts = self.mix[index].tolist()
        widths = [bits for bits, count in zip(DESCENDING, counts) for _ in range(count)]
        return tuple(zip(widths, group_rows(self.in_features, size)))


def group_rows(in_features: int, group_size: int) -> list[int]:
    """Rows of each group, the last one shortened."""
    return [min(group_size, in_features - first) for first in range(0, in_features, group_size)]


def pareto_fronts(in_features: int, linears: Sequence[tuple[int, Anchors, bool]]) -> list[ParetoFront]:
    """Pareto fronts of linears with the same number of inputs.

    Candidates: for each group size and each of PRICES Lagrange multipliers, the widths (never rising from top to bottom) that minimise
    error + multiplier * bits. A matrix with few groups: all such widths, so that small models can spend their last bits, too.

    Args:
        linears: per linear: out_features, anchors, whether it has a bias.
    """
    found: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in linears]
    for size in GROUP_SIZES:
        rows = np.array(group_rows(in_features, size))
        widths = [[group_errors(anchors, bits, size, len(rows)) for bits in DESCENDING] for _, anchors, _ in linears]
        errors = np.array(widths)  # (L, 6, G): predicted KL per linear, width and group
        for place, widths in enumerate(_mixes(errors, rows)):
            out_features, _, bias = linears[place]
            counts = np.stack([(widths == i).sum(1) for i in range(len(DESCENDING))], 1)
            fixed = stored_bits([(0, int(r)) for r in rows], padded(out_features), bias=bias)
            bits = fixed + (np.array(DESCENDING)[widths] * rows).sum(1) * padded(out_features)
            error = errors[place][widths, np.arange(len(rows))].sum(1)
            found[place].append((bits, error, np.concatenate([np.full((len(counts), 1), size), counts], 1)))
    return [_pareto(in_features, parts) for parts in found]


def _pareto(in_features: int, parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> ParetoFront:
    """The options that are not beaten, by rising bits and falling error."""
    bits, error, mix = (np.concatenate(arrays) for arrays in zip(*parts))
    order = np.lexsort((*mix.T, error, bits))
    bits, error, mix = bits[order], error[order], mix[order]
    lowest = np.minimum.accumulate(error)
    keep = np.concatenate(([True], error[1:] < lowest[:-1]))
    return ParetoFront(in_features, bits[keep], error[keep], mix[keep])


def group_errors(anchors: Anchors, bits: int, size: int, count: int) -> np.ndarray:
    """Predicted KL of each of `count` groups of `size` rows at one width: f64 `(count,)`."""
    if (bits, size) in anchors:
        return np.array(anchors[bits, size], dtype=np.float64)
    fine, coarse = np.array(anchors[bits, 32], dtype=np.float64), np.array(anchors[bits, 128], dtype=np.float64)
    per = size // 32
    parts = np.pad(fine, (0, count * per - len(fine))).reshape(count, per).sum(1)  # the fine groups, added up
    owner = np.arange(count) * size // 128
    total = np.bincount(owner, parts, minlength=len(coarse))
    scale = (coarse / np.maximum(total, 1e-300))[owner]  # how much worse coarse groups are there
    return parts * np.sqrt(scale)


@functools.lru_cache(maxsize=8)
def _all_mixes(groups: int) -> np.ndarray:
    return np.array(list(itertools.combinations_with_replacement(range(len(DESCENDING)), groups)))


def _mixes(errors: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Per linear, the best widths for each price, not rising along the groups: indices into DESCENDING, int `(M, G)`.

    errors: f64 `(L, 6, G)`. rows: of each group `(G,)`.
    """
    count = errors.shape[2]
    if count <= _FEW_GROUPS:
        return [_all_mixes(count)] * len(errors)
    cost = np.array(DESCENDING, dtype=np.float64)[:, None] * rows
    slope = np.maximum((errors[:, 1:] - errors[:, :-1]) / (cost[:-1] - cost[1:]), 1e-300)
    low, high = np.log(slope.min((1, 2))) - 1, np.log(slope.max((1, 2))) + 1
    prices = np.exp(low[:, None] + (high - low)[:, None] * np.linspace(0, 1, PRICES))  # (L, P)
    total = errors[:, :, None, :] + cost[None, :, None, :] * prices[:, None, :, None]  # (L, 6, P, G)
    places = np.arange(len(DESCENDING))[None, :, None]
    best, came = total[..., 0], []
    for g in range(1, count):
        least = np.minimum.accumulate(best, 1)  # the group above is at least as wide
        came.append(np.maximum.accumulate(np.where(best == least, places, 0), 1))
        best = least + total[..., g]
    state = best.argmin(1)
    path = [state]
    for which in reversed(came):
        state = np.take_along_axis(which, state[:, None], 1)[:, 0]
        path.append(state)
    widths = np.stack(path[::-1], -1)  # (L, P, G)
    return [np.unique(one, axis=0) for one in widths]
