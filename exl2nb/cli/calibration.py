"""What `convert` and `measure` share: the options that say on which text, with what effort and where."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--calibration", metavar="SOURCE", help="file (.txt, .jsonl, .parquet ...), dataset:owner/name, or self; default: the packaged text"
    )
    parser.add_argument("--rows", type=int, help="calibration rows (default: by --effort)")
    parser.add_argument("--length", type=int, help="tokens a row (default: by --effort)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--effort", default="quick", help="quick (default), full or thorough")
    parser.add_argument("--device", help="auto (default: the GPU where there is one), cpu or cuda: where the model runs meanwhile")
    parser.add_argument(
        "--work-dir", type=Path, help="keeps work in progress and the measurement, for later bitrates and after an interrupt"
    )


def calibration_of(args: argparse.Namespace) -> dict[str, Any]:
    """The same as keywords of `ConversionJob`."""
    return {name: getattr(args, name) for name in ("calibration", "rows", "length", "seed", "effort", "device", "work_dir")}
