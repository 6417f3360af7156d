"""GPTQ matrices: settings, rules of the headers, read, reconstruct, sort by group. Knows nothing of models; the bytes are in FORMAT.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl2nb.core.errors import ConfigError, FormatError
from exl2nb.quant.pack import unpack_codes
from exl2nb.quant.weight_source import Header, Store

GPTQ_WIDTHS = (2, 3, 4, 8)
GPTQ_SUFFIXES = ("qweight", "qzeros", "scales")  # and g_idx, where rows are not in the order of their groups
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_IN_FEATURES = 1 << 20
# checkpoint_format: what is added to a stored zero point; None: arranged in a way of its own
_ZERO_OFFSETS: dict[str, int | None] = {"gptq": 1, "gptq_v2": 0, "gptq_p": 0, "marlin": None, "bitblas": None, "exllama": None}
_REMAKE_HINT = "take a version with checkpoint_format gptq or gptq_v2"


@dataclass(frozen=True, kw_only=True)
class GptqSpec:
    """Settings of a checkpoint; the defaults are those of files without any.

    bits: of every matrix, None where nothing says. group_size: rows, -1 for one group, None where nothing says. zero_offset: added to a
    stored zero point (1: format v1, 0: v2). whole_words: v1 zeros were made by subtracting from whole 32-bit words, so that a zero of 0
    borrowed from its neighbour; otherwise field by field. overrides: matrices may differ (`dynamic`). sym, act_order: what the settings
    claim, for information: the tensors decide. checkpoint_format, quantizer: likewise.
    """

    bits: int | None = None
    group_size: int | None = None
    zero_offset: int = 1
    whole_words: bool = False
    overrides: bool = False
    sym: bool | None = None
    act_order: bool | None = None
    checkpoint_format: str = "gptq"
    quantizer: str = ""

    @classmethod
    def read(cls, block: Mapping[str, Any], where: str) -> GptqSpec:
        """Read `quantization_config`.

        Raises:
            ConfigError: a value that cannot be used; names it and lists what can.
        """
        bits = _first(block, "bits", "w_bit", "wbits")
        if bits is not None and (type(bits) is not int or bits not in GPTQ_WIDTHS):
            raise ConfigError(f"{where}: bits is {str(bits)[:40]}; expected one of {', '.join(map(str, GPTQ_WIDTHS))} for GPTQ")
        size = _first(block, "group_size", "q_group_size")
        if size is not None and (type(size) is not int or not (size == -1 or 0 < size <= MAX_IN_FEATURES)):
            raise ConfigError(f"{where}: group_size is {str(size)[:40]}; expected a positive number of rows, or -1 for one group")
        kind = _first(block, "checkpoint_format", "format") or "gptq"
        if kind not in _ZERO_OFFSETS or _ZERO_OFFSETS[kind] is None or (kind == "gptq_p" and bits == 3):
            raise ConfigError(f"{where}: checkpoint_format is {str(kind)[:40]!r}; expected gptq or gptq_v2: {_REMAKE_HINT}")
        packed = block.get("pack_dtype", "int32")
        if str(packed).removeprefix("torch.") != "int32":
            raise ConfigError(f"{where}: pack_dtype is {str(packed)[:40]!r}; expected int32: {_REMAKE_HINT} packed in int32")
        meta = block.get("meta")
        quantizer = str(meta.get("quantizer", "")) if isinstance(meta, Mapping) else ""
        return cls(
            bits=bits,
            group_size=size,
            zero_offset=_ZERO_OFFSETS[kind] or 0,
            whole_words="gptqmodel" in quantizer.lower(),
            overrides=bool(block.get("dynamic")),
            sym=_flag(block, "sym", where),
            act_order=_flag(block, "desc_act", where),
            checkpoint_format=kind,
            quantizer=quantizer[:80],
        )


def header_problems(
    infos: Mapping[str, Header], prefix: str, spec: GptqSpec, *, in_features: int | None = None, out_features: int | None = None
) -> list[str]:
    """Every rule that the headers of one matrix break, each as `tensor 'x': found ..., expected ...`.

    Args:
        infos: dtype and shape by suffix; g_idx may be missing.
        in_features: K that the architecture expects; None = taken from the tensors.
        out_features: N that it expects; not checked where None.
    """
    problems: list[str] = []

    def rule(suffix: str, good: bool, found: str, expected: str) -> bool:
        if not good:
            problems.append(f"tensor {f'{prefix}.{suffix}'!r}: found {found}, expected {expected}")
        return good

    for suffix, info in infos.items():
        kinds = SCALE_TYPES if suffix == "scales" else (torch.int32, torch.int64) if suffix == "g_idx" else (torch.int32,)
        rule(suffix, info.dtype in kinds, f"dtype {info.dtype}", " or ".join(str(kind).removeprefix("torch.") for kind in kinds))
        rank = 1 if suffix == "g_idx" else 2
        if not rule(suffix, len(info.shape) == rank, f"shape {tuple(info.shape)}", f"{rank} dimensions"):
            return problems
    words, columns = infos["qweight"].shape
    rows = in_features if in_features is not None else in_features_of(infos, spec)
    if out_features is not None and in_features is not None and (words, columns * 8) == (in_features, out_features):
        rule(
            "qweight", False, f"shape {(words, columns)}, which is AWQ's", "GPTQ's: the model is in format AWQ, take a GPTQ or EXL2 version"
        )
        return problems
    bits = bits_of(words, rows)
    wanted = spec.bits if spec.bits and not spec.overrides else None
    if not rule("qweight", bits is not None and bits == (wanted or bits), f"{words} rows of words", _word_rows(rows, wanted)):
        return problems
    assert bits is not None
    if out_features is not None:
        rule("qweight", columns == out_features, f"{columns} columns", f"{out_features}, the layer's out_features")
    groups = infos["scales"].shape[0]
    if rule("scales", groups > 0, "zero groups", "at least one") and spec.group_size and not spec.overrides:
        count = 1 if spec.group_size == -1 else -(-rows // spec.group_size)
        rule("scales", groups == count, f"{groups} groups", f"{count}: {rows} rows in groups of {spec.group_size}")
    elif groups > 0 and "g_idx" not in infos:
        rule("scales", rows % groups == 0, f"{groups} groups", f"a divisor of {rows} rows, since neither group_size nor g_idx is there")
    rule("scales", infos["scales"].shape[1] == columns, f"{infos['scales'].shape[1]} columns", f"{columns} as in qweight")
    want = (groups, -(-columns * bits // 32))
    rule("qzeros", tuple(infos["qzeros"].shape) == want, f"shape {tuple(infos['qzeros'].shape)}", f"{want}")
    if "g_idx" in infos:
        rule("g_idx", infos["g_idx"].shape[0] == rows, f"{infos['g_idx'].shape[0]} entries", f"{rows}, one per input row")
    return problems


def in_features_of(infos: Mapping[str, Header], spec: GptqSpec) -> int:
    """K by the tensors: what g_idx has, else what the bits of the settings (4 where they say nothing) make of qweight."""
    if "g_idx" in infos and len(infos["g_idx"].shape) == 1:
        return int(infos["g_idx"].shape[0])
    return int(infos["qweight"].shape[0]) * 32 // (spec.bits or 4)


def bits_of(word_rows: int, in_features: int) -> int | None:
    """Width of the codes that make K rows fill `word_rows` words, None where none does."""
    return next((b for b in GPTQ_WIDTHS if 0 < in_features <= MAX_IN_FEATURES and in_features * b == word_rows * 32), None)


def _word_rows(rows: int, bits: int | None) -> str:
    widths = (bits,) if bits else GPTQ_WIDTHS
    counts = " or ".join(str(rows * b // 32) for b in widths if rows * b % 32 == 0)
    return f"{counts or 'whole words'} for {rows} rows at {' or '.join(map(str, widths))} bits"


def _first(block: Mapping[str, Any], *keys: str) -> Any:
    return next((block[key] for key in keys if block.get(key) is not None), None)


def _flag(block: Mapping[str, Any], key: str, where: str) -> bool | None:
    value = block.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} is {str(value)[:40]!r}; expected true or false")
    return value


@dataclass(frozen=True, eq=False, kw_only=True)
class GptqTensors:
    """One GPTQ matrix: K rows (in_features), N columns (out_features), G groups.

    qweight: int32 `(K * bits / 32, N)`, codes as a bit stream down each column, rows in original order. scales: f16, or f32 where f16 could
    not hold them, `(G, N)`. zeros: int16 `(G, N)`, true zero points, or None where all are `2**(bits - 1)`. group_of: int64 `(K,)`, the
    group of every row. bits: 2, 3, 4 or 8.

        W[k, n] = scales[g, n] * (code[k, n] - zeros[g, n]),  g = group_of[k]
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor
    bits: int

    @classmethod
    def read(
        cls,
        store: Store,
        prefix: str,
        spec: GptqSpec,
        *,
        in_features: int | None = None,
        out_features: int | None = None,
        columns: Tensor | None = None,
    ) -> GptqTensors:
        """Read and validate the matrix under a module key.

        Args:
            in_features: K that the architecture expects; None = taken from the tensors.
            out_features: N that it expects, of the matrix as stored; not checked where None.
            columns: integers, the columns to keep (a part of a fused matrix); None = all.

        Raises:
            FormatError: names the file, and every rule that is broken.
        """
        infos = {suffix: store.info(f"{prefix}.{suffix}") for suffix in GPTQ_SUFFIXES}
        if f"{prefix}.g_idx" in store:
            infos["g_idx"] = store.info(f"{prefix}.g_idx")
        file = getattr(infos["qweight"], "path", "")
        _raise(file, header_problems(infos, prefix, spec, in_features=in_features, out_features=out_features))
        tensors = {suffix: store.read(f"{prefix}.{suffix}") for suffix in infos}
        rows = in_features if in_features is not None else in_features_of(infos, spec)
        bits = bits_of(tensors["qweight"].shape[0], rows)
        assert bits is not None  # header_problems
        scales, groups = tensors["scales"], len(tensors["scales"])
        group_of, problems = _group_of(tensors.get("g_idx"), rows, groups, spec)
        if not bool(torch.isfinite(scales).all()):
            problems.append(f"{int((~torch.isfinite(scales)).sum())} values of scales that are NaN or infinite, expected finite ones")
        _raise(file, [f"tensor {prefix!r}: found {problem}" for problem in problems])
        zeros = unpack_zeros(tensors["qzeros"], bits, scales.shape[1], spec)
        qweight = tensors["qweight"]
        if columns is not None:
            qweight, scales, zeros = (part.index_select(1, columns) for part in (qweight, scales, zeros))
        symmetric = bool((zeros == 1 << (bits - 1)).all())
        half = scales.half()
        exact = scales.dtype == torch.float16 or torch.equal(half.float(), scales.float())
        return cls(
            qweight=qweight.contiguous(),
            scales=(half if exact else scales.float()).contiguous(),
            zeros=None if symmetric else zeros.contiguous(),
            group_of=group_of,
            bits=bits,
        )

    @property
    def in_features(self) -> int:
        """K."""
        return self.group_of.shape[0]

    @property
    def out_features(self) -> int:
        """N."""
        return self.qweight.shape[1]

    @property
    def group_rows(self) -> list[int]:
        """Rows of every group."""
        return torch.bincount(self.group_of, minlength=len(self.scales)).tolist()

    def codes(self) -> Tensor:
        """Unpack the codes: uint8 `(K, N)` in original row order."""
        extra = -len(self.qweight) % self.bits  # the packer works in units of 32 rows
        return unpack_codes(torch.nn.functional.pad(self.qweight, (0, 0, 0, extra)), self.bits)[: self.in_features]

    def reconstruct(self) -> Tensor:
        """The matrix in f32 `(K, N)`, the transpose of an nn.Linear weight."""
        middle = 1 << (self.bits - 1)
        zeros = torch.full_like(self.scales, middle).float() if self.zeros is None else self.zeros.float()
        return (self.codes().float() - zeros[self.group_of]) * self.scales.float()[self.group_of]

    def packed(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """Arguments of `ops.pack_gptq`: rows sorted by group, every group filled up to whole units of 32 rows, empty groups dropped.

        Returns:
            qweight as it stands, scales `(G, N)`, zeros `(G, N)` or None, perm int32 `(K with padding,)`, where padding rows say K, or None
            for the order that is there, and the rows of every group, int32 `(G,)`.
        """
        rows = torch.bincount(self.group_of, minlength=len(self.scales))
        used = rows > 0
        scales, zeros = self.scales[used], None if self.zeros is None else self.zeros[used]
        order = torch.argsort(self.group_of, stable=True)
        counts = rows[used]
        padded = (counts + 31) // 32 * 32
        if torch.equal(counts, padded):
            identity = torch.equal(order, torch.arange(len(order)))
            return self.qweight, scales, zeros, None if identity else order.to(torch.int32), padded.to(torch.int32)
        perm = torch.full((int(padded.sum()),), self.in_features, dtype=torch.int32)
        start = torch.repeat_interleave(padded.cumsum(0) - padded - (counts.cumsum(0) - counts), counts)
        perm[start + torch.arange(len(order))] = order.to(torch.int32)
        return self.qweight, scales, zeros, perm, padded.to(torch.int32)

    def packed_half(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor] | None:
        """The same for kernels that read scales in f16 only; None where such a matrix cannot be had.

        That is where a scale lies outside of f16's normal numbers, or where a group needs padding rows and a zero point that they would
        have to hold is no code.
        """
        qweight, scales, zeros, perm, rows = self.packed()
        size = scales[scales != 0].abs()
        limits = torch.finfo(torch.float16)
        if scales.dtype != torch.float16 and len(size) and (float(size.min()) < limits.tiny or float(size.max()) > limits.max):
            return None
        padded = perm is not None and len(perm) > self.in_features
        if padded and zeros is not None and int(zeros.max()) >= 1 << self.bits:
            return None
        return qweight, scales.half(), zeros, perm, rows


def unpack_zeros(qzeros: Tensor, bits: int, columns: int, spec: GptqSpec) -> Tensor:
    """True zero points.

    Args:
        qzeros: int32 `(G, ceil(N * bits / 32))`, packed along the columns.
        bits: width of a field.
        columns: N.
        spec: says which convention the fields follow.

    Returns:
        int16 `(G, N)`. Format v1 stores z - 1. Where z is 0 that does not fit: GPTQModel's files borrow from the whole word (its reader
        adds in the same way; 3-bit fields wrap one by one), other files mean 2**bits by it.
    """
    words = qzeros
    if spec.zero_offset and spec.whole_words and bits != 3:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        total = (words.to(torch.int64) + ones) & 0xFFFFFFFF
        words = torch.where(total > 0x7FFFFFFF, total - (1 << 32), total).to(torch.int32)
    stream = torch.nn.functional.pad(words, (0, -words.shape[1] % bits)).T.contiguous()
    fields = unpack_codes(stream, bits)[:columns].T.to(torch.int16)
    if not spec.zero_offset or (spec.whole_words and bits != 3):
        return fields
    fields = fields + 1
    return fields & ((1 << bits) - 1) if spec.whole_words else fields


def _group_of(g_idx: Tensor | None, rows: int, groups: int, spec: GptqSpec) -> tuple[Tensor, list[str]]:
    """The group of every row, and what is wrong with g_idx. Without one, or with one of zeros, groups follow each other."""
    if g_idx is None or (groups > 1 and not bool(g_idx.any())):
        size = -(-rows // groups) if spec.overrides or not spec.group_size else rows if spec.group_size == -1 else spec.group_size
        return torch.arange(rows) // size, []
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        return g_idx.long(), [f"g_idx with groups from {low} to {high}, expected 0 to {groups - 1}, the groups of scales"]
    return g_idx.long(), []


def _raise(file: object, problems: Sequence[str]) -> None:
    if problems:
        raise FormatError(f"{f'{file}: ' if file else ''}{'; '.join(problems)}")
