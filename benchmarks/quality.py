"""Closeness to the source at another converter's sizes: convert to its bytes, measure KL on other text, print the table; or ablate ideas.

    python benchmarks/quality.py MODEL --calibration TEXT --text TEXT [--limits tests/data/demo-peer-quality.json] [--bpw 2.5 3 3.5 4 5 6]
    python benchmarks/quality.py MODEL --calibration TEXT --text TEXT --bpw 3 --ablate
    python benchmarks/quality.py MODEL --calibration TEXT --text TEXT --effort tuned --seed 1

Every file is made no larger than the other converter's (`--limits`, `bytes` per bitrate), from `--calibration-rows` x 512 tokens of the
calibration text (with `--effort`: as many as that says), with the head sharing the budget. KL and perplexity are the format's cost alone:
the torch reference network in fp32 on the reconstructed weights. `--ablate` leaves out one idea at a time, or adds one that is off unless
asked for. One sweep serves all: keep it with `--work-dir`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from convert import quality

from exl2nb.converter import allocation
from exl2nb.converter.calibration import read_calibration
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.convert_keywords import EFFORT_OPTIONS
from exl2nb.converter.quantization import Rounding
from exl2nb.converter.result import Conversion
from exl2nb.converter.tuning import Tuning
from exl2nb.core.progress import TextSink
from exl2nb.eval.rows import token_rows
from exl2nb.tokenizer.tokenizer import Tokenizer

LIMITS = Path(__file__).parent.parent / "tests" / "data" / "demo-peer-quality.json"
IDEAS: dict[str, dict[str, Any]] = {
    "everything": {},
    "head at 6 bits": {"head_bits": 6},
    "every matrix the same width": {"equal": True},
    "one width within a matrix": {"one_width": True},
    "columns uncoupled": {"rounding": {"coupled": False}},
    "no asymmetric calibration": {"rounding": {"strength": 0.0}},
    "inputs not refreshed": {"rounding": {"refresh": False}},
    "o and down without the stream's error": {"rounding": {"residual": 0.0}},
    "tokens count alike": {"rounding": {"weighted": False}},
    "a tenth of the damping": {"rounding": {"damping": 0.003}},
    "ten times the damping": {"rounding": {"damping": 0.3}},
    "32 rows": {"rows": 32},
    "plans tried": {"polish": True},
    "layer by layer": {"tuned": {"blocks": 8, "codes": False, "scales": False, "vectors": False, "embedding": False}},
    "tuned": {"tuned": {}},
    "tuned, layer by layer first": {"tuned": {"blocks": 8}},
    "tuned, codes fixed": {"tuned": {"codes": False}},
    "tuned, steps alone": {"tuned": {"codes": False, "vectors": False, "embedding": False}},
    "tuned, only the text": {"tuned": {"written": 0}},
    "tuned, the text four times": {"tuned": {"written": 0, "passes": 4}},
    "tuned, half the travel": {"tuned": {"travel": 0.05}},
    "tuned, twice the travel": {"tuned": {"travel": 0.2}},
}
ROLES = ("q", "k", "v", "o", "gate", "up", "down")


@contextmanager
def menus_of(idea: dict[str, Any]) -> Iterator[None]:
    """Within it a matrix has one width throughout, where the idea says so."""
    mixes = allocation._best_mixes
    if idea.get("one_width"):
        allocation._best_mixes = lambda errors, rows: [np.repeat(np.arange(errors.shape[1])[:, None], len(rows), 1)] * len(errors)
    try:
        yield
    finally:
        allocation._best_mixes = mixes


def convert(
    args: argparse.Namespace, out: Path, work: Path, bpw: float, nbytes: int, idea: dict[str, Any]
) -> tuple[float, float, Conversion]:
    """Convert once: seconds in all, seconds that a further bitrate takes, result."""
    begin = time.monotonic()
    head_bits, rows = idea.get("head_bits", "auto"), idea.get("rows", args.calibration_rows)
    rounding = Rounding(**{**json.loads(args.rounding), **idea.get("rounding", {})})
    job = ConversionJob(
        args.model,
        out,
        target={"bytes": nbytes},
        overrides={role: (math.floor(bpw), math.floor(bpw)) for role in ROLES} if idea.get("equal") else None,
        device=args.device,
        head_bits=head_bits,
        calibration=args.calibration,
        rows=rows,
        length=512,
        report_rows=0,
        seed=args.seed,
        effort=args.effort or "quick",
        work_dir=work,
        rounding=rounding,
        polish=idea.get("polish", False),
        tuning=Tuning(**idea["tuned"]) if "tuned" in idea else None,
    )
    with menus_of(idea):
        done = job.run(TextSink() if args.progress else None)
    return time.monotonic() - begin, sum(done.seconds.values()) - done.seconds["measure"], done


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", help="text to calibrate on; default: the packaged one")
    parser.add_argument("--text", required=True, help="text to judge on; it should share nothing with the calibration text")
    parser.add_argument("--limits", type=Path, default=LIMITS, help="JSON with kl and bytes per bitrate under `exl2`")
    parser.add_argument("--bpw", type=float, nargs="+", default=[2.5, 3.0, 3.5, 4.0, 5.0, 6.0])
    parser.add_argument("--effort", choices=list(EFFORT_OPTIONS), help="as of `convert`: rows, and whether it is tuned")
    parser.add_argument("--calibration-rows", type=int, help="default: 100, or what --effort says")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounding", default="{}", help="JSON fields of converter.quantization.Rounding")
    parser.add_argument("--ablate", action="store_true", help="leave out one idea at a time")
    parser.add_argument("--ideas", nargs="+", choices=list(IDEAS), help="only these of --ablate")
    parser.add_argument("--seed", type=int, default=0, help="of the calibration rows and of the sampled labels")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--out", type=Path, help="keep the converted models here")
    parser.add_argument("--device", help="auto, cpu or cuda")
    parser.add_argument("--json", type=Path, help="append one JSON line per conversion to this file")
    parser.add_argument("--progress", action="store_true")
    args = parser.parse_args()
    if args.calibration_rows is None and args.effort is None:
        args.calibration_rows = 100
    limits = json.loads(args.limits.read_text())["exl2"]
    ideas = {name: IDEAS[name] for name in (args.ideas or IDEAS)} if args.ablate else {"everything": {}}
    text, _ = read_calibration(args.text)
    ids = token_rows(Tokenizer.load(args.model), text, rows=args.rows, length=args.length)
    print(
        f"{'bpw':>5} {'bytes':>11} {'layers':>7} {'head':>6} {'seconds':>8} {'again':>7} "
        f"{'KL':>9} {'ppl':>9} {'peer KL':>9} {'ratio':>6}  idea"
    )
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work_dir or Path(temporary) / "work"
        for bpw in args.bpw:
            peer = limits[f"{bpw:.1f}"]
            for name, idea in ideas.items():
                out = (args.out or Path(temporary)) / f"{bpw:g}-{name.replace(' ', '-')}"
                seconds, again, done = convert(args, out, work, bpw, peer["bytes"], idea)
                kl, ppl = quality(args.model, [done.path], ids, done.device)[0]
                assert done.nbytes <= peer["bytes"]
                head = done.matrices[-1].bpw
                print(
                    f"{bpw:5g} {done.nbytes:11,} {done.bpw:7.4f} {head:6.3f} {seconds:8.1f} {again:7.1f} {kl:9.5f} {ppl:9.4f} "
                    f"{peer['kl']:9.5f} {kl / peer['kl']:6.3f}  {name}",
                    flush=True,
                )
                if done.tuned:
                    print(f"      {done.tuned}; {', '.join(f'{stage} {taken:.1f} s' for stage, taken in done.seconds.items())}", flush=True)
                if args.json:
                    line = {"bpw": bpw, "idea": name, "effort": args.effort, "seed": args.seed, "rounding": args.rounding}
                    line |= {"bytes": done.nbytes, "kl": kl, "ppl": ppl, "peer_kl": peer["kl"], "layers_bpw": done.bpw, "head_bpw": head}
                    line |= {"rows": done.calibration["rows"], "seconds": seconds, "stages": done.seconds, "device": done.device}
                    line |= {"tuned": done.tuned.to_dict()} if done.tuned else {}
                    with open(args.json, "a") as file:
                        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
