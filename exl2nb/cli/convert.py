"""`exl2nb convert` and `measure`: a dense model to EXL2, or to one JSON file from which any bitrate is solved."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from exl2nb.cli.console import Console
from exl2nb.cli.models import locate
from exl2nb.core.errors import OptionError
from exl2nb.core.show import size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("source", metavar="IN", help="model directory, hub id, or `demo`")
    parser.add_argument("destination", type=Path, metavar="OUT", help="directory to make; it appears when it is complete")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--bpw", type=float, help="bits per weight of the decoder's matrices, 2 to 8, everything counted")
    goal.add_argument("--bytes", metavar="SIZE", help="size of all weight files, such as 7GB; the head shares the budget")
    goal.add_argument("--fits", metavar="SIZE", help="memory for weights and cache, such as 24GiB; see --context")
    parser.add_argument("--context", type=int, default=0, help="with --fits: tokens of cache that must fit too")
    parser.add_argument("--cache", default="fp16", help="with --fits: mode of that cache")
    parser.add_argument("--head-bits", default=None, help="bits of the output head: 2, 3, 4, 5, 6 or 8, or auto (default 6 with --bpw)")
    parser.add_argument(
        "--override",
        metavar="WHICH=BITS",
        action="append",
        default=[],
        help="bits (4), a range (4-8) for 'layer 0', 'layers 4-7', a role (v, down, head), a name or '*.down_proj'; may be given again",
    )
    parser.add_argument("--frozen", metavar="MODEL", help="EXL2 directory or plan (JSON) whose choices stay as they are")
    parser.add_argument("--measurement", metavar="FILE", help="measurement of this model to solve from, as `exl2nb measure` writes it")
    parser.add_argument("--report-rows", type=int, help="rows of the same text kept out for the report (default 8)")
    parser.add_argument("--vision-bits", type=int, metavar="BITS", help="of a vision tower's linears; left out: the tower is copied")
    parser.add_argument("--polish", action="store_true", help="try plans under their true KL before one is carried out")
    add_calibration(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Convert and print what came out."""
    from exl2nb.converter.job import ConversionJob
    from exl2nb.io.hf_config import read_config
    from exl2nb.model.archs import ARCHS

    job = ConversionJob(
        locate(args.source, console.sink, revision=args.revision),
        args.destination,
        bpw=args.bpw,
        target=_target(args),
        head_bits=int(args.head_bits) if re.fullmatch("[0-9]{1,3}", args.head_bits or "") else args.head_bits,
        overrides=dict(map(_override, args.override)),
        frozen=args.frozen,
        measurement=args.measurement,
        polish=args.polish,
        vision_bits=args.vision_bits,
        **({} if args.report_rows is None else {"report_rows": args.report_rows}),
        **calibration_of(args),
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
        "device": done.device,
        "resumed_layers": done.resumed_layers,
        "quality": done.quality.to_dict() if done.quality else None,
        **({"tuned": done.tuned.to_dict()} if done.tuned else {}),
        "matrices": {matrix.key: matrix.bpw for matrix in done.matrices},
    }
    ours = read_config(done.path)["architectures"][0] in ARCHS
    then = (
        f"try: exl2nb generate {done.path} --prompt 'It was'"
        if ours
        else "Transformers reads it after `import exl2nb.integrations.transformers`"
    )
    console.result(data, f"{done}\n{size_text(done.nbytes)} in all; {then}")
    return 0


def _target(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.bytes is not None:
        return {"bytes": _size(args.bytes)}
    if args.fits is not None:
        return {"fits": _size(args.fits), "context": args.context, "cache": args.cache}
    return None


def _override(text: str) -> tuple[str, float | tuple[float, float]]:
    which, _, bits = text.rpartition("=")
    low, dash, high = bits.partition("-")
    try:
        rule = (float(low), float(high)) if dash else float(bits)
    except ValueError:
        rule = None
    if not which or rule is None:
        raise OptionError(f"--override is {text!r}; expected such as 'layer 0=6', 'v=5-8' or '*.down_proj=3'")
    return which, rule


def _size(text: str) -> int | str:
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else text


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("source", metavar="IN", help="model directory, hub id, or `demo`")
    parser.add_argument("out", metavar="OUT.json", type=Path, help="file to write; exllamav2 reads it too")
    add_calibration(parser)
    parser.add_argument("--bpw", type=float, action="append", metavar="B", help="also print the plan of this bitrate; may be given again")


def run_measure(args: argparse.Namespace, console: Console) -> int:
    """Measure, write the file, and print the requested plans."""
    from exl2nb.converter.api import measure

    found = measure(locate(args.source, console.sink, revision=args.revision), args.out, progress=console.sink, **calibration_of(args))
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


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--calibration",
        metavar="SOURCE",
        help="file (.txt, .jsonl, .parquet ...), dataset:owner/name, self, mixed or demo (default: mixed, the packaged mixture of texts)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of IN on the hub")
    parser.add_argument("--rows", type=int, help="calibration rows (default: by --effort)")
    parser.add_argument("--length", type=int, help="tokens a row (default: by --effort)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--effort", default="quick", help="quick (default), full, thorough, or tuned: learns from the dense model")
    parser.add_argument("--device", help="auto (default: the GPU where there is one), cpu or cuda: where the work is done")
    parser.add_argument(
        "--generic",
        action="store_true",
        default=None,
        help="linear by linear through Transformers, also for an architecture of our table (others are converted so in any case)",
    )
    parser.add_argument(
        "--work-dir", type=Path, help="keeps work in progress and the measurement, for later bitrates and after an interrupt"
    )


def calibration_of(args: argparse.Namespace) -> dict[str, Any]:
    """The same as keywords of `ConversionJob`."""
    return {name: getattr(args, name) for name in ("calibration", "rows", "length", "seed", "effort", "device", "work_dir", "generic")}
