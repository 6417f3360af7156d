"""What a conversion was asked for, checked: plain values. Knows nothing of how it is carried out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exl2nb.cache.spec import parse_mode
from exl2nb.converter.allocation import Frozen, read_choices
from exl2nb.converter.blockwise import Blocks
from exl2nb.converter.calibration import MIN_LENGTH, Source
from exl2nb.converter.keywords import EFFORTS
from exl2nb.converter.measurement import HEAD_BITS, Measurement
from exl2nb.converter.quantization import Rounding
from exl2nb.converter.sizes import parse_bytes
from exl2nb.converter.tuning import Tuning
from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_keywords, check_range, shown
from exl2nb.quant.bits import head_mix


def describe_device(device: torch.device) -> str:
    """For people: "the CPU", or the GPU's name and number."""
    return "the CPU" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)} ({device})"


REPORT_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `job.ConversionJob` after their checks. wanted: keywords of `Measurement.solve`; length: before the model caps it.

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


def settings(
    *,
    bpw: float | None,
    head_bits: int | str | None,
    target: Mapping[str, Any] | None,
    overrides: Mapping[str, Any] | None,
    frozen: Frozen | None,
    calibration: Source,
    rows: int | None,
    length: int | None,
    report_rows: int,
    seed: int,
    effort: str,
    rounding: Rounding | None,
    polish: bool,
    measurement: Measurement | str | os.PathLike[str] | None,
    vision_bits: int | None = None,
    tuning: Tuning | None = None,
) -> Settings:
    """Check the options and fill in what was left out.

    Raises:
        OptionError: an option out of range. FormatError: `frozen` is a damaged model.
    """
    if bpw is None and not target:
        raise OptionError("convert: bpw is None; expected a number from 2 to 8, or target={'bytes': ...} or target={'fits': ...}")
    if bpw is not None and target is not None:
        raise OptionError("convert: found bpw and target, expected one of them and not both")
    if bpw is not None:
        check_range("bpw", bpw, 2, 8, where="convert")
    _check_target(target)
    if overrides is not None and not (isinstance(overrides, Mapping) and all(isinstance(pattern, str) for pattern in overrides)):
        raise OptionError(f"convert: overrides is {shown(overrides)}; expected a dict: a matrix, a glob, a role or 'layer N' -> bits")
    if effort not in EFFORTS:
        raise OptionError(f"convert: effort is {effort!r}; expected one of {', '.join(EFFORTS)}")
    for name, value, low, high in (
        ("rows", rows, 1, 1 << 16),
        ("length", length, MIN_LENGTH, 1 << 16),
        ("report_rows", report_rows, 0, 1 << 12),
        ("seed", seed, 0, (1 << 63) - 1),
    ):
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise OptionError(f"convert: {name} is {value!r}; expected a whole number from {low} to {high}")
    if not isinstance(polish, bool):
        raise OptionError(f"convert: polish is {polish!r}; expected True or False")
    if polish and rows == 1:
        raise OptionError("convert: polish is True and rows is 1; expected 2 rows or more: one of them judges")
    if tuning is not None and not isinstance(tuning, Tuning):
        raise OptionError(f"convert: tuning is {shown(tuning)}; expected a Tuning (exl2nb.converter.tuning)")
    if head_bits not in (None, "auto"):
        head_mix(head_bits)  # type: ignore[arg-type]
    kept = read_choices(frozen) if frozen is not None else {}
    if vision_bits is not None:
        head_mix(vision_bits, name="vision_bits")
    given = {name: value for name, value in (("overrides", overrides), ("frozen", kept)) if value}
    wanted = {"bpw": float(bpw)} if bpw is not None else dict(target or {})
    head_bits = head_bits if head_bits is not None else HEAD_BITS if bpw is not None else "auto"
    return Settings(
        wanted={**wanted, "head_bits": head_bits, **given},
        calibration=calibration,
        rows=rows if rows is not None else EFFORTS[effort].rows,
        length=length if length is not None else EFFORTS[effort].length,
        report_rows=report_rows,
        seed=seed,
        rounding=rounding or Rounding(),
        polish=polish,
        measurement=measurement,
        vision_bits=vision_bits,
        tuning=tuning if tuning is not None else Tuning() if EFFORTS[effort].tuned else None,
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
