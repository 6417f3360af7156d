"""One unit of an EXL2 matrix, 32 rows of one column, through every stage from the words to the weights. Reads slices, never the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.quant.exl2 import EXL2_SUFFIXES, check_headers, check_permutation, check_scales, parse_groups
from exl2nb.quant.pack import ROWS_PER_UNIT, unpack_codes, unpack_scales
from exl2nb.quant.weight_source import Header

__all__ = ["ROWS_PER_UNIT", "Exl2Group", "Exl2Slices", "Exl2Unit"]


class SliceStore(Protocol):
    """Where slices come from: an `io.shards.TensorStore` or anything alike."""

    def info(self, name: str, /) -> Header:
        """Anything with dtype and shape."""
        ...

    def read(self, name: str, /, *, rows: tuple[int, int] | None = None) -> Tensor:
        """Rows first to last + 1 of a tensor, all of them where None."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Exl2Unit:
    """32 stored rows of one column: b words of b-bit codes, one scale.

    group: its group. unit: number of the unit inside the group. column: of the matrix. bits: b. first_row: its first stored row.
    first_word: its first row of q_weight. words: b unsigned 32-bit words. scale_word: the word of q_scale that holds its scale index,
    unsigned. scale_index: 0..15. scale_max: fp16 value of q_scale_max. unit_step: fp16 of scale_max / 256. step: fp16 size of one code
    step. codes: 32 of 0..2**b - 1. rows: original row of each of them. weights: float16 `(32,)`.
    """

    group: int
    unit: int
    column: int
    bits: int
    first_row: int
    first_word: int
    words: tuple[int, ...]
    scale_word: int
    scale_index: int
    scale_max: float
    unit_step: float
    step: float
    codes: tuple[int, ...]
    rows: tuple[int, ...]
    weights: np.ndarray

    @property
    def zero(self) -> int:
        """The code that stands for 0."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Exl2Group:
    """A group of L rows, all N columns of it.

    bits: width of a code. codes: uint8 `(L, N)`, rows in stored order. scale_index: uint8 `(N,)`, 0..15. steps: float32 `(N,)`, the size of
    a code step. rows: int64 `(L,)`, the original row of each.
    """

    bits: int
    codes: Tensor
    scale_index: Tensor
    steps: Tensor
    rows: Tensor

    @property
    def weights(self) -> Tensor:
        """float32 `(L, N)`, the values that the format gives, rounded to fp16."""
        return ((self.codes.float() - (1 << (self.bits - 1))) * self.steps).half().float()


class Exl2Slices:
    """A matrix whose words and scales are read unit by unit; group table, permutation and largest steps are read and checked at once.

    Args:
        store: where the tensors are.
        prefix: module key, such as "model.layers.0.self_attn.q_proj".

    Raises:
        FormatError: a rule of FORMAT.md is broken.
    """

    def __init__(self, store: SliceStore, prefix: str) -> None:
        self._store, self.prefix = store, prefix
        infos = {suffix: store.info(f"{prefix}.{suffix}") for suffix in EXL2_SUFFIXES}
        file = getattr(infos["q_weight"], "path", "")
        check_headers(infos, prefix, file=file)
        words, self.out_features = infos["q_weight"].shape
        table = store.read(f"{prefix}.q_groups").tolist()
        self.groups: list[tuple[int, int]] = parse_groups(table, words, prefix, file=file)
        self.in_features: int = sum(rows for _, rows in self.groups)
        invperm, self._scale_max = store.read(f"{prefix}.q_invperm"), store.read(f"{prefix}.q_scale_max")
        check_permutation(invperm, self.in_features, prefix, file=file)
        check_scales(self._scale_max, self.groups, prefix, file=file)
        self._stored_row = invperm.long()
        self._perm = torch.argsort(self._stored_row)
        self._first_word = table[1::2]
        self._first_row = [0]
        for _, rows in self.groups:
            self._first_row.append(self._first_row[-1] + rows)

    def units(self, group: int) -> int:
        """Units of 32 rows in a group."""
        return self.groups[group][1] // ROWS_PER_UNIT

    def locate(self, row: int) -> tuple[int, int, int]:
        """Group, unit in it and place in the unit (0..31) of an original row.

        Raises:
            OptionError: there is no such row.
        """
        if not 0 <= row < self.in_features:
            raise OptionError(f"{self.prefix}: row is {row}; expected 0 to {self.in_features - 1}")
        stored = int(self._stored_row[row])
        group = next(g for g in range(len(self.groups)) if stored < self._first_row[g + 1])
        unit, place = divmod(stored - self._first_row[group], ROWS_PER_UNIT)
        return group, unit, place

    def group(self, group: int) -> Exl2Group:
        """Read one group, all its rows and columns.

        Cost: its words, L * N * bits / 8 bytes, and one row of scale words.

        Raises:
            OptionError: no such group.
        """
        if not 0 <= group < len(self.groups):
            raise OptionError(f"{self.prefix}: group is {group}; expected 0 to {len(self.groups) - 1}")
        (bits, length), word, row = self.groups[group], self._first_word[group], self._first_row[group]
        words = self._store.read(f"{self.prefix}.q_weight", rows=(word, word + length * bits // 32))
        index = unpack_scales(self._store.read(f"{self.prefix}.q_scale", rows=(group, group + 1)))[0]
        unit_step = (self._scale_max[group].float() * torch.tensor(1 / 256)).half()
        steps = (unit_step.float() * (index.float() + 1) ** 2).half().float()
        codes = unpack_codes(words.contiguous(), bits)
        return Exl2Group(bits=bits, codes=codes, scale_index=index, steps=steps, rows=self._perm[row : row + length])

    def unit(self, group: int, unit: int, column: int) -> Exl2Unit:
        """Read one unit.

        Cost: b rows of words and one row of scale words, whatever the size of the matrix.

        Raises:
            OptionError: no such group, unit or column.
        """
        for name, value, end in (("group", group, len(self.groups)), ("column", column, self.out_features)):
            if not 0 <= value < end:
                raise OptionError(f"{self.prefix}: {name} is {value}; expected 0 to {end - 1}")
        if not 0 <= unit < self.units(group):
            raise OptionError(f"{self.prefix}: unit is {unit}; group {group} has units 0 to {self.units(group) - 1}")
        bits = self.groups[group][0]
        first_word, first_row = self._first_word[group] + unit * bits, self._first_row[group] + unit * ROWS_PER_UNIT
        words = self._store.read(f"{self.prefix}.q_weight", rows=(first_word, first_word + bits))[:, column]
        codes = unpack_codes(words[:, None].contiguous(), bits)[:, 0]
        scale_word = int(self._store.read(f"{self.prefix}.q_scale", rows=(group, group + 1))[0, column // 8]) & 0xFFFFFFFF
        index = scale_word >> (4 * (column % 8)) & 15
        largest = self._scale_max[group].float()
        unit_step = (largest * torch.tensor(1 / 256)).half()  # often a subnormal: this rounding is part of the format
        step = (unit_step.float() * (index + 1) ** 2).half()
        weights = ((codes.float() - (1 << (bits - 1))) * step.float()).half()
        return Exl2Unit(
            group=group,
            unit=unit,
            column=column,
            bits=bits,
            first_row=first_row,
            first_word=first_word,
            words=tuple(word & 0xFFFFFFFF for word in words.tolist()),
            scale_word=scale_word,
            scale_index=index,
            scale_max=float(largest),
            unit_step=float(unit_step),
            step=float(step),
            codes=tuple(codes.tolist()),
            rows=tuple(self._perm[first_row : first_row + ROWS_PER_UNIT].tolist()),
            weights=weights.numpy(),
        )
