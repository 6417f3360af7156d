"""Seconds from `ex.load` to the first token on a GPU, with an empty cache of compiled kernels and with a filled one.

    python benchmarks/first_token.py MODEL [--cores 2]

Each case is a process of its own, on so many cores. Torch's import and its CUDA context are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def measure(model: str) -> dict[str, float]:
    """One load and two calls in this process."""
    import torch

    import exl2nb as ex

    torch.empty(1, device="cuda")
    begun = time.perf_counter()
    with ex.load(model, device="cuda", progress=None) as llm:
        loaded = time.perf_counter()
        llm.generate("The", max_tokens=1, temperature=0)
        first = time.perf_counter()
        llm.generate("The secret of", max_tokens=32, temperature=0, ignore_eos=True)
        return {"load_s": loaded - begun, "first_token_s": first - loaded, "next_call_s": time.perf_counter() - first}


def main() -> None:
    """Run both cases, print one JSON line each."""
    parser = argparse.ArgumentParser(description="Seconds from ex.load to the first token on a GPU.")
    parser.add_argument("model")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--here", action="store_true", help="measure in this process")
    options = parser.parse_args()
    if options.here:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
        print(json.dumps({name: round(seconds, 2) for name, seconds in measure(options.model).items()}))
        return
    with tempfile.TemporaryDirectory() as cache:
        for case in ("empty", "filled"):
            command = [sys.executable, __file__, options.model, "--cores", str(options.cores), "--here"]
            done = subprocess.run(command, env={**os.environ, "EXL2NB_KERNEL_CACHE": cache}, capture_output=True, text=True, check=True)
            print(json.dumps({"kernel cache": case, **json.loads(done.stdout.splitlines()[-1])}), flush=True)


if __name__ == "__main__":
    main()
