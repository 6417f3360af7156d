"""Memory of a conversion on the CPU against the bound that `ConversionJob.memory` states, for some layers of a large model's shape.

    python benchmarks/convert_ram.py llama2-7b [--layers 1 3] [--rows 8] [--length 512] [--polish]

Dense random weights of so many layers are written and converted, each conversion in a process of its own whose resident memory is sampled
by stage; interpreter and libraries are in it. What only more layers or more rows would add (streams between layers, statistics of all
layers) is taken from the plan and added: peak + plan(all layers, all rows) - plan(as run), stage by stage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from make_random_model import SHAPES

from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.convert_keywords import EFFORT_OPTIONS, REPORT_ROWS
from exl2nb.converter.memory_estimate import ALLOCATOR_SLACK, Asked, StageMemory, plan_cpu_memory
from exl2nb.core.progress import Progress
from exl2nb.model.config import ModelConfig
from exl2nb.model.loader import read_model_config

STAGES = ("sweep", "measure", "polish", "quantize")  # of a plan


class Resident:
    """A sink that samples this process's resident bytes, by the stage of the last event."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._stage, self._over = "start", threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __call__(self, event: Progress, /) -> None:
        """Take one event."""
        self._stage = event.stage

    def stop(self) -> dict[str, int]:
        """Peaks in bytes."""
        self._over.set()
        self._thread.join()
        return self.peaks

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            with open("/proc/self/status") as file:
                found = 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
            self.peaks[self._stage] = max(found, self.peaks.get(self._stage, 0))


def child(args: argparse.Namespace) -> None:
    """Convert and print peaks."""
    resident, begin = Resident(), time.perf_counter()
    text = " ".join(f"w{(i * i + 7 * i) % 997}" for i in range(3 * (args.rows + REPORT_ROWS) * args.length))
    options = {"bpw": 4.0, "rows": args.rows, "length": args.length, "polish": args.polish, "device": "cpu", "calibration": [text]}
    done = ConversionJob(args.child, args.child.parent / "out", **options).run(resident)
    seconds = {stage: round(took, 1) for stage, took in done.seconds.items()}
    print(json.dumps({"seconds": round(time.perf_counter() - begin, 1), "stages": seconds, "peaks": resident.stop()}))


def plan_of(config: ModelConfig, layers: int, rows: int, length: int) -> StageMemory:
    """The plan of a model with so many of these layers."""
    config = dataclasses.replace(config, num_layers=layers, windows=(0,) * layers)
    return plan_cpu_memory(config, Asked(rows=rows, length=length, report_rows=REPORT_ROWS))


def convert(args: argparse.Namespace, layers: int, work: Path) -> dict[str, object]:
    """Convert so many layers in another process; what it took, and what all layers would."""
    from convert_gpu import write_dense

    write_dense(SHAPES[args.shape], layers, work / "dense")
    command = [sys.executable, __file__, args.shape, "--child", str(work / "dense"), "--rows", str(args.rows), "--length", str(args.length)]
    done = subprocess.run([*command, *(["--polish"] if args.polish else [])], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    config = read_model_config(work / "dense")
    here, whole = plan_of(config, layers, args.rows, args.length), plan_of(config, SHAPES[args.shape].num_hidden_layers, args.all_rows, 512)
    peaks = {stage: found["peaks"].get(stage, 0) for stage in ("measure", "polish", "quantize")}
    more = {stage: whole.held + getattr(whole, stage) - here.held - getattr(here, stage) for stage in STAGES}
    more["measure"] = max(more["measure"], more["sweep"])  # one stage for whoever watches
    return {
        "layers": layers,
        "rows": args.rows,
        "seconds": found["seconds"],
        "stages, s": found["stages"],
        "peak GB by stage": {stage: gb(peak) for stage, peak in peaks.items() if peak},
        "stated GB": gb(here.nbytes),
        f"extrapolated to {SHAPES[args.shape].num_hidden_layers} layers, {args.all_rows} x 512 tokens, GB": gb(
            max(peak + int(ALLOCATOR_SLACK * more[stage]) for stage, peak in peaks.items() if peak)
        ),
        "stated for those, GB": gb(whole.nbytes),
    }


def gb(nbytes: int) -> float:
    """For printing."""
    return round(nbytes / 1e9, 2)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--all-rows", type=int, default=EFFORT_OPTIONS["full"].rows, help="rows of the conversion that is extrapolated to")
    parser.add_argument("--polish", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    for layers in args.layers:
        with tempfile.TemporaryDirectory() as temporary:
            print(json.dumps(convert(args, layers, Path(temporary)), indent=1), flush=True)


if __name__ == "__main__":
    main()
