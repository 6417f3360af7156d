"""EXL2 matrices: check, read, reconstruct, encode. Knows nothing of models or of how tensors are stored; the bytes are in FORMAT.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from exl2nb.quant.bits import CODE_WIDTHS, padded, stored_bits
from exl2nb.quant.pack import pack_codes, pack_scales, unpack_codes, unpack_scales
from exl2nb.quant.weight_source import Header, Store, broken

EXL2_SUFFIXES = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
MAX_IN_FEATURES = 65536  # indices are 16 bits wide inside some readers
_TENSOR_DTYPES = {
    "q_weight": torch.int32,
    "q_scale": torch.int32,
    "q_scale_max": torch.float16,
    "q_groups": torch.int16,
    "bias": torch.float16,
}
_TENSOR_DIMENSIONS = {"q_weight": 2, "q_scale": 2, "q_scale_max": 1, "q_groups": 1, "q_invperm": 1, "bias": 1}
_INDEX_DTYPES = (torch.int32, torch.int16, torch.int64)


def check_headers(
    infos: Mapping[str, Header],
    prefix: str,
    *,
    file: object = "",
    in_features: int | None = None,
    out_features: int | None = None,
) -> None:
    """Check dtypes and shapes, before any data is read.

    Args:
        infos: suffix -> anything with dtype and shape, for the five EXL2_SUFFIXES and perhaps "bias".
        in_features: K that the architecture expects, or None.
        out_features: N that it expects, before padding, or None.
    """
    for suffix, info in infos.items():
        dtypes = _INDEX_DTYPES if suffix == "q_invperm" else (_TENSOR_DTYPES[suffix],)
        if info.dtype not in dtypes or len(info.shape) != _TENSOR_DIMENSIONS[suffix]:
            wanted = f"{_short(dtypes[0])} with {_TENSOR_DIMENSIONS[suffix]} dimension(s)"
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
    """

    def rule(good: bool, found: str, expected: str) -> None:
        if not good:
            raise broken(file, f"{prefix}.q_groups", found, expected)

    rule(len(table) >= 2 and len(table) % 2 == 0, f"{len(table)} values", "two per group, at least one group")
    widths, starts = list(table[::2]), [*table[1::2], word_rows]
    rule(starts[0] == 0, f"group 0 starting at word row {starts[0]}", "0")
    groups = []
    for g, bits in enumerate(widths):
        rule(bits in CODE_WIDTHS, f"group {g} of {bits} bits", f"one of {', '.join(map(str, CODE_WIDTHS))}")
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


