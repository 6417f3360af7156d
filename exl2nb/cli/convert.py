"""`exl2nb convert` and `measure`: a dense model to EXL2, or to one JSON file from which any bitrate is solved."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exl2nb.cli.console import Console
from exl2nb.cli.models import add_flag, locate
from exl2nb.converter.convert_keywords import CONVERT_OPTIONS, MeasureOptions
from exl2nb.core.errors import OptionError
from exl2nb.core.show import size_text

CONVERT_FLAGS = [one for one in CONVERT_OPTIONS.values() if one.flag is not None and one.name != "bpw"]
MEASURE_OPTION_NAMES = tuple(MeasureOptions.__annotations__)
FLAG_ARGUMENTS: dict[str, dict[str, Any]] = {"overrides": {"action": "append"}}
"""Arguments of a flag that do not follow from the type of its option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("source", metavar="IN", help="model directory, hub id, or `demo`")
    parser.add_argument("destination", type=Path, metavar="OUT", help="directory to make; it appears when it is complete")
    goal = parser.add_mutually_exclusive_group(required=True)
    add_flag(goal, CONVERT_OPTIONS["bpw"])
    goal.add_argument("--bytes", metavar="SIZE", help="size of all weight files, such as 7GB; the head shares the budget")
    goal.add_argument("--fits", metavar="SIZE", help="memory for weights and cache, such as 24GiB; see --context")
    parser.add_argument("--context", type=int, default=0, help="with --fits: tokens of cache that must fit too")
    parser.add_argument("--cache", default="fp16", help="with --fits: mode of that cache")
    for one in CONVERT_FLAGS:
        if one.name not in MEASURE_OPTION_NAMES:
            add_flag(parser, one, **FLAG_ARGUMENTS.get(one.name, {}))
    add_calibration(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Convert and print what came out."""
    from exl2nb.converter.conversion_job import ConversionJob
    from exl2nb.io.hf_config import read_config
    from exl2nb.model.archs import ARCHS

    job = ConversionJob(
        locate(args.source, console.sink, revision=args.revision),
        args.destination,
        bpw=args.bpw,
        target=_target(args),
        **given(args, *(one.name for one in CONVERT_FLAGS)),
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


def _head_bits(text: str) -> int | str:
    return int(text) if re.fullmatch("[0-9]{1,3}", text) else text


_VALUE_READERS: dict[str, Callable[[Any], Any]] = {"overrides": lambda rules: dict(map(_override, rules)), "head_bits": _head_bits}


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
    from exl2nb.converter.conversion_job import measure

    found = measure(
        locate(args.source, console.sink, revision=args.revision), args.out, progress=console.sink, **given(args, *MEASURE_OPTION_NAMES)
    )
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
    for one in CONVERT_FLAGS:
        if one.name in MEASURE_OPTION_NAMES:
            add_flag(parser, one)
        if one.name == "calibration":
            parser.add_argument("--revision", help="branch, tag or commit of IN on the hub")


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What was given of these options, as keywords of `ConversionJob`."""
    found = {name: value for name in names if (value := getattr(args, name)) is not None}
    return {name: _VALUE_READERS[name](value) if name in _VALUE_READERS else value for name, value in found.items()}
