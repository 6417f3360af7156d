"""What a GPTQ checkpoint's settings say about its tensors, and the rules that tensor headers must obey. Reads no data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exl2nb.core.errors import ConfigError
from exl2nb.quant.base import Header

WIDTHS = (2, 3, 4, 8)
SUFFIXES = ("qweight", "qzeros", "scales")  # and g_idx, where rows are not in the order of their groups
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_IN_FEATURES = 1 << 20
# checkpoint_format: what is added to a stored zero point; None: arranged in a way of its own
_FORMATS: dict[str, int | None] = {"gptq": 1, "gptq_v2": 0, "gptq_p": 0, "marlin": None, "bitblas": None, "exllama": None}
_REMAKE = "take a version with checkpoint_format gptq or gptq_v2"


@dataclass(frozen=True, kw_only=True)
class GptqSpec:
    """Settings of a checkpoint; the defaults are those of files without any.

    bits: of every matrix, None where nothing says. group_size: rows, -1 for one group, None where nothing says. zero_offset: added to a
    stored zero point (1: format v1, 0: v2). whole_words: v1 zeros were made by subtracting from whole 32-bit words, so that a zero of 0
    borrowed from its neighbour; otherwise field by field. overrides: matrices may differ (`dynamic`). sym, act_order: what the settings
    claim, for people: the tensors decide. checkpoint_format, quantizer: likewise.
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
        if bits is not None and (type(bits) is not int or bits not in WIDTHS):
            raise ConfigError(f"{where}: bits is {str(bits)[:40]}; expected one of {', '.join(map(str, WIDTHS))} for GPTQ")
        size = _first(block, "group_size", "q_group_size")
        if size is not None and (type(size) is not int or not (size == -1 or 0 < size <= MAX_IN_FEATURES)):
            raise ConfigError(f"{where}: group_size is {str(size)[:40]}; expected a positive number of rows, or -1 for one group")
        kind = _first(block, "checkpoint_format", "format") or "gptq"
        if kind not in _FORMATS or _FORMATS[kind] is None or (kind == "gptq_p" and bits == 3):
            raise ConfigError(f"{where}: checkpoint_format is {str(kind)[:40]!r}; expected gptq or gptq_v2: {_REMAKE}")
        packed = block.get("pack_dtype", "int32")
        if str(packed).removeprefix("torch.") != "int32":
            raise ConfigError(f"{where}: pack_dtype is {str(packed)[:40]!r}; expected int32: {_REMAKE} packed in int32")
        meta = block.get("meta")
        quantizer = str(meta.get("quantizer", "")) if isinstance(meta, Mapping) else ""
        return cls(
            bits=bits,
            group_size=size,
            zero_offset=_FORMATS[kind] or 0,
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
        prefix: module key.
        spec: the checkpoint's settings.
        in_features: K that the architecture wants; None = what the tensors say.
        out_features: N that it wants; not checked where None.
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
    return next((b for b in WIDTHS if 0 < in_features <= MAX_IN_FEATURES and in_features * b == word_rows * 32), None)


def _word_rows(rows: int, bits: int | None) -> str:
    widths = (bits,) if bits else WIDTHS
    counts = " or ".join(str(rows * b // 32) for b in widths if rows * b % 32 == 0)
    return f"{counts or 'whole words'} for {rows} rows at {' or '.join(map(str, widths))} bits"


def _first(block: Mapping[str, Any], *keys: str) -> Any:
    return next((block[key] for key in keys if block.get(key) is not None), None)


def _flag(block: Mapping[str, Any], key: str, where: str) -> bool | None:
    value = block.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} is {str(value)[:40]!r}; expected true or false")
    return value