@dataclass(frozen=True, eq=False)
class Exl2Tensors:
    """One EXL2 matrix as stored: K rows (in_features), N columns (out_features, a multiple of 32), G groups, R rows of words.

    q_weight: int32 `(R, N)`, codes as a bit stream down each column. q_scale: int32 `(G, N / 8)`, 4-bit scale indices.
    q_scale_max: float16 `(G,)`, largest step of each group. q_groups: int16 `(2 * G,)`, pairs (bits, first row of words).
    q_invperm: int32 `(K,)`, stored row of each original row. bias: float16 `(N,)` or None.
    """

    q_weight: Tensor
    q_scale: Tensor
    q_scale_max: Tensor
    q_groups: Tensor
    q_invperm: Tensor
    bias: Tensor | None = None

    @classmethod
    def read(cls, store: Store, prefix: str, *, in_features: int | None = None, out_features: int | None = None) -> Exl2Tensors:
        """Read and validate the matrix under a module key such as "model.layers.0.self_attn.q_proj".

        Args:
            in_features: K that the architecture expects; not checked where None.
            out_features: N that it expects, before padding; not checked where None.

        Raises:
            FormatError: a rule of FORMAT.md is broken. Names file, tensor, found and expected.
        """
        infos = {
            suffix: store.info(f"{prefix}.{suffix}") for suffix in (*EXL2_SUFFIXES, "bias") if suffix != "bias" or f"{prefix}.bias" in store
        }
        check_headers(infos, prefix, file=_file(infos), in_features=in_features, out_features=out_features)
        tensors = {suffix: store.read(f"{prefix}.{suffix}") for suffix in infos}
        return cls(**tensors).validate(prefix, file=_file(infos), in_features=in_features, out_features=out_features)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str) -> Exl2Tensors:
        """The matrix under a module key, of what `tensors` has given; not validated. Raises KeyError where one is missing."""
        found = {suffix: tensors[f"{prefix}.{suffix}"] for suffix in EXL2_SUFFIXES}
        return cls(**found, bias=tensors.get(f"{prefix}.bias"))

    def validate(
        self, prefix: str = "weight", *, file: object = "", in_features: int | None = None, out_features: int | None = None
    ) -> Exl2Tensors:
        """Check every rule of the format.

        Returns:
            The same tensors, q_invperm as int32.

        Raises:
            FormatError: names `file`, the tensor (`prefix` and suffix), found and expected.
        """
        tensors = {suffix: getattr(self, suffix) for suffix in EXL2_SUFFIXES} | ({} if self.bias is None else {"bias": self.bias})
        check_headers(tensors, prefix, file=file, in_features=in_features, out_features=out_features)
        groups = parse_groups(self.q_groups.tolist(), self.q_weight.shape[0], prefix, file=file)
        check_permutation(self.q_invperm, sum(rows for _, rows in groups), prefix, file=file)
        check_scales(self.q_scale_max, groups, prefix, file=file)
        return Exl2Tensors(**{**tensors, "q_invperm": self.q_invperm.to(torch.int32)})

    @property
    def in_features(self) -> int:
        """K."""
        return self.q_invperm.shape[0]

    @property
    def out_features(self) -> int:
        """N as stored, padding included."""
        return self.q_weight.shape[1]

    @property
    def groups(self) -> list[tuple[int, int]]:
        """`(bits, rows)` of every group, top to bottom."""
        table = [*self.q_groups.tolist(), 0, self.q_weight.shape[0]]
        return [(table[i], (table[i + 3] - table[i + 1]) * 32 // table[i]) for i in range(0, len(table) - 2, 2)]

    @property
    def perm(self) -> Tensor:
        """int64 `(K,)`: the original row that each stored row holds."""
        return torch.argsort(self.q_invperm.long())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors("").values())

    @property
    def bpw(self) -> float:
        """Bits per weight: everything stored but the bias, over K * N."""
        return stored_bits(self.groups, self.out_features) / (self.in_features * self.out_features)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Name -> tensor, as a file holds them; shapes as in the class."""
        named = {f"{prefix}.{suffix}": getattr(self, suffix) for suffix in EXL2_SUFFIXES}
        return named if self.bias is None else named | {f"{prefix}.bias": self.bias}

    def columns(self, index: Tensor) -> Exl2Tensors:
        """Some of the outputs, in this order; the last one again up to a multiple of 32.

        Args:
            index: int64 `(n,)`, n at least 1.
        """
        index = torch.cat([index, index[-1:].expand(padded(len(index)) - len(index))])
        scales = pack_scales(self.scale_index()[:, index].contiguous())
        return replace(
            self,
            q_weight=self.q_weight[:, index].contiguous(),
            q_scale=scales,
            bias=None if self.bias is None else self.bias[index],
        )

    def rows(self, first: int, last: int) -> Exl2Tensors:
        """The stored rows [first, last), multiples of 32, as a matrix of the inputs `perm[first:last]` in that order; without the bias."""
        groups, kept, begin, word = [], [], 0, 0
        start_word = end_word = 0
        for g, (bits, rows) in enumerate(self.groups):
            low, high = max(begin, first), min(begin + rows, last)
            if low < high:
                if not groups:
                    start_word = word + (low - begin) * bits // 32
                end_word = word + (high - begin) * bits // 32
                groups.append((bits, high - low))
                kept.append(g)
            begin, word = begin + rows, word + rows * bits // 32
        starts = [0, *accumulate(rows * bits // 32 for bits, rows in groups)]
        table = torch.tensor([value for (bits, _), at in zip(groups, starts) for value in (bits, at)], dtype=torch.int16)
        return Exl2Tensors(
            q_weight=self.q_weight[start_word:end_word].contiguous(),
            q_scale=self.q_scale[kept].contiguous(),
            q_scale_max=self.q_scale_max[kept].contiguous(),
            q_groups=table,
            q_invperm=torch.arange(last - first, dtype=torch.int32),
        )

    def codes(self) -> Tensor:
        """Unpack the codes: uint8 `(K, N)` in stored row order."""
        parts, first = [], 0
        for bits, run in groupby(self.groups, key=lambda group: group[0]):
            words = sum(rows for _, rows in run) * bits // 32
            parts.append(unpack_codes(self.q_weight[first : first + words], bits))
            first += words
        return torch.cat(parts)

    def scale_index(self) -> Tensor:
        """Unpack the scale indices: uint8 `(G, N)`, 0..15."""
        return unpack_scales(self.q_scale)

    def steps(self, prescale: float = 1.0) -> Tensor:
        """Size of one code step: float16 `(G, N)`, rounded to fp16 in the order the format prescribes.

        Args:
            prescale: factor that some architectures put on a matrix; files always hold the unscaled weights.
        """
        factor = torch.tensor(prescale / 256, dtype=torch.float32, device=self.q_scale_max.device)
        unit = (self.q_scale_max.float() * factor).half()  # often a subnormal: this rounding is part of the format
        square = (self.scale_index().float() + 1).square()  # 1..256, exact
        return (square * unit.float()[:, None]).half()

    def reconstruct(self, prescale: float = 1.0) -> Tensor:
        """Turn the matrix back into fp16, rows in their original order.

        Returns:
            float16 `(K, N)`, contiguous: the transpose of an nn.Linear weight, padding columns included.

        Cost: 7 bytes of memory per weight while it runs. Source: FORMAT.md, "Reconstruction".
        """
        codes, steps = self.codes(), self.steps(prescale).float()
        stored = torch.empty(codes.shape, dtype=torch.float16, device=codes.device)
        first = 0
        for (bits, rows), step in zip(self.groups, steps):
            part = slice(first, first + rows)
            # both factors are fp16 values, so their fp32 product is exact and the cast below rounds once
            stored[part] = (codes[part].float() - (1 << (bits - 1))) * step
            first += rows
        return stored.index_select(0, self.q_invperm.long())


def encode(
    codes: Tensor,
    scale_index: Tensor,
    scale_max: Tensor,
    groups: Sequence[tuple[int, int]],
    perm: Tensor,
    *,
    bias: Tensor | None = None,
) -> Exl2Tensors:
    """Pack a quantised matrix.

    Columns are padded to a multiple of 32 with the zero code, scale index 0 and bias 0.

    Args:
        codes: uint8 `(K, N)` in stored row order, offset binary: the zero level of a b-bit group is `2**(b - 1)`.
        scale_index: uint8 `(G, N)`, 0..15; the step is `(index + 1)**2 * scale_max / 256`.
        scale_max: float16 `(G,)`.
        groups: `(bits, rows)` per group, widths not rising, rows multiples of 32 that add up to K.
        perm: integers `(K,)`, the original row that each stored row holds.
        bias: float16 `(N,)`, or None.

    Raises:
        FormatError: a rule of the format is broken.
    """
    for g, (bits, _) in enumerate(groups):
        if bits not in CODE_WIDTHS:
            raise broken("", "encode.q_groups", f"group {g} of {bits} bits", f"one of {', '.join(map(str, CODE_WIDTHS))}")
    check_permutation(perm, sum(rows for _, rows in groups), "encode")
    columns = codes.shape[-1]
    extra = padded(columns) - columns
    words, table, first, word = [], [], 0, 0
    for bits, run in groupby(groups, key=lambda group: group[0]):
        start = first
        for _, rows in run:
            table += [bits, word]
            first, word = first + rows, word + rows * bits // 32
        part = torch.nn.functional.pad(codes[start:first], (0, extra), value=1 << (bits - 1))
        words.append(pack_codes(part, bits))
    result = Exl2Tensors(
        q_weight=torch.cat(words),
        q_scale=pack_scales(torch.nn.functional.pad(scale_index, (0, extra))),
        q_scale_max=scale_max,
        q_groups=torch.tensor(table, dtype=torch.int16),
        q_invperm=torch.argsort(perm).to(torch.int32),
        bias=None if bias is None else torch.nn.functional.pad(bias, (0, extra)),
    )
    return result.validate("encode", in_features=codes.shape[0], out_features=columns)


def _file(infos: Mapping[str, Any]) -> object:
    return getattr(infos["q_weight"], "path", "")
