"""What each stage of tuning brings: KL to the source on a text that none of the models saw, any models, any bitrates; one JSON, one table.

    python tools/train_test_bed.py corpus.txt beds/ --compile
    python benchmarks/tuned.py exl2nb/demo_model beds/llama-60m beds/qwen2-40m --calibration corpus.txt --text unseen.txt \
        --bpw 3 6 4 2.5 --seconds 1200 --json tuned.json --device cuda

It runs unattended. The first bitrate of all models comes first. What the time left does not allow is skipped and named, what takes longer
than it is cancelled. Every result is in the JSON as soon as it is there, and the same command does what is missing. All stages of a model
share one measurement and its rows; a file is as large as with a head of 6 bits. KL and perplexity are the format's cost alone (the torch
reference network in fp32 on the reconstructed weights).
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from convert import quality

import exl2nb
from exl2nb.converter.calibration import read_calibration
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.result import Conversion
from exl2nb.converter.settings import describe_device
from exl2nb.converter.tuning import Tuning
from exl2nb.core.errors import Exl2Error, Interrupted
from exl2nb.core.progress import Progress
from exl2nb.eval.rows import token_rows
from exl2nb.io.atomic import atomic_write
from exl2nb.ops.placement import pick_device
from exl2nb.tokenizer.tokenizer import Tokenizer

QUICK = "default effort"
NOTHING: dict[str, Any] = {"codes": False, "scales": False, "vectors": False, "embedding": False}
STAGES: dict[str, dict[str, Any]] = {
    QUICK: {},
    "GPTQ": NOTHING,
    "descent": {**NOTHING, "descent": 2},
    "floats": {"codes": False},
    "learned": {},
    "descent, learned": {"descent": 2},
    "descent, floats": {"descent": 2, "codes": False},
    "blocks": {**NOTHING, "descent": 2, "blocks": 8},
    "blocks, learned": {"blocks": 8},
    "descent of 6 sweeps": {**NOTHING, "descent": 6},
    "only the text": {"written": 0},
    "the text four times": {"written": 0, "passes": 4},
    # as many rows as a CPU sees and the same loss; on a GPU the length of rows and steps stay a GPU's
    "as on a CPU": {"seen": 5760, "passes": 2, "written": 0, "hidden": 0.6},
    "as on a CPU, the KL alone": {"seen": 5760, "passes": 2, "written": 0, "hidden": 0.0},
    "half the travel": {"travel": 0.05},
    "twice the travel": {"travel": 0.2},
}
USUAL = list(STAGES)[:6]
SAFETY = 1.2  # of what a stage took before


class Bench:
    """Runs one conversion after the other while there is time."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self._args, self._work, self._end = args, work, time.monotonic() + args.seconds
        self._device = torch.device(pick_device(args.device, where="convert", needs_engine=False))
        found = json.loads(args.json.read_text()) if args.json.exists() else {}
        self.results: list[dict[str, Any]] = found.get("results", [])
        self.skipped: list[dict[str, Any]] = []
        self._text, _ = read_calibration(args.text)

    def run(self) -> None:
        """Everything that is asked for and not there yet."""
        args = self._args
        for bpw, seed, model, stage in itertools.product(args.bpw, args.seeds, args.models, args.stages):
            task = {"model": model.name, "bpw": bpw, "stage": stage, "seed": seed}
            if any(all(one[name] == value for name, value in task.items()) for one in self.results):
                continue
            left, needed = self._end - time.monotonic(), SAFETY * self._seconds(model.name, stage)
            if left <= needed:
                self.skipped.append({**task, "why": f"{max(0, left):.0f} s left, {needed:.0f} s needed"})
                continue
            try:
                self.results.append({**task, **self._convert(model, bpw, stage, seed)})
                one = self.results[-1]
                print(f"{model.name}, {bpw:g} bits, {stage}: KL {one['kl']:.5f}, {one['seconds']:.0f} s", flush=True)
            except Interrupted:
                self.skipped.append({**task, "why": f"cancelled after {left:.0f} s"})
            except (Exl2Error, torch.OutOfMemoryError) as error:
                self.skipped.append({**task, "why": f"{type(error).__name__}: {error}"})
            self.save()
        self.save()

    def _seconds(self, model: str, stage: str) -> float:
        """The least that this model took with this stage on this device; 0 where it was not run: it is tried, and cancelled at the end."""
        known = {"model": model, "stage": stage, "device": describe_device(self._device)}
        return min((one["seconds"] for one in self.results if all(one[name] == value for name, value in known.items())), default=0.0)

    def _convert(self, model: Path, bpw: float, stage: str, seed: int) -> dict[str, Any]:
        args, begin = self._args, time.monotonic()
        tuning = Tuning(**STAGES[stage], **({} if args.tuning_rows is None else {"rows": args.tuning_rows}))
        with tempfile.TemporaryDirectory(dir=self._work) as folder:
            job = ConversionJob(
                model,
                Path(folder) / "out",
                bpw=bpw,
                head_bits="auto",
                calibration=args.calibration,
                rows=args.calibration_rows,
                length=args.length,
                seed=seed,
                effort="quick" if stage == QUICK else "tuned",
                work_dir=self._work / f"{model.name}-{seed}",
                tuning=None if stage == QUICK else tuning,
                device=self._device,
            )

            def watch(event: Progress) -> None:
                if time.monotonic() > self._end:
                    job.cancel()

            done = job.run(watch)
            seconds = time.monotonic() - begin
            ids = token_rows(Tokenizer.load(model), self._text, rows=args.rows, length=args.length)
            kl, ppl = quality(model, [done.path], ids, done.device)[0]
        return {"kl": kl, "perplexity": ppl, "seconds": seconds, **_facts(done, describe_device(self._device))}

    def save(self) -> None:
        """Write the JSON, complete or not at all."""
        with atomic_write(self._args.json) as file:
            found = {"exl2nb": exl2nb.__version__, "results": self.results, "skipped": self.skipped}
            file.write((json.dumps(found, indent=1) + "\n").encode())

    def table(self) -> str:
        """Markdown: a row for each result, beside what GPTQ alone has at the same bitrate."""
        lines = [
            "| model | bits | bytes | stage | seed | KL | over GPTQ | KL learned from | KL kept out | KL second text | seconds |",
            "|" + "---|" * 11,
        ]
        for one in self.results:
            same = [r["kl"] for r in self.results if r["stage"] == "GPTQ" and all(r[k] == one[k] for k in ("model", "bpw", "seed"))]
            learned = [_shown(one[name]) for name in ("train_kl", "choosing_kl", "second_kl")]
            cells = [one["model"], f"{one['bpw']:g}", f"{one['bytes']:,}", one["stage"], str(one["seed"]), _shown(one["kl"])]
            cells += [f"{one['kl'] / same[0]:.3f}" if same else "", *learned, f"{one['seconds']:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
        lines += [f"\nSkipped: {one['model']}, {one['bpw']:g} bits, {one['stage']}: {one['why']}" for one in self.skipped]
        return "\n".join(lines)


def _facts(done: Conversion, device: str) -> dict[str, Any]:
    tuned, learned = done.tuned, {"train_kl": None, "choosing_kl": None, "second_kl": None}
    if tuned is not None:
        _, train, choosing = tuned.history[tuned.chosen]
        learned = {"train_kl": train, "choosing_kl": choosing, "second_kl": tuned.second_kl[1] if tuned.second_kl else None}
    return {
        "bytes": done.nbytes,
        "layers_bpw": done.bpw,
        "loss": sum(matrix.loss for matrix in done.matrices),
        "rows": done.calibration["split"],
        "device": device,
        "stages": done.seconds,
        **learned,
    }


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="directories of dense models, with different names")
    parser.add_argument("--text", required=True, help="text to judge on, which shares nothing with any other")
    parser.add_argument("--calibration", help="text to calibrate on and to learn from; default: the packaged one")
    parser.add_argument("--bpw", type=float, nargs="+", default=[3.0, 6.0])
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=USUAL, help=f"default: {', '.join(USUAL)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=1200.0, help="for everything together")
    parser.add_argument("--json", type=Path, default=Path("tuned.json"), help="where results go; those that are there are not made again")
    parser.add_argument("--table", type=Path, help="write the table here, too")
    parser.add_argument("--device", help="auto, cpu or cuda")
    parser.add_argument("--rows", type=int, default=96, help="of the text to judge on")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calibration-rows", type=int, help="as of `convert`")
    parser.add_argument("--tuning-rows", type=int, help="as of `Tuning`")
    parser.add_argument("--work-dir", type=Path, help="keep measurements here for another run; default: a temporary folder")
    args = parser.parse_args(argv)
    if len({model.name for model in args.models}) < len(args.models):
        parser.error("two models have the same name")
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work_dir or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(args, work)
        bench.run()
    table = bench.table()
    print(table)
    if args.table:
        args.table.write_text(table + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
