"""The rules of an EXL2 matrix, each a FormatError that names file, tensor, found and expected. Reads nothing but what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from exl2nb.quant.base import Header, broken
from exl2nb.quant.bits import WIDTHS, padded

SUFFIXES = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
MAX_IN_FEATURES = 65536  # indices are 16 bits wide inside some readers
_DTYPES = {
    "q_weight": torch.int32,
    "q_scale": torch.int32,
    "q_scale_max": torch.float16,
    "q_groups": torch.int16,
    "bias": torch.float16,
}
_DIMENSIONS = {"q_weight": 2, "q_scale": 2, "q_scale_max": 1, "q_groups": 1, "q_invperm": 1, "bias": 1}
_INDEX_DTYPES = (torch.int32, torch.int16, torch.int64)


def check_headers(
    infos: Mapping[str, Header],
    prefix: str,
    *,
    file: object = "",
    in_features: int | None = None,
    out_features: int | None = None,
) -> None:
    """Check what dtypes and shapes alone can tell, before any data is read.

    Args:
        infos: suffix -> anything with dtype and shape, for the five SUFFIXES and perhaps "bias".
        prefix: module key, for messages.
        file: for messages.
        in_features: K that the architecture wants, or None.
        out_features: N that it wants, before padding, or None.
    """
    for suffix, info in infos.items():
        dtypes = _INDEX_DTYPES if suffix == "q_invperm" else (_DTYPES[suffix],)
        if info.dtype not in dtypes or len(info.shape) != _DIMENSIONS[suffix]:
            wanted = f"{_short(dtypes[0])} with {_DIMENSIONS[suffix]} dimension(s)"
            raise broken(file, f"{prefix}.{suffix}", f"{_short(info.dtype)} {tuple(info.shape)}", wanted)
    shape = {suffix: tuple(info.shape) for suffix, info in infos.items()}
    columns, groups, rows = shape["q_weight"][1], shape["q_scale"][0], shape["q_invperm"][0]

    def rule(suffix: str, good: bool, expected: str) -> None:
        if not good:
            raise broken(file, f"{prefix}.{suffix}", f"shape {shape[suffix]}", expected)

    rule("q_weight", columns > 0 and columns % 32 == 0, "a positive multiple of 32 columns")
    rule("q_scale", shape["q_scale"][1] * 8 == columns, f"{columns // 8} words per group, one for 8 of the {columns} columns of q_weight")
    rule("q_scale", groups > 0, "at least one group")
    rule("q_scale_max", shape["q_scale_max"][0] == groups, f"{groups}, one per group of q_scale")
    rule("q_groups", shape["q_groups"][0] == 2 * groups, f"{2 * groups}, two per group of q_scale")
    rule("q_invperm", 0 < rows <= MAX_IN_FEATURES and rows % 32 == 0, f"a positive multiple of 32 up to {MAX_IN_FEATURES}")
    if "bias" in shape:
        rule("bias", shape["bias"][0] == columns, f"{columns}, one per column of q_weight")
    if in_features is not None:
        rule("q_invperm", rows == in_features, f"{in_features}, the layer's in_features")
    if out_features is not None:
        rule(
            "q_weight",
            columns == padded(out_features),
            f"{padded(out_features)} columns, the layer's {out_features} out_features padded to 32",
        )


def parse_groups(table: Sequence[int], word_rows: int, prefix: str, *, file: object = "") -> list[tuple[int, int]]:
    """Turn the values of q_groups into `(bits, rows)` per group, checking every rule of the table.

    Args:
        table: `[bits, first word row]` pairs, flat.
        word_rows: R, the rows of q_weight.
        prefix: module key, for messages.
        file: for messages.
    """

    def rule(good: bool, found: str, expected: str) -> None:
        if not good:
            raise broken(file, f"{prefix}.q_groups", found, expected)

    rule(len(table) >= 2 and len(table) % 2 == 0, f"{len(table)} values", "two per group, at least one group")
    widths, starts = list(table[::2]), [*table[1::2], word_rows]
    rule(starts[0] == 0, f"group 0 starting at word row {starts[0]}", "0")
    groups = []
    for g, bits in enumerate(widths):
        rule(bits in WIDTHS, f"group {g} of {bits} bits", f"one of {', '.join(map(str, WIDTHS))}")
        rule(g == 0 or bits <= widths[g - 1], f"group {g} of {bits} bits after one of {widths[g - 1]}", "widths that never rise")
        words = starts[g + 1] - starts[g]
        rule(words > 0, f"group {g} from word row {starts[g]} to {starts[g + 1]} of {word_rows}", "at least one unit of 32 rows")
        rule(
            words % bits == 0, f"group {g} of {words} word rows at {bits} bits", f"a multiple of {bits} word rows, which is 32 weight rows"
        )
        groups.append((bits, words // bits * 32))
    return groups


def check_permutation(invperm: Tensor, rows: int, prefix: str, *, file: object = "") -> None:
    """q_invperm, integers `(K,)`, must name each of the `rows` stored rows once."""
    name = f"{prefix}.q_invperm"
    if invperm.shape[0] != rows:
        raise broken(file, name, f"{invperm.shape[0]} rows", f"{rows}, the sum over the groups of q_groups")
    low, high = int(invperm.min()), int(invperm.max())
    if low < 0 or high >= rows:
        raise broken(file, name, f"values from {low} to {high}", f"a permutation of 0..{rows - 1}")
    counts = torch.bincount(invperm.long(), minlength=rows)
    if int(counts.max()) != 1:
        raise broken(file, name, f"the value {int(counts.argmax())} {int(counts.max())} times", f"a permutation of 0..{rows - 1}")


def check_scales(scale_max: Tensor, groups: Sequence[tuple[int, int]], prefix: str, *, file: object = "") -> None:
    """q_scale_max, float16 `(G,)`, must be finite, not negative, and so small that the largest weight of its group is a finite fp16."""
    values = scale_max.double()
    zeros = torch.tensor([float(1 << (bits - 1)) for bits, _ in groups], dtype=torch.float64, device=values.device)
    bad = ~(torch.isfinite(values) & (values >= 0) & (values * zeros < 65504))
    if bool(bad.any()):
        g = int(bad.nonzero()[0])
        limit = f"a finite number from 0 to below 65504 / {int(zeros[g])}"
        raise broken(file, f"{prefix}.q_scale_max", f"{float(values[g])} in group {g} of {groups[g][0]} bits", limit)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
