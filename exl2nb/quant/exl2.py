"""EXL2 matrices: read, check, reconstruct, encode. Knows nothing of models or of how tensors are stored; the bytes are in FORMAT.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from exl2nb.quant.base import Store, broken
from exl2nb.quant.bits import WIDTHS, padded, stored_bits
from exl2nb.quant.exl2_check import SUFFIXES, check_headers, check_permutation, check_scales, parse_groups
from exl2nb.quant.pack import pack_codes, pack_scales, unpack_codes, unpack_scales

__all__ = ["Exl2Tensors", "encode"]


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
            store: where the tensors are.
            prefix: module key, without a trailing dot.
            in_features: K that the architecture wants; not checked where None.
            out_features: N that it wants, before padding; not checked where None.

        Raises:
            FormatError: a rule of FORMAT.md is broken. Names file, tensor, found and expected.
        """
        infos = {
            suffix: store.info(f"{prefix}.{suffix}") for suffix in (*SUFFIXES, "bias") if suffix != "bias" or f"{prefix}.bias" in store
        }
        check_headers(infos, prefix, file=_file(infos), in_features=in_features, out_features=out_features)
        tensors = {suffix: store.read(f"{prefix}.{suffix}") for suffix in infos}
        return cls(**tensors).validate(prefix, file=_file(infos), in_features=in_features, out_features=out_features)

    def validate(
        self, prefix: str = "weight", *, file: object = "", in_features: int | None = None, out_features: int | None = None
    ) -> Exl2Tensors:
        """Check every rule of the format.

        Returns:
            The same tensors, q_invperm as int32.

        Raises:
            FormatError: names `file`, the tensor (`prefix` and suffix), found and expected.
        """
        tensors = {suffix: getattr(self, suffix) for suffix in SUFFIXES} | ({} if self.bias is None else {"bias": self.bias})
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
        named = {f"{prefix}.{suffix}": getattr(self, suffix) for suffix in SUFFIXES}
        return named if self.bias is None else named | {f"{prefix}.bias": self.bias}

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
        if bits not in WIDTHS:
            raise broken("", "encode.q_groups", f"group {g} of {bits} bits", f"one of {', '.join(map(str, WIDTHS))}")
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
