"""`exl2nb convert`: a dense model directory in, an EXL2 model directory out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from exl2nb.cli.console import Console, mega
from exl2nb.cli.models import locate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("source", metavar="IN", help="model directory, hub id, or `demo`")
    parser.add_argument("destination", type=Path, metavar="OUT", help="directory to make; it appears when it is complete")
    parser.add_argument("--bpw", type=float, required=True, help="bits per weight of the decoder's matrices, 2 to 8, everything counted")
    parser.add_argument("--head-bits", type=int, default=6, help="bits of the output head: 2, 3, 4, 5, 6 or 8 (default 6)")
    parser.add_argument("--calibration", metavar="TEXTFILE", help="text to calibrate on (.txt, .xz, .gz); default: the packaged text")
    parser.add_argument("--rows", type=int, help="calibration rows (default: by --effort)")
    parser.add_argument("--length", type=int, help="tokens a row (default: by --effort)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--effort", default="quick", help="quick (default) or thorough")
    parser.add_argument(
        "--work-dir", type=Path, help="keeps work in progress and the measurement, for later bitrates and after an interrupt"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Convert and print what came out."""
    from exl2nb.converter.job import ConversionJob

    job = ConversionJob(
        locate(args.source, console.sink),
        args.destination,
        bpw=args.bpw,
        head_bits=args.head_bits,
        calibration=args.calibration,
        rows=args.rows,
        length=args.length,
        seed=args.seed,
        effort=args.effort,
        work_dir=args.work_dir,
    )
    done = job.run(console.sink)
    data: dict[str, Any] = {
        "path": str(done.path),
        "target_bpw": done.target_bpw,
        "bpw": done.bpw,
        "head_bits": done.head_bits,
        "bytes": done.nbytes,
        "seconds": done.seconds,
        "calibration": done.calibration,
        "resumed_layers": done.resumed_layers,
        "matrices": {matrix.key: matrix.bpw for matrix in done.matrices},
    }
    console.result(data, f"{done}\n{mega(done.nbytes)} in all; try: exl2nb generate {done.path} --prompt 'It was'")
    return 0
