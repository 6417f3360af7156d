"""A bit allocation: the Pareto front of each matrix, and one option per matrix under a budget. Knows nothing of files.

GPTQ's loss is a sum over groups of rows, and a group's share hardly depends on the widths of the others. So a few runs at one width
throughout ("anchors") predict every mix: the top rows from a wide run, the rest from a narrow one. The knapsack solver then picks one
mix per matrix; overrides and frozen choices are kept.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import html
import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exl2nb.core.errors import ConversionError, OptionError
from exl2nb.io.hf_config import read_json
from exl2nb.io.shards import TensorStore
from exl2nb.model.layout import Linear
from exl2nb.quant.bits import CODE_WIDTHS, bits_per_weight, padded, stored_bits
from exl2nb.quant.exl2 import parse_groups

if TYPE_CHECKING:
    import pandas as pd

GROUP_SIZES = (32, 64, 128)
DESCENDING_WIDTHS = tuple(sorted(CODE_WIDTHS, reverse=True))
PRICE_STEPS = 96  # Lagrange multipliers tried per group size
_FEW_GROUPS = 4  # 126 mixes
Anchors = Mapping[tuple[int, int], Sequence[float]]
Groups = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class ParetoFront:
    """Options of one linear that no other option beats in both bits and error, as arrays, smallest first.

    bits: int64 `(M,)`, on disk. error: f64 `(M,)`, predicted KL in nats. mix: int64 `(M, 7)`: group size, then how many groups each width
    of DESCENDING_WIDTHS has. fixed: the groups of a front with one option that no mix describes.
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
        widths = [bits for bits, count in zip(DESCENDING_WIDTHS, counts) for _ in range(count)]
        return tuple(zip(widths, group_rows(self.in_features, size)))


def group_rows(in_features: int, group_size: int) -> list[int]:
    """Rows of each group, the last one shortened."""
    return [min(group_size, in_features - first) for first in range(0, in_features, group_size)]


def pareto_fronts(in_features: int, linears: Sequence[tuple[int, Anchors, bool]]) -> list[ParetoFront]:
    """Pareto fronts of linears with the same number of inputs.

    Candidates: for each group size and each of PRICE_STEPS Lagrange multipliers, the widths (never rising from top to bottom) that minimise
    error + multiplier * bits. A matrix with few groups: all such widths, so that small models can spend their last bits, too.

    Args:
        linears: per linear: out_features, anchors, whether it has a bias.
    """
    found: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in linears]
    for size in GROUP_SIZES:
        rows = np.array(group_rows(in_features, size))
        widths = [[group_errors(anchors, bits, size, len(rows)) for bits in DESCENDING_WIDTHS] for _, anchors, _ in linears]
        errors = np.array(widths)  # (L, 6, G): predicted KL per linear, width and group
        for place, widths in enumerate(_best_mixes(errors, rows)):
            out_features, _, bias = linears[place]
            counts = np.stack([(widths == i).sum(1) for i in range(len(DESCENDING_WIDTHS))], 1)
            fixed = stored_bits([(0, int(r)) for r in rows], padded(out_features), bias=bias)
            bits = fixed + (np.array(DESCENDING_WIDTHS)[widths] * rows).sum(1) * padded(out_features)
            error = errors[place][widths, np.arange(len(rows))].sum(1)
            found[place].append((bits, error, np.concatenate([np.full((len(counts), 1), size), counts], 1)))
    return [_pareto_front(in_features, parts) for parts in found]


