"""exl2nb beside llama.cpp in one run: random EXL2 4.0 bpw against random Q4_0 at the same shapes, with the same threads, taking turns.

    python -m venv .venv-peer
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON" .venv-peer/bin/pip install llama-cpp-python gguf
    python benchmarks/compare_llamacpp.py --shapes tinyllama demo --threads 2

Add -DGGML_AVX512=ON where the processor has it. Each engine runs in a process of its own, which sleeps while the other one works. What is
compared is not quite the same work, and the difference is against us: exl2nb goes through `llm.stream` (engine thread, sampler, text),
llama.cpp through its C API with an argmax.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from decode import measure, model_directory
from make_random_model import SHAPES
from yardstick import read_bandwidth

import exl2nb

HERE = Path(__file__).parent


def serve(path: str, threads: int) -> None:
    """Our worker: one JSON request per line on stdin, one result per line on stdout."""
    torch.set_num_threads(threads)
    llm = exl2nb.load(path)
    for line in sys.stdin:
        print(json.dumps(measure(llm, **json.loads(line))), flush=True)
    llm.close()


class Worker:
    """A child process that measures on request."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request: int) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self.process.args)} ended with code {self.process.wait()}")  # type: ignore[arg-type]
        time.sleep(0.3)  # let its threads stop spinning before the other engine starts
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate(timeout=30)


def compare(shape: str, args: argparse.Namespace) -> dict[str, object]:
    """Ratios exl2nb / llama.cpp at one shape; the best of the rounds stands for each, the spread is reported."""
    ours = model_directory(args.models, shape, args.bpw)
    theirs = args.models / f"{shape}-q4_0.gguf"
    peer = [args.peer_python, str(HERE / "peer_llamacpp.py")]
    if not theirs.exists():
        subprocess.run([*peer, "make", str(ours / "config.json"), str(theirs)], check=True)
    workers = {
        "exl2nb": Worker(sys.executable, str(HERE / "compare_llamacpp.py"), "--serve", str(ours), "--threads", str(args.threads)),
        "llama.cpp": Worker(*peer, "serve", str(theirs), str(args.threads)),
    }
    new = args.new * (8 if shape == "demo" else 1)
    speeds: dict[str, dict[str, list[float]]] = {name: {"decode": [], "prefill": []} for name in workers}
    for worker in workers.values():
        worker.ask(prompt_tokens=32, new_tokens=8, seed=0)
    for i in range(args.rounds):
        for name, worker in workers.items():
            run = worker.ask(prompt_tokens=16, new_tokens=new, seed=2 * i + 1)
            speeds[name]["decode"].append(run["new_tokens"] / run["new_s"])
            run = worker.ask(prompt_tokens=args.prompt, new_tokens=0, seed=2 * i + 2)
            speeds[name]["prefill"].append(run["prompt_tokens"] / run["prompt_s"])
    for worker in workers.values():
        worker.close()
    result: dict[str, object] = {
        "shape": shape,
        "threads": args.threads,
        "rounds": args.rounds,
        "new_tokens": new,
        "prompt_tokens": args.prompt,
    }
    for phase in ("decode", "prefill"):
        for name in workers:
            values = speeds[name][phase]
            result[f"{phase} {name} tok/s"] = {"best": round(max(values), 1), "median": round(statistics.median(values), 1)}
        result[f"{phase} ratio"] = round(max(speeds["exl2nb"][phase]) / max(speeds["llama.cpp"][phase]), 3)
    result["bytes"] = {"exl2nb": sum(p.stat().st_size for p in ours.iterdir()), "llama.cpp": theirs.stat().st_size}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tinyllama", "demo"])
    parser.add_argument("--bpw", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=48, help="tokens to decode (eight times as many for the demo shape)")
    parser.add_argument("--models", type=Path, default=Path("build/bench"))
    parser.add_argument("--peer-python", default=".venv-peer/bin/python")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.threads)
        return
    torch.set_num_threads(args.threads)
    print(json.dumps({"read_gb_s": round(read_bandwidth() / 1e9, 2), "threads": args.threads}))
    for shape in args.shapes:
        print(json.dumps(compare(shape, args), indent=1), flush=True)


if __name__ == "__main__":
    main()
