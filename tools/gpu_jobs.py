"""Checks and benchmarks that need a GPU, side by side on all GPUs of this machine, within a given time.

    python tools/gpu_jobs.py --list
    python tools/gpu_jobs.py out/ --seconds 1500 --corpus corpus.txt.xz --text unseen.txt
    python tools/gpu_jobs.py out/ --seconds 500 --only course suites

Machines with GPUs are rented by the minute, so one call does everything that there is time for, in the order of the list. A timed job has
its GPUs for itself; others share one GPU. Each job asks for a number of cores, and those that run never ask for more than there are: under
a load of four times the cores, tests and notebooks did not end at all. A job ends at its own limit or with --seconds, whatever comes first.
Its output is in OUT/NAME/log, and what it wrote is beside that. Prints a line when a job begins or ends, and the end of the log of what
failed; OUT/jobs.json has the same for programs. Models are made in --models and used again.

Needs an installed exl2nb, or its folder in PYTHONPATH with the compiled libraries in it, pytest with pytest-xdist and pytest-timeout, and
nbclient, ipykernel, ipywidgets and anywidget for the course. Without --corpus and --text, jobs that need them are named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 3.0  # between asking a job to end and ending it


@dataclass(frozen=True, kw_only=True)
class Job:
    """command: for bash in the repository's root; {python}, {out}, {models}, {corpus}, {text} are put in. limit_s: it is ended then.
    gpus: how many it sees, 0 for all. timed: it has them for itself. cores: of the host.
    """

    command: str
    limit_s: int
    gpus: int = 1
    timed: bool = True
    cores: int = 4


EIGHT = """model={models}/llama3-8b
[ -f $model/made ] || {{ {python} benchmarks/make_random_model.py llama3-8b $model --bpw 4.0 && touch $model/made; }}
"""
ADAPTERS = """for pair in "1 0" "1 1" "16 0" "16 1" "16 16"; do set -- $pair
{python} benchmarks/cuda_step.py $model --batch $1 --adapters $2; done"""
BED = """{python} tools/make_stories.py 12000000 {out}/stories.txt && {python} tools/make_stories.py 60000 {out}/unseen.txt --seed 1
{python} tools/train_test_bed.py {out}/stories.txt {out}/beds --models llama-60m llama-11m --seconds 225 --steps 8000 --batch 32 --compile
pair="--target {out}/beds/llama-60m --draft {out}/beds/llama-11m --device cuda --text {out}/unseen.txt"
{python} benchmarks/speculation.py $pair --rounds 9 --tasks copy batch
{python} benchmarks/speculation.py $pair --rounds 5 --tasks greedy sampled
"""
TUNED = """sizes="--effort tuned --seed {seed} --bpw 2.5 5 4 6 3 3.5"
{{python}} benchmarks/quality.py exl2nb/demo_model --calibration {{corpus}} --text {{text}} --device cuda $sizes \
--json {{out}}/sizes.jsonl --work-dir {{out}}/work --out {{out}}/files"""
BIGGER = """{{python}} tools/make_stories.py 10000000 {{out}}/text.txt
case {{corpus}} in *.xz) xz -dc {{corpus}} ;; *) cat {{corpus}} ;; esac >> {{out}}/text.txt
{{python}} tools/train_test_bed.py {{out}}/text.txt {{out}}/beds --models {model} --seconds 260 --batch 16 --passes 8 --steps 6000 --compile
{{python}} benchmarks/tuned.py {{out}}/beds/{model} --calibration {{corpus}} --text {{text}} --stages "default effort" learned \
--bpw 4 3 6 --seconds 600 --json {{out}}/tuned.json --table {{out}}/tuned.md --device cuda --work-dir {{out}}/work"""
SANITIZE = "{{python}} tools/sanitize_gpu.py --tools {tool} --jobs 3 --limit 550 --logs {{out}}"

JOBS = {
    "course": Job(command="{python} tools/small_gpu.py 11 12 13 14 15 16", limit_s=400, cores=6),
    "suites": Job(
        command="{python} -m pytest -m gpu -p no:cacheprovider -n 12 --dist worksteal --durations 10 tests/generator tests/model tests/ops "
        "tests/llm tests/converter tests/cli tests/test_reprs.py",
        limit_s=900,
        timed=False,
        cores=13,
    ),
    "memcheck": Job(command=SANITIZE.format(tool="memcheck"), limit_s=600, timed=False),
    "racecheck": Job(
        command="EXL2NB_KERNEL_OPTIONS=-DEXL2NB_EVERY_LANE_ARRIVES " + SANITIZE.format(tool="racecheck"), limit_s=600, timed=False
    ),
    "host": Job(
        command="{python} benchmarks/devices.py --shares 50 25 75 --seconds 290 --models {models} --out {out}/devices.json",
        limit_s=300,
        cores=16,
    ),
    "speculation": Job(command=BED, limit_s=450),
    "tuned-0": Job(command=TUNED.format(seed=0), limit_s=500),
    "tuned-1": Job(command=TUNED.format(seed=1), limit_s=500),
    "tuned-2": Job(command=TUNED.format(seed=2), limit_s=500),
    "tuned-llama": Job(command=BIGGER.format(model="llama-60m"), limit_s=900),
    "tuned-qwen": Job(command=BIGGER.format(model="qwen2-40m"), limit_s=900),
    "adapters": Job(command=EIGHT + ADAPTERS, limit_s=240),
    "rows": Job(
        command="{python} benchmarks/rows.py tinyllama llama2-7b llama3-8b --rounds 2 --models {models} --out {out}/rows.json", limit_s=240
    ),
    "prefill": Job(command="{python} benchmarks/prefill.py llama3-8b@2048,512,128,32 --bound", limit_s=240),
    "several": Job(
        command="{python} benchmarks/many_gpus.py --out {out}/many.jsonl --models {models} --seconds 290", limit_s=300, gpus=0, cores=16
    ),
}


@dataclass
class Running:
    """A job that has begun."""

    name: str
    process: subprocess.Popen[bytes]
    gpus: tuple[int, ...]
    began: float
    ends: float  # at the latest


@dataclass
class Queue:
    """Starts jobs where their GPUs and cores are free."""

    gpus: tuple[int, ...]
    cores: int
    jobs: dict[str, Job]
    running: list[Running] = field(default_factory=list)

    def gpus_for(self, job: Job) -> tuple[int, ...] | None:
        """GPUs for a job that would begin now, None: it has to wait."""
        if self.cores < job.cores + sum(self.jobs[other.name].cores for other in self.running) and self.running:
            return None
        count = min(job.gpus, len(self.gpus)) if job.gpus else len(self.gpus)
        taken = {gpu for other in self.running for gpu in other.gpus}
        if job.timed:
            free = [gpu for gpu in self.gpus if gpu not in taken]
            return tuple(free[:count]) if len(free) >= count else None
        timed = {gpu for other in self.running if self.jobs[other.name].timed for gpu in other.gpus}
        shared = sorted((gpu for gpu in self.gpus if gpu not in timed), key=lambda gpu: gpu not in taken)  # where others share already
        return tuple(shared[:count]) if len(shared) >= count else None


def visible_gpus() -> tuple[int, ...]:
    """Numbers of this machine's GPUs."""
    found = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, check=True).stdout
    return tuple(int(line) for line in found.split())


