"""Kill conversions (SIGKILL) at random moments, go on each time, and compare the bytes with those of a conversion that nobody killed.

    python tools/kill_conversions.py [--kills 100] [--each 4] [--seed 0]

A tiny random model is converted with every stage: equalize, measure, polish, quantize, write. A moment is a point in the time that the
whole conversion takes, so that late stages are hit as often as early ones, and from the second kill of a conversion on a point in what is
left of it. After `--each` kills the conversion runs to its end. Each runs in a fork of this process, which has imported everything and
started no thread. Prints a line for each conversion and the number of kills by stage; ends with 1 where a byte differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"


def convert(source: Path, dst: Path, told: int) -> None:
    """In a fork: the conversion; writes each event's stage to `told`."""
    from exl2nb.converter.conversion_job import ConversionJob
    from exl2nb.converter.quantization import Rounding
    from tests.converter.test_conversion_job import OPTIONS

    job = ConversionJob(source, dst, bpw=4.0, polish=True, rounding=Rounding(folded=True), device="cpu", **OPTIONS)

    def tell(event: Any) -> None:
        os.write(told, f"{event.stage}\n".encode())

    job.run(tell)


def run(source: Path, dst: Path, kill_after_s: float | None) -> tuple[bool, str, float]:
    """One process. Returns whether it was killed, its last stage, its seconds."""
    ready, told = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if not child:
        code = 1
        try:
            convert(source, dst, told)
            code = 0
        finally:
            os._exit(code)
    os.close(told)
    stage = b"start"
    while True:
        left = None if kill_after_s is None else max(0.0, start + kill_after_s - time.monotonic())
        if not select.select([ready], [], [], left)[0]:
            os.kill(child, signal.SIGKILL)
            kill_after_s = None
        elif data := os.read(ready, 1 << 16):
            stage = data.split()[-1]
        else:
            break
    os.close(ready)
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and os.waitstatus_to_exitcode(status):
        raise SystemExit(f"the conversion failed with {os.waitstatus_to_exitcode(status)} in stage {stage.decode()}")
    return killed, stage.decode(), time.monotonic() - start


def content(directory: Path) -> dict[str, bytes]:
    """Files by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def storm(folder: Path, kills: int, each: int, seed: int) -> dict[str, Any]:
    """Kill until there were that many kills; the figures."""
    import exl2nb.converter.pipeline  # noqa: F401  # everything that a fork needs
    from tests.converter.test_conversion_job import write_model

    rng, by_stage, wrong, conversions = random.Random(seed), Counter[str](), [], 0
    source = write_model(folder / "tiny")
    run(source, folder / "warm", None)
    _, _, whole_s = run(source, folder / "whole", None)
    expected = content(folder / "whole")
    while by_stage.total() < kills:
        dst, left_s, hits = folder / f"out-{conversions}", whole_s, 0
        for _ in range(each):
            killed, stage, took = run(source, dst, rng.uniform(0, left_s))
            by_stage[stage] += killed
            hits += killed
            if dst.exists() and content(dst) != expected:
                wrong.append(f"{dst.name}: there after a kill in {stage}, and not whole")
            if dst.exists() or not killed:
                break
            left_s = max(0.05, left_s - took) if stage not in ("start", "calibrate") else left_s
        if not dst.exists():
            run(source, dst, None)
        if content(dst) != expected:
            wrong.append(f"{dst.name}: other bytes")
        left = [path.name for path in folder.iterdir() if path.name.startswith(f".out-{conversions}.") and path.name.endswith(".tmp")]
        conversions += 1
        print(json.dumps({"conversion": conversions, "kills": hits, "left_behind": left, "wrong": len(wrong)}), flush=True)
    return {"kills": by_stage.total(), "conversions": conversions, "by_stage": dict(by_stage), "whole_s": round(whole_s, 2), "wrong": wrong}


def main() -> int:
    """Parse the command line, storm, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--each", type=int, default=4, help="kills of one conversion, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exl2nb-kills-") as folder:
        found = storm(Path(folder), args.kills, args.each, args.seed)
    print(json.dumps(found))
    return bool(found["wrong"])


if __name__ == "__main__":
    sys.exit(main())
