"""`exl2nb measure`: what every width would cost each matrix of a dense model, as one JSON file that any bitrate is solved from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from exl2nb.cli.calibration import add_calibration, calibration_of
from exl2nb.cli.console import Console
from exl2nb.cli.models import locate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("source", metavar="IN", help="model directory, hub id, or `demo`")
    parser.add_argument("out", metavar="OUT.json", type=Path, help="file to write; exllamav2 reads it too")
    add_calibration(parser)
    parser.add_argument("--bpw", type=float, action="append", metavar="B", help="also print the plan of this bitrate; may be given again")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, write the file, and print the plans that were asked for."""
    from exl2nb.converter.api import measure

    found = measure(locate(args.source, console.sink), args.out, progress=console.sink, **calibration_of(args))
    plans = [found.solve(bpw) for bpw in args.bpw or ()]
    low, high = found.range
    data: dict[str, Any] = {
        "path": str(args.out),
        "matrices": len(found.linears),
        "least_bpw": low,
        "most_bpw": high,
        "calibration": found.calibration,
        "plans": [plan.to_dict() for plan in plans],
    }
    lines = [f"{args.out}: {len(found.linears)} matrices, {low:.2f} to {high:.2f} bits per weight", *(repr(plan) for plan in plans)]
    console.result(data, "\n".join(lines))
    return 0