def end(process: subprocess.Popen[bytes]) -> None:
    """A job with all that it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def run(queue: Queue, names: Sequence[str], out: Path, words: dict[str, str], seconds: float) -> list[dict[str, object]]:
    """Run the jobs; returns a row for each: name, exit code (None: no time was left), seconds, GPUs, ended: by its limit."""
    start = time.monotonic()
    rows: list[dict[str, object]] = []
    waiting = list(names)
    try:
        while waiting or queue.running:
            now = time.monotonic()
            for job in list(queue.running):
                late = now > job.ends
                if late:
                    end(job.process)
                if (code := job.process.poll()) is None:
                    continue
                queue.running.remove(job)
                rows.append({"name": job.name, "exit": code, "seconds": round(now - job.began, 1), "gpus": list(job.gpus), "ended": late})
                print(
                    f"{now - start:6.0f} s  {job.name}: exit {code} after {now - job.began:.0f} s{', at its limit' if late else ''}",
                    flush=True,
                )
                if code and not late:
                    print(
                        "".join(f"    {line}\n" for line in (out / job.name / "log").read_text(errors="replace").splitlines()[-15:]), end=""
                    )
                (out / "jobs.json").write_text(json.dumps(rows, indent=1))
            if now - start > seconds:
                waiting.clear()
            for name in list(waiting):
                if (gpus := queue.gpus_for(queue.jobs[name])) is None:
                    continue
                waiting.remove(name)
                queue.running.append(begin(name, queue.jobs[name], gpus, out, words, start + seconds))
                print(f"{now - start:6.0f} s  {name}: begins on {', '.join(map(str, gpus))}", flush=True)
            time.sleep(0.2)
    finally:
        for job in queue.running:
            end(job.process)
    done = {row["name"] for row in rows}
    rows += [{"name": name, "exit": None, "seconds": 0.0, "gpus": [], "ended": True} for name in names if name not in done]
    (out / "jobs.json").write_text(json.dumps(rows, indent=1))
    return rows


def begin(name: str, job: Job, gpus: tuple[int, ...], out: Path, words: dict[str, str], latest: float) -> Running:
    """Start one job."""
    folder = (out / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    command = job.command.format(**{key: shlex.quote(word) for key, word in {**words, "out": str(folder)}.items()})
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "OMP_NUM_THREADS": str(job.cores), "PYTHONUNBUFFERED": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    now = time.monotonic()
    return Running(name=name, process=process, gpus=gpus, began=now, ends=min(now + job.limit_s, latest))


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="folder for logs and results")
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="NAME")
    parser.add_argument("--corpus", type=Path, help="text to train on and to calibrate on")
    parser.add_argument("--text", type=Path, help="text that no model has seen")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "bench", help="where random models are kept")
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    args = parser.parse_args()
    if args.list:
        for name, job in JOBS.items():
            print(f"{name:<12} {job.limit_s:>4} s, {job.gpus or 'all'} GPU{', timed' if job.timed else ''}, {job.cores} cores")
        return 0
    if args.out is None:
        parser.error("OUT is missing: a folder for logs and results")
    words = {"python": sys.executable, "models": str(args.models.resolve())}
    words |= {key: str(path.resolve()) for key, path in (("corpus", args.corpus), ("text", args.text)) if path}
    names = [name for name in args.only if all(f"{{{key}}}" not in JOBS[name].command or key in words for key in ("corpus", "text"))]
    if left := [name for name in args.only if name not in names]:
        print(f"left out, for want of --corpus or --text: {', '.join(left)}")
    args.models.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    queue = Queue(gpus=visible_gpus(), cores=os.cpu_count() or 1, jobs=JOBS)
    rows = run(queue, names, args.out, words, args.seconds)
    return int(any(row["exit"] != 0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
