"""Options of `measure` and `convert` as types: what an editor completes, and what the signatures in a notebook spell out.

Imports nothing of the converter: its modules load when a conversion begins. `tests/converter/test_keywords.py` holds it to `ConversionJob`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch

    from exl2nb.converter.allocation import Frozen, Override
    from exl2nb.converter.calibration import Source
    from exl2nb.converter.measurement import Measurement
    from exl2nb.converter.quantization import Rounding
    from exl2nb.converter.tuning import Tuning


@dataclass(frozen=True)
class Effort:
    """How much calibration: rows and tokens per row; and whether the result is tuned (converter.tuning).

    more: rows by kind of device where the whole model learns and the text has so many.
    """

    rows: int
    length: int
    tuned: bool = False
    more: Mapping[str, int] = field(default_factory=dict)


EFFORTS = {
    "quick": Effort(32, 512),
    "full": Effort(80, 512),
    "thorough": Effort(128, 1024),
    "tuned": Effort(128, 512, tuned=True, more={"cpu": 256, "cuda": 512}),
}


class MeasureOptions(TypedDict, total=False):
    """Options of `measure`."""

    calibration: Source
    rows: int | None
    length: int | None
    seed: int
    effort: Literal["quick", "full", "thorough", "tuned"]
    work_dir: str | os.PathLike[str] | None
    device: str | torch.device | None
    generic: bool | None


class ConvertOptions(MeasureOptions, total=False):
    """Options of `convert`, all of them `ConversionJob`'s."""

    head_bits: int | str | None
    target: Mapping[str, Any] | None
    overrides: Mapping[str, Override] | None
    frozen: Frozen | None
    report_rows: int
    measurement: Measurement | str | os.PathLike[str] | None
    rounding: Rounding | None
    polish: bool
    vision_bits: int | None
    tuning: Tuning | None


DEFAULTS: dict[str, Any] = {"report_rows": 8, "seed": 0, "effort": "quick", "polish": False}
"""Of the options that are not None."""
