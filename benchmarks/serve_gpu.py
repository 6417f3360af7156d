"""Load on the server on a GPU, in about three minutes: random models at real shapes, 1, 8, 32 and 128 clients, beside `llm.batch`.

    python benchmarks/serve_gpu.py                       # TinyLlama-1.1B and Llama-3-8B, 4 bits per weight
    python benchmarks/serve_gpu.py --shapes llama3-8b --rounds 5

A table per model, as `serve.py --table` prints it; the models stay in build/bench. Both processes, our server and `llm.batch`, hold the
model at once: 8B takes 2 x 4.5 GB and 2 caches of 8 GB. Needs a C++ compiler for the load client.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from decode import model_directory
from make_random_model import SHAPES

LOAD = ("--cache-tokens", "65536", "--max-sequences", "128", "--context", "1024", "--tokens", "128", "--table")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tinyllama", "llama3-8b"])
    parser.add_argument("--bpw", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    for shape in args.shapes:
        begun = time.perf_counter()
        model = model_directory(args.models, shape, args.bpw)
        made_s = time.perf_counter() - begun
        command = [sys.executable, str(Path(__file__).with_name("serve.py")), str(model), "--device", args.device, *LOAD]
        subprocess.run([*command, "--rounds", str(args.rounds), "--models", str(args.models)], check=True)
        print(f"{shape}: model made in {made_s:.0f} s, all in {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
