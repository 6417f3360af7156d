"""Options of `measure` and `convert`: declared in `ConvertParams`, and the types of their keywords for editors and signatures.

Imports nothing of the converter: its modules load when a conversion begins. `settings.py` checks what concerns several options.
`ConversionJob` documents the options; `tests/contracts/test_options.py` holds the types to the fields.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from exl2nb.core.options import check_options, option, options_of

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


EFFORT_OPTIONS = {
    "quick": Effort(32, 512),
    "full": Effort(80, 512),
    "thorough": Effort(128, 1024),
    "tuned": Effort(128, 512, tuned=True, more={"cpu": 256, "cuda": 512}),
}


MIN_LENGTH = 16  # tokens of a row of calibration text
REPORT_ROWS = 8


class MeasureOptions(TypedDict, total=False):
    """Options of `measure`."""

    calibration: Source
    rows: int | None
    length: int | None
    seed: int
    effort: Literal["quick", "full", "thorough", "tuned"]
    device: str | torch.device | None
    generic: bool | None
    work_dir: str | os.PathLike[str] | None


class ConvertOptions(MeasureOptions, total=False):
    """Options of `convert` besides `bpw`."""

    target: Mapping[str, Any] | None
    head_bits: int | str | None
    overrides: Mapping[str, Override] | None
    frozen: Frozen | None
    measurement: Measurement | str | os.PathLike[str] | None
    report_rows: int
    vision_bits: int | None
    polish: bool
    rounding: Rounding | None
    tuning: Tuning | None


@dataclass(frozen=True, kw_only=True)
class ConvertParams:
    """What a conversion is asked for. `ConversionJob` says what each option means.

    Raises:
        OptionError: a value of the wrong type or out of range.
    """

    bpw: float | None = option(None, "bits per weight of the decoder's matrices, 2 to 8, everything counted", range=(2, 8))
    calibration: Source = option(
        None,
        "file (.txt, .jsonl, .parquet ...), dataset:owner/name, self, mixed or demo (default: mixed, the packaged mixture of texts)",
        metavar="SOURCE",
    )
    rows: int | None = option(None, "calibration rows (default: by --effort)", range=(1, 1 << 16))
    length: int | None = option(None, "tokens a row (default: by --effort)", range=(MIN_LENGTH, 1 << 16))
    seed: int = option(0, "seed of the choice of rows", range=(0, (1 << 63) - 1))
    effort: str = option("quick", "quick (default), full, thorough, or tuned: learns from the dense model", choices=tuple(EFFORT_OPTIONS))
    device: str | torch.device | None = option(None, "auto (default: the GPU where there is one), cpu or cuda: where the work is done")
    generic: bool | None = option(
        None, "linear by linear through Transformers, also for an architecture of our table (others are converted so in any case)"
    )
    work_dir: str | os.PathLike[str] | None = option(
        None, "keeps work in progress and the measurement, for later bitrates and after an interrupt"
    )
    target: Mapping[str, Any] | None = option(None, "what `Measurement.solve` takes, in place of bpw", flag=False)
    head_bits: int | str | None = option(None, "bits of the output head: 2, 3, 4, 5, 6 or 8, or auto (default 6 with --bpw)")
    overrides: Mapping[str, Override] | None = option(
        None,
        "bits (4), a range (4-8) for 'layer 0', 'layers 4-7', a role (v, down, head), a name or '*.down_proj'; may be given again",
        flag="--override",
        metavar="WHICH=BITS",
    )
    frozen: Frozen | None = option(None, "EXL2 directory or plan (JSON) whose choices stay as they are", metavar="MODEL")
    measurement: Measurement | str | os.PathLike[str] | None = option(
        None, "measurement of this model to solve from, as `exl2nb measure` writes it", metavar="FILE"
    )
    report_rows: int = option(REPORT_ROWS, "rows of the same text kept out for the report (default 8)", range=(0, 1 << 12))
    vision_bits: int | None = option(None, "of a vision tower's linears; left out: the tower is copied", range=(2, 8), metavar="BITS")
    polish: bool = option(False, "try plans under their true KL before one is carried out")
    rounding: Rounding | None = option(None, "how codes are chosen", flag=False)
    tuning: Tuning | None = option(None, "what descends and what learns", flag=False)

    def __post_init__(self) -> None:
        check_options(self, where="convert")


CONVERT_OPTIONS = options_of(ConvertParams)
"""Everything that is known of each option."""
CONVERT_DEFAULTS = {name: one.default for name, one in CONVERT_OPTIONS.items()}
