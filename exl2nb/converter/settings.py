"""What a conversion was asked for, checked: plain values. Knows nothing of how it is carried out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exl2nb.cache.spec import parse_mode
from exl2nb.converter.allocation import read_choices
from exl2nb.converter.blockwise import Blocks
from exl2nb.converter.calibration import Source
from exl2nb.converter.convert_keywords import EFFORT_OPTIONS, ConvertParams
from exl2nb.converter.measurement import HEAD_BITS, Measurement
from exl2nb.converter.quantization import Rounding
from exl2nb.converter.sizes import parse_bytes
from exl2nb.converter.tuning import Tuning
from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_keywords, shown
from exl2nb.quant.bits import head_mix


def describe_device(device: torch.device) -> str:
    """For people: "the CPU", or the GPU's name and number."""
    return "the CPU" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)} ({device})"


@dataclass(frozen=True, kw_only=True)
class ConversionSettings:
    """The options of `conversion_job.ConversionJob` after their checks. wanted: keywords of `Measurement.solve`; length: before the model
    caps it.

    least_rows: if the text is short, for a conversion that is tuned; None: rows.
    """

    wanted: dict[str, Any]
    calibration: Source
    rows: int
    length: int
    report_rows: int
    seed: int
    rounding: Rounding
    polish: bool
    measurement: Measurement | str | os.PathLike[str] | None
    vision_bits: int | None = None
    tuning: Tuning | None = None
    least_rows: int | None = None

    @property
    def sweeps(self) -> int:
        """Of coordinate descent after GPTQ."""
        return 0 if self.tuning is None else self.tuning.descent

    @property
    def blocks(self) -> Blocks | None:
        """How every layer learns after it is rounded, if it does."""
        return Blocks(self.tuning.blocks, seed=self.seed) if self.tuning is not None and self.tuning.blocks else None


def check_settings(asked: ConvertParams) -> ConversionSettings:
    """Check what concerns several options, and fill in what was left out.

    Raises:
        OptionError: options that contradict each other, or a value that the part of the converter it belongs to refuses.
        FormatError: `frozen` is a damaged model.
    """
    if asked.bpw is None and not asked.target:
        raise OptionError("convert: bpw is None; expected a number from 2 to 8, or target={'bytes': ...} or target={'fits': ...}")
    if asked.bpw is not None and asked.target is not None:
        raise OptionError("convert: found bpw and target, expected one of them and not both")
    _check_target(asked.target)
    overrides, tuning, head_bits = asked.overrides, asked.tuning, asked.head_bits
    if overrides is not None and not (isinstance(overrides, Mapping) and all(isinstance(pattern, str) for pattern in overrides)):
        raise OptionError(f"convert: overrides is {shown(overrides)}; expected a dict: a matrix, a glob, a role or 'layer N' -> bits")
    if asked.polish and asked.rows == 1:
        raise OptionError("convert: polish is True and rows is 1; expected 2 rows or more: one of them judges")
    if tuning is not None and not isinstance(tuning, Tuning):
        raise OptionError(f"convert: tuning is {shown(tuning)}; expected a Tuning (exl2nb.converter.tuning)")
    if head_bits not in (None, "auto"):
        head_mix(head_bits)  # type: ignore[arg-type]
    kept = read_choices(asked.frozen) if asked.frozen is not None else {}
    if asked.vision_bits is not None:
        head_mix(asked.vision_bits, name="vision_bits")
    given = {name: value for name, value in (("overrides", overrides), ("frozen", kept)) if value}
    wanted = {"bpw": float(asked.bpw)} if asked.bpw is not None else dict(asked.target or {})
    head_bits = head_bits if head_bits is not None else HEAD_BITS if asked.bpw is not None else "auto"
    effort = EFFORT_OPTIONS[asked.effort]
    return ConversionSettings(
        wanted={**wanted, "head_bits": head_bits, **given},
        calibration=asked.calibration,
        rows=asked.rows if asked.rows is not None else effort.rows,
        length=asked.length if asked.length is not None else effort.length,
        report_rows=asked.report_rows,
        seed=asked.seed,
        rounding=asked.rounding or Rounding(),
        polish=asked.polish,
        measurement=asked.measurement,
        vision_bits=asked.vision_bits,
        tuning=tuning if tuning is not None else Tuning() if effort.tuned else None,
    )


def _check_target(target: Any) -> None:
    if target is None:
        return
    if not isinstance(target, Mapping):
        raise OptionError(f"convert: target is {shown(target)}; expected a dict: {{'bytes': ...}} or {{'fits': ...}}")
    check_keywords(target, ["bytes", "fits", "context", "cache"], where="convert: target")
    for name in ("bytes", "fits"):
        if target.get(name) is not None:
            parse_bytes(target[name], where=f"convert: target: {name}")
    if "cache" in target:
        parse_mode(target["cache"], where="convert: target: cache")
