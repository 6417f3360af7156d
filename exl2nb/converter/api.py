"""The converter's public functions beside `convert`: measure once, solve for any bitrate."""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exl2nb.converter.job import ConversionJob
from exl2nb.converter.keywords import DEFAULTS, MeasureOptions
from exl2nb.converter.measurement import Measurement
from exl2nb.converter.work import Work
from exl2nb.core.options import spelled_out
from exl2nb.core.progress import Sink, showing
from exl2nb.io.atomic import check_writable

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEMO = Path(__file__).parent.parent / "demo_model" / "measurement.json"


@spelled_out(MeasureOptions, DEFAULTS)
def measure(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    progress: Sink | Literal["auto"] | None = "auto",
    **options: Unpack[MeasureOptions],
) -> Measurement:
    """Measure what every width would cost each matrix of a dense model: good for any bitrate.

    Args:
        src: model directory or hub id.
        out: JSON file to write; exllamav2 0.3.2 reads it too. Until then, work in progress is kept in a hidden folder next to
            it, from which the next call continues.
        progress: takes the events; "auto" and None as in `load`.
        options: calibration, rows, length, seed, effort, work_dir, device, as in `ConversionJob`.

    Raises:
        ConversionError: `out` is no name of a file that can be written. Otherwise as `ConversionJob`.

    Returns:
        The measurement: `.solve(bpw=...)`, and `convert(..., measurement=...)`.
    """
    with showing(progress, "measure") as sink, tempfile.TemporaryDirectory() as temporary:
        beside = None
        if out is not None:
            path = check_writable(out).absolute()
            if options.get("work_dir") is None:
                options["work_dir"] = beside = path.parent / f".{path.name}.work"
        found = ConversionJob(src, Path(temporary) / "none", bpw=8.0, **options).measure(sink)
        if out is not None:
            found.save(out)
        if beside is not None:
            with closing(Work(beside)) as work:
                work.clear()
    return found


def demo_measurement() -> Measurement:
    """The demo model's measurement that comes with the package: solves any bitrate in milliseconds, nothing is run."""
    return Measurement.load(DEMO)
