"""The menu of one linear: every mix of widths worth considering, with its bits and its predicted cost. Knows nothing of tensors on disk.

GPTQ's loss is a sum over groups of rows, and a group's share hardly depends on the widths of the others. So a few runs at one width
throughout ("anchors") predict every mix: the top rows from a wide run, the rest from a narrow one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.quant.bits import WIDTHS, stored_bits

GROUP_SIZES = (32, 64, 128)
DESCENDING = tuple(sorted(WIDTHS, reverse=True))
PRICES = 96  # Lagrange multipliers tried per group size
_FEW_GROUPS = 4  # 126 mixes
Anchors = Mapping[tuple[int, int], list[float]]


@dataclass(frozen=True)
class Option:
    """One way to store a linear: (bits, rows) per group, bits on disk, predicted KL in nats."""

    groups: tuple[tuple[int, int], ...]
    bits: int
    error: float


def group_rows(in_features: int, group_size: int) -> list[int]:
    """Rows of each group, the last one shortened."""
    return [min(group_size, in_features - first) for first in range(0, in_features, group_size)]


def menu(in_features: int, out_features: int, anchors: Anchors, *, bias: bool = False) -> list[Option]:
    """Options of one linear that no other option beats in both bits and error, smallest first.

    For each group size and each of PRICES prices of a bit, the widths (never rising from top to bottom) that minimise error plus price; all
    such widths where a matrix has few groups, so that small models too can spend their last bits.

    Args:
        in_features: K.
        out_features: N.
        anchors: (bits, group size) -> predicted KL of each group; measured at group sizes 32 and 128 (64 is interpolated where absent).
        bias: whether the matrix has one.
    """
    found: dict[tuple[tuple[int, int], ...], Option] = {}
    for size in GROUP_SIZES:
        rows = group_rows(in_features, size)
        errors = _errors(anchors, size, rows)
        for widths in _mixes(errors, [r * out_features for r in rows]):
            groups = tuple(zip(widths, rows))
            error = sum(float(errors[DESCENDING.index(bits), g]) for g, bits in enumerate(widths))
            found[groups] = Option(groups, stored_bits(groups, out_features, bias=bias), error)
    return pareto(list(found.values()))


def pareto(options: list[Option]) -> list[Option]:
    """The options that are not beaten, by rising bits and falling error."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bits, o.error, o.groups)):
        if not kept or option.error < kept[-1].error:
            kept.append(option)
    return kept


def _errors(anchors: Anchors, size: int, rows: list[int]) -> Tensor:
    """Predicted KL per width (DESCENDING) and group: f64 `(6, G)`."""
    return torch.stack([_group_errors(anchors, bits, size, len(rows)) for bits in DESCENDING])


def _group_errors(anchors: Anchors, bits: int, size: int, count: int) -> Tensor:
    if (bits, size) in anchors:
        return torch.tensor(anchors[bits, size], dtype=torch.float64)
    fine, coarse = torch.tensor(anchors[bits, 32], dtype=torch.float64), torch.tensor(anchors[bits, 128], dtype=torch.float64)
    per = size // 32
    parts = torch.nn.functional.pad(fine, (0, count * per - len(fine))).view(count, per).sum(1)  # the fine groups, added up
    owner = torch.arange(count) * size // 128
    total = torch.zeros_like(coarse).index_add_(0, owner, parts)
    scale = (coarse / total.clamp_min(1e-300))[owner]  # how much worse coarse groups are there
    return parts * scale.sqrt()


def _mixes(errors: Tensor, weights: list[int]) -> set[tuple[int, ...]]:
    """For each price, the best widths, not rising along the groups. errors f64 `(6, G)`; weights: weights per group."""
    if errors.shape[1] <= _FEW_GROUPS:
        return set(itertools.combinations_with_replacement(DESCENDING, errors.shape[1]))
    widths = torch.tensor(DESCENDING, dtype=torch.float64)
    cost = widths[:, None] * torch.tensor(weights, dtype=torch.float64)
    slope = ((errors[1:] - errors[:-1]) / (cost[:-1] - cost[1:])).clamp_min(1e-300)
    low, high = torch.log(slope.min()).item() - 1, torch.log(slope.max()).item() + 1
    prices = torch.linspace(low, high, PRICES, dtype=torch.float64).exp()
    total = errors[:, :, None] + cost[:, :, None] * prices  # (6, G, P)
    best, came = total[:, 0], []
    for g in range(1, errors.shape[1]):
        least, which = best.cummin(0)  # the group above is at least as wide
        came.append(which)
        best = least + total[:, g]
    state = best.argmin(0)
    path = [state]
    for which in reversed(came):
        state = which.gather(0, state[None])[0]
        path.append(state)
    return {tuple(DESCENDING[i] for i in column) for column in torch.stack(path[::-1], 1).tolist()}
