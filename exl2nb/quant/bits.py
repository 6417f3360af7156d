"""Arithmetic of bits: how rows are cut into groups, what a matrix costs, what the head's mixes are. Knows nothing of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exl2nb.core.errors import OptionError

CODE_WIDTHS = (2, 3, 4, 5, 6, 8)
Groups = list[tuple[int, int]]  # (bits, rows) from top to bottom


@dataclass(frozen=True)
class Mix:
    """A recipe for one matrix: widths in falling order, the share of rows each gets, and its group size in rows."""

    bits: tuple[int, ...]
    bits_prop: tuple[float, ...]
    group_size: tuple[int, ...]

    def groups(self, in_features: int) -> Groups:
        """Cut `in_features` rows into groups (see group_layout)."""
        return group_layout(in_features, self.bits, self.bits_prop, self.group_size)


HEAD_MIXES: dict[int, Mix] = {  # head_bits -> mix
    2: Mix((4, 2), (0.3, 0.7), (32, 32)),
    3: Mix((4, 3), (0.15, 0.85), (32, 32)),
    4: Mix((6, 4), (0.15, 0.85), (32, 32)),
    5: Mix((6, 5), (0.15, 0.85), (128, 128)),
    6: Mix((8, 6), (0.15, 0.85), (128, 128)),
    8: Mix((8,), (1.0,), (128,)),
}


def head_mix(head_bits: int, name: str = "head_bits") -> Mix:
    """The head's mix. name: of the option, for messages.

    Raises:
        OptionError: `head_bits` is not one of the table.
    """
    if not isinstance(head_bits, int) or head_bits not in HEAD_MIXES:
        raise OptionError(f"{name} is {head_bits!r}; expected one of {', '.join(map(str, HEAD_MIXES))}")
    return HEAD_MIXES[head_bits]


def group_layout(
    in_features: int, bits: Sequence[int], bits_prop: Sequence[float], group_size: int | Sequence[int] | Mapping[int | str, int]
) -> Groups:
    """Cut the rows of a matrix into groups the way measurement files mean it.

    Each width in turn takes `ceil(min(K * share, rows left) / group_size)` whole groups; the last group is shortened so that the rows add
    up to K.

    Args:
        in_features: K, a multiple of 32.
        bits: widths, strictly falling, each one of CODE_WIDTHS.
        bits_prop: share of rows per width, adding up to 1.
        group_size: rows per group, a multiple of 32: one number, one per width, or a mapping from width (also as a string) to rows.

    Returns:
        `(bits, rows)` per group, top to bottom; later widths may get no group on a small K.

    Raises:
        OptionError: any of these rules is broken.

    Example:
        >>> layout = group_layout(4096, [8, 5, 4], [0.05, 0.1, 0.85], {"8": 32, "5": 128, "4": 128})
        >>> [sum(b == w for b, _ in layout) for w in (8, 5, 4)], layout[-1]
        ([7, 4, 27], (4, 32))
    """
    sizes = _sizes(bits, group_size)
    if in_features <= 0 or in_features % 32:
        raise OptionError(f"in_features is {in_features}; expected a positive multiple of 32")
    if not bits or len(bits_prop) != len(bits) or any(b not in CODE_WIDTHS for b in bits) or list(bits) != sorted(set(bits), reverse=True):
        raise OptionError(
            f"bits is {list(bits)} with {len(bits_prop)} shares; expected strictly falling widths of {CODE_WIDTHS} and as many shares"
        )
    if not math.isclose(sum(bits_prop), 1, abs_tol=1e-6) or min(bits_prop) < 0:
        raise OptionError(f"bits_prop is {list(bits_prop)}; expected shares that add up to 1")
    groups: Groups = []
    left = in_features
    for width, share, size in zip(bits, bits_prop, sizes):
        count = max(0, math.ceil(min(in_features * share, left) / size))
        left -= count * size
        groups += [(width, size)] * count
    assert left <= 0  # every width rounds its share up to whole groups
    width, rows = groups[-1]
    groups[-1] = (width, rows + left)
    return groups


def stored_bits(groups: Sequence[tuple[int, int]], out_features: int, *, bias: bool = False) -> int:
    """Bits that one matrix takes on disk: codes, scales, group table, permutation and bias.

    Args:
        groups: `(bits, rows)` per group.
        out_features: N as stored, padding included.
        bias: whether there is one.

    Example: 4096 x 4096 at 4 bits in groups of 128.
        >>> round(stored_bits([(4, 128)] * 32, 4096) / 4096**2, 4)
        4.0392
    """
    rows = sum(r for _, r in groups)
    codes = sum(b * r for b, r in groups) * out_features
    return codes + len(groups) * (48 + 4 * out_features) + 32 * rows + (16 * out_features if bias else 0)


def bits_per_weight(groups: Sequence[tuple[int, int]], out_features: int) -> float:
    """`stored_bits` divided by the weights, the bias left out."""
    return stored_bits(groups, out_features) / (sum(r for _, r in groups) * out_features)


def padded(features: int) -> int:
    """`features` rounded up to a multiple of 32, which is how many columns are stored."""
    return features + -features % 32


def _sizes(bits: Sequence[int], group_size: int | Sequence[int] | Mapping[int | str, int]) -> list[int]:
    if isinstance(group_size, int):
        sizes = [group_size] * len(bits)
    elif isinstance(group_size, Mapping):
        sizes = [group_size.get(b, group_size.get(str(b), 0)) for b in bits]
    else:
        sizes = list(group_size)
    if len(sizes) != len(bits) or any(type(s) is not int or s <= 0 or s % 32 for s in sizes):
        raise OptionError(f"group_size is {group_size!r} for widths {list(bits)}; expected a positive multiple of 32 for each")
    return sizes