def _pareto_front(in_features: int, parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> ParetoFront:
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
    return np.array(list(itertools.combinations_with_replacement(range(len(DESCENDING_WIDTHS)), groups)))


def _best_mixes(errors: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Per linear, the best widths for each price, not rising along the groups: indices into DESCENDING_WIDTHS, int `(M, G)`.

    errors: f64 `(L, 6, G)`. rows: of each group `(G,)`.
    """
    count = errors.shape[2]
    if count <= _FEW_GROUPS:
        return [_all_mixes(count)] * len(errors)
    cost = np.array(DESCENDING_WIDTHS, dtype=np.float64)[:, None] * rows
    slope = np.maximum((errors[:, 1:] - errors[:, :-1]) / (cost[:-1] - cost[1:]), 1e-300)
    low, high = np.log(slope.min((1, 2))) - 1, np.log(slope.max((1, 2))) + 1
    prices = np.exp(low[:, None] + (high - low)[:, None] * np.linspace(0, 1, PRICE_STEPS))  # (L, P)
    total = errors[:, :, None, :] + cost[None, :, None, :] * prices[:, None, :, None]  # (L, 6, P, G)
    places = np.arange(len(DESCENDING_WIDTHS))[None, :, None]
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


LIMIT_STATES = 200_000  # above this the programme keeps the best state per cell of bits


@dataclass(frozen=True)
class _Pruned:
    """Options of one linear after pruning: index in its front, bits, error, cost at the price over the cheapest."""

    index: np.ndarray
    bits: np.ndarray
    error: np.ndarray
    reduced: np.ndarray


def allocate_bits(options: Sequence[Sequence[tuple[int, float]]], budget: int) -> list[int]:
    """Pick one option per linear: least sum of errors with at most `budget` bits in all.

    Args:
        options: per linear, (bits, error) of each option, any order.
        budget: bits.

    Returns:
        The index of the chosen option of each linear; the same for the same input.

    Raises:
        ConversionError: even the smallest options exceed the budget; names the reachable range.
    """
    return allocate_arrays(
        [np.array([bits for bits, _ in listed], dtype=np.int64) for listed in options],
        [np.array([error for _, error in listed], dtype=np.float64) for listed in options],
        budget,
    )


def allocate_arrays(
    bits: Sequence[np.ndarray], errors: Sequence[np.ndarray], budget: int, *, limit_states: int = LIMIT_STATES
) -> list[int]:
    """`allocate_bits` on arrays: per linear, int64 bits and f64 errors of its options.

    limit_states: fewer are faster and may miss the optimum by a hair (at 4000 states the demo model's is found within 1e-4 of the error).
    """
    least, most = sum(int(b.min()) for b in bits), sum(int(b.max()) for b in bits)
    if least > budget:
        raise ConversionError(f"a budget of {budget} bits cannot be met; expected at least {least} (up to {most} can be used)")
    best = [int(np.lexsort((b, e))[0]) for b, e in zip(bits, errors)]
    if _total_bits(bits, best) <= budget:
        return best
    price = _lagrange_price(bits, errors, budget)
    cheapest = [int(np.lexsort((b, e + price * b))[0]) for b, e in zip(bits, errors)]
    start = _improve_allocation(bits, errors, cheapest, budget)
    relaxed = sum(float((e + price * b).min()) for b, e in zip(bits, errors)) - price * budget
    gap = max(0.0, _total_error(errors, start) - relaxed)
    pruned = [_prune_options(b, e, price, gap * (1 + 1e-9) + 1e-300) for b, e in zip(bits, errors)]
    found = _dynamic_program(pruned, budget, gap * (1 + 1e-9) + 1e-300, limit_states)
    return found if found is not None and _total_error(errors, found) <= _total_error(errors, start) else start


def _total_bits(bits: Sequence[np.ndarray], picks: Sequence[int]) -> int:
    return sum(int(b[i]) for b, i in zip(bits, picks))


def _total_error(errors: Sequence[np.ndarray], picks: Sequence[int]) -> float:
    return float(sum(e[i] for e, i in zip(errors, picks)))


def _lagrange_price(bits: Sequence[np.ndarray], errors: Sequence[np.ndarray], budget: int) -> float:
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


def _improve_allocation(bits: Sequence[np.ndarray], errors: Sequence[np.ndarray], picks: list[int], budget: int) -> list[int]:
    """Spend what is left: again and again the single change that lowers the error most and still fits."""
    left = budget - _total_bits(bits, picks)
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


def _prune_options(bits: np.ndarray, error: np.ndarray, price: float, gap: float) -> _Pruned:
    cost = error + price * bits
    reduced = cost - cost.min()
    keep = np.flatnonzero(reduced <= gap)
    keep = keep[np.lexsort((keep, error[keep], bits[keep]))]
    return _Pruned(keep, bits[keep], error[keep], reduced[keep])


def _dynamic_program(pruned: Sequence[_Pruned], budget: int, gap: float, limit: int) -> list[int] | None:
    """Exact search: states are (bits, error) that no other state beats, one linear at a time."""
    floor = [*np.cumsum([int(one.bits.min()) for one in reversed(pruned)])[::-1].tolist(), 0]
    states = (np.zeros(1, np.int64), np.zeros(1), np.zeros(1))  # bits, error, reduced cost
    back: list[tuple[np.ndarray, np.ndarray]] = []
    for position, one in enumerate(pruned):
        count = len(one.index)
        bits = (states[0][:, None] + one.bits).ravel()
        error = (states[1][:, None] + one.error).ravel()
        reduced = (states[2][:, None] + one.reduced).ravel()
        alive = np.flatnonzero((reduced <= gap) & (bits <= budget - floor[position + 1]))
        alive = alive[np.lexsort((alive, error[alive], bits[alive]))]
        lowest = np.minimum.accumulate(error[alive])
        alive = alive[np.concatenate(([True], error[alive][1:] < lowest[:-1]))] if len(alive) else alive
        alive = _thin_states(alive, bits, limit)
        if not len(alive):
            return None
        states = (bits[alive], error[alive], reduced[alive])
        back.append((alive // count, one.index[alive % count]))
    at, picks = int(states[1].argmin()), []
    for parent, index in reversed(back):
        picks.append(int(index[at]))
        at = int(parent[at])
    return picks[::-1]


def _thin_states(alive: np.ndarray, bits: np.ndarray, limit: int) -> np.ndarray:
    if len(alive) <= limit:
        return alive
    low, high = int(bits[alive[0]]), int(bits[alive[-1]])
    cell = (bits[alive] - low) * limit // (high - low + 1)
    first = np.concatenate((cell[1:] != cell[:-1], [True]))  # within a cell the last state has the least error
    return alive[first]


SOLVE_STATES = 600  # of the knapsack: a few ms, and within 1e-3 of the optimum on the demo model
Override = float | tuple[float, float] | Sequence[tuple[int, int]]


@dataclass(frozen=True)
class MixedMatrix:
    """A matrix and its mix of widths.

    key: module key. role: "q", "down", ..., "head". layer: -1 for the head. groups: (bits, rows) from top to bottom.
    """

    key: str
    role: str
    layer: int
    in_features: int
    out_features: int
    groups: Groups

    @property
    def bpw(self) -> float:
        """Bits per weight, everything stored but a bias."""
        return bits_per_weight(self.groups, padded(self.out_features))

    @property
    def group_size(self) -> int:
        """Rows per group."""
        return self.groups[0][1]

    @property
    def mix(self) -> str:
        """Widths and rows, such as "5x32 4x224 g32"."""
        rows: Counter[int] = Counter()
        for bits, count in self.groups:
            rows[bits] += count
        return " ".join(f"{bits}x{count}" for bits, count in sorted(rows.items(), reverse=True)) + f" g{self.group_size}"


@dataclass(frozen=True)
class MatrixChoice(MixedMatrix):
    """One matrix of an allocation.

    nbytes: on disk, bias included. predicted_kl: nats per token. share: of the allocation's predicted KL, 0..1.
    """

    nbytes: int
    predicted_kl: float
    share: float


@dataclass(frozen=True, eq=False)
class Allocation:
    """An allocation.

    choices: in running order, the head last. target: the request as text. bpw: all that the layers store over the weights of
    their matrices; head and embedding not counted. nbytes: of the finished weight files. predicted_kl: nats per token, in all.
    """

    choices: tuple[MatrixChoice, ...]
    target: str
    bpw: float
    nbytes: int
    predicted_kl: float

    @property
    def head_bpw(self) -> float:
        """Bits per weight of the head."""
        return self.choices[-1].bpw

    def groups(self) -> dict[str, Groups]:
        """Module key -> groups: what `frozen=` takes."""
        return {choice.key: choice.groups for choice in self.choices}

    def to_frame(self) -> pd.DataFrame:
        """One line per matrix: key, layer, role, bpw, mix, group_size, nbytes, predicted_kl, share."""
        import pandas as pd

        names = ("key", "layer", "role", "bpw", "mix", "group_size", "nbytes", "predicted_kl", "share")
        return pd.DataFrame([{name: getattr(choice, name) for name in names} for choice in self.choices])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and widgets."""
        names = ("key", "role", "layer", "in_features", "out_features", "bpw", "mix", "group_size", "nbytes", "predicted_kl", "share")
        return {
            "target": self.target,
            "bpw": self.bpw,
            "head_bpw": self.head_bpw,
            "nbytes": self.nbytes,
            "predicted_kl": self.predicted_kl,
            "choices": [{**{name: getattr(c, name) for name in names}, "groups": [list(g) for g in c.groups]} for c in self.choices],
        }

    def __repr__(self) -> str:
        return (
            f"Allocation({self.target}: {self.bpw:.4f} bits per weight, head {self.head_bpw:.2f}, {self.nbytes:,} bytes, "
            f"predicted KL {self.predicted_kl:.5f})"
        )

    def _repr_html_(self) -> str:
        top = sorted(self.choices, key=lambda c: -c.share)[:12]
        rows = "".join(
            f"<tr><td>{html.escape(c.key)}</td><td>{c.bpw:.2f}</td><td>{c.mix}</td><td>{c.nbytes:,}</td><td>{100 * c.share:.1f} %</td></tr>"
            for c in top
        )
        return (
            f'<div style="font:13px/1.4 system-ui,sans-serif"><b>{html.escape(repr(self))}</b><br>the matrices that cost most'
            f'<table style="font-variant-numeric:tabular-nums"><tr><th>matrix</th><th>bits</th><th>mix</th><th>bytes</th>'
            f"<th>share of KL</th></tr>{rows}</table></div>"
        )


@dataclass(frozen=True)
class MatrixOptions(Linear):
    """A matrix and the options that the solver may choose from."""

    front: ParetoFront


def solve_allocation(matrices: Sequence[MatrixOptions], budget: int, *, where: str) -> list[tuple[Groups, int, float]]:
    """(groups, bits, predicted KL) per matrix: least sum of KL within `budget` bits.

    Raises:
        ConversionError: the budget is below the least or not a number of bits. `where` says what was asked for, with the reachable range.
    """
    least = sum(int(matrix.front.bits[0]) for matrix in matrices)
    if least > budget:
        raise ConversionError(
            f"{where}: these matrices take at least {least / 8:,.0f} bytes, the budget leaves {max(0, budget) // 8:,}; raise it"
        )
    picks = allocate_arrays([s.front.bits for s in matrices], [s.front.error for s in matrices], budget, limit_states=SOLVE_STATES)
    return [(s.front.groups(i), int(s.front.bits[i]), float(s.front.error[i])) for s, i in zip(matrices, picks)]


def restrict_matrix(matrix: MatrixOptions, rule: Override) -> MatrixOptions:
    """The matrix with only the options that an override leaves.

    Args:
        rule: bits per weight (the largest option of at most that many, scales and permutation not counted against it), a range (low, high)
            of bits per weight, or the groups themselves as (bits, rows) pairs.

    Raises:
        OptionError: a rule of another kind, groups that do not fit the matrix, or nothing left.
    """
    front = matrix.front
    if isinstance(rule, (int, float)) and not isinstance(rule, bool):
        keep = np.flatnonzero(_mean_width(front) <= rule + 1e-9)[-1:]
    elif _is_groups(rule):
        return _with_fixed_groups(matrix, tuple((int(b), int(r)) for b, r in rule))  # type: ignore[union-attr]
    elif isinstance(rule, (tuple, list)) and len(rule) == 2 and all(isinstance(v, (int, float)) for v in rule):
        low, high = rule  # type: ignore[misc]
        widths = _mean_width(front)
        keep = np.flatnonzero((widths >= low - 1e-9) & (widths <= high + 1e-9))  # type: ignore[operator]
    else:
        raise OptionError(
            f"override of {matrix.key} is {rule!r}; expected bits, a range (low, high) of bits, or groups as (bits, rows) pairs"
        )
    if not len(keep):
        raise OptionError(f"override of {matrix.key} is {rule!r}: no option is left; codes of this matrix can have 2 to 8 bits on average")
    return dataclasses.replace(matrix, front=ParetoFront(front.in_features, front.bits[keep], front.error[keep], front.mix[keep]))


def apply_overrides(
    matrices: Sequence[MatrixOptions], overrides: Mapping[str, Override], *, where: str = "overrides"
) -> list[MatrixOptions]:
    """Apply overrides; the first pattern that matches a key counts.

    Args:
        overrides: pattern -> rule (see `restrict_matrix`). A pattern is a module key, a glob (`*.down_proj`), a role ("v", "head") or
            "layer N" / "layers N-M".

    Raises:
        OptionError: a pattern matches nothing.
    """
    made = []
    for matrix in matrices:
        rule = next((rule for pattern, rule in overrides.items() if _matches_override(pattern, matrix)), None)
        made.append(matrix if rule is None else restrict_matrix(matrix, rule))
    check_overrides(matrices, overrides, where=where)
    return made


def check_overrides(matrices: Sequence[MatrixOptions | Linear], overrides: Mapping[str, Override], *, where: str = "overrides") -> None:
    """What of `apply_overrides` needs no measurement.

    Raises:
        OptionError: a pattern matches nothing, a rule of another kind, groups that do not fit a matrix.
    """
    for pattern, rule in overrides.items():
        found = [matrix for matrix in matrices if _matches_override(pattern, matrix)]
        if not found:
            raise OptionError(
                f"{where}: {pattern!r} matches no matrix; expected a module key, a glob, a role "
                f"({', '.join(sorted({s.role for s in matrices}))}) or 'layer N'"
            )
        for matrix in found:
            if _is_groups(rule):
                _check_groups(matrix, tuple((int(b), int(r)) for b, r in rule))  # type: ignore[union-attr]
            elif not _is_number(rule) and not (isinstance(rule, (tuple, list)) and len(rule) == 2 and all(map(_is_number, rule))):
                raise OptionError(
                    f"override of {matrix.key} is {rule!r}; expected bits, a range (low, high) of bits, or groups as (bits, rows) pairs"
                )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _matches_override(pattern: str, matrix: MatrixOptions | Linear) -> bool:
    if found := re.fullmatch(r"layers? (\d+)(?:-(\d+))?", pattern):
        return int(found[1]) <= matrix.layer <= int(found[2] or found[1])
    return pattern in (matrix.key, matrix.role) or fnmatch.fnmatchcase(matrix.key, pattern)


def _mean_width(front: ParetoFront) -> np.ndarray:
    """Mean bits of a code per option."""
    return np.array([sum(b * r for b, r in front.groups(i)) / front.in_features for i in range(len(front))])


def _is_groups(rule: object) -> bool:
    return isinstance(rule, (tuple, list)) and len(rule) > 0 and all(isinstance(g, (tuple, list)) and len(g) == 2 for g in rule)


def _check_groups(matrix: MatrixOptions | Linear, groups: Groups) -> None:
    rows = [r for _, r in groups]
    fits = sum(rows) == matrix.in_features and all(r > 0 and r % 32 == 0 for r in rows)
    if not fits or any(b not in CODE_WIDTHS for b, _ in groups) or any(a[0] < b[0] for a, b in itertools.pairwise(groups)):
        raise OptionError(
            f"groups of {matrix.key} are {list(groups)[:8]}...; expected (bits, rows): "
            f"bits of {CODE_WIDTHS} not rising, rows multiples of 32 "
            f"that add up to {matrix.in_features}"
        )


def _with_fixed_groups(matrix: MatrixOptions, groups: Groups) -> MatrixOptions:
    _check_groups(matrix, groups)
    bits = stored_bits(groups, padded(matrix.out_features), bias=matrix.bias)
    near = int(np.abs(matrix.front.bits - bits).argmin())  # the error is read off the nearest option in size
    one = slice(near, near + 1)
    front = ParetoFront(matrix.in_features, np.array([bits]), matrix.front.error[one], matrix.front.mix[one], fixed=groups)
    return dataclasses.replace(matrix, front=front)


Frozen = Mapping[str, Any] | Allocation | str | os.PathLike[str]
_GROUPS_SUFFIX = ".q_groups"


def read_choices(source: Frozen) -> dict[str, Groups]:
    """Module key -> (bits, rows) from top to bottom.

    Args:
        source: such a mapping; an allocation; a JSON file of `Allocation.to_dict()` or of such a mapping; the directory of an EXL2 model.

    Raises:
        OptionError: none of these. FormatError: the model's files are damaged.
    """
    if isinstance(source, Allocation):
        return source.groups()
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if path.is_dir():
        return _choices_of_model(path)
    table = read_json(path, error=OptionError)
    found = {c["key"]: c["groups"] for c in table["choices"]} if isinstance(table.get("choices"), list) else table
    try:
        return {str(key): tuple((int(bits), int(rows)) for bits, rows in groups) for key, groups in found.items()}
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"{path}: found no choices; expected module key -> [[bits, rows], ...], or an allocation's `to_dict()`"
        ) from error


def _choices_of_model(path: Path) -> dict[str, Groups]:
    with TensorStore(path) as store:
        keys = [name.removesuffix(_GROUPS_SUFFIX) for name in store.names() if name.endswith(_GROUPS_SUFFIX)]
        if not keys:
            raise OptionError(f"{path}: found no EXL2 matrix; expected an EXL2 model whose choices are to be kept")
        return {
            key: tuple(parse_groups(store.read(key + _GROUPS_SUFFIX).tolist(), store.info(f"{key}.q_weight").shape[0], key, file=path))
            for key in keys
        }
