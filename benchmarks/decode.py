"""Decode and prefill through the public API, on random weights at real shapes: engine thread, sampling and detokenising included.

    python benchmarks/decode.py --shape tinyllama --bpw 4.0 --threads 2

Prints one JSON object: tok/s, the bytes a token reads, and the share of the read bandwidth measured in the same run. One request warms
up; then the best and the median of `--rounds`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from make_random_model import SHAPES, make
from yardstick import read_bandwidth

import exl2nb


def measure(llm: exl2nb.LLM, *, prompt_tokens: int, new_tokens: int, seed: int) -> dict[str, float]:
    """One request: seconds to the first token, and for the tokens after it."""
    ids = random.Random(seed).choices(range(3, 200), k=prompt_tokens)
    start = time.perf_counter()
    stream = llm.stream(ids, max_tokens=new_tokens + 1, temperature=0, ignore_eos=True)
    chunks = [(time.perf_counter(), len(chunk.tokens)) for chunk in stream]
    (first, _), *rest = [(t, count) for t, count in chunks if count]
    new = sum(count for _, count in rest)
    return {"prompt_tokens": prompt_tokens, "prompt_s": first - start, "new_tokens": new, "new_s": rest[-1][0] - first if rest else 0.0}


def model_directory(root: Path, shape: str, bpw: float) -> Path:
    """The random model, made once."""
    path = root / f"{shape}-{bpw}"
    if not (path / "config.json").exists():
        make(SHAPES[shape], path, bpw=bpw)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama")
    parser.add_argument("--bpw", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--models", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = exl2nb.load(model_directory(args.models, args.shape, args.bpw))
    measure(llm, prompt_tokens=32, new_tokens=8, seed=0)
    prefill, decode = [], []
    for i in range(args.rounds):
        run = measure(llm, prompt_tokens=args.prompt, new_tokens=0, seed=2 * i + 1)
        prefill.append(run["prompt_tokens"] / run["prompt_s"])
        run = measure(llm, prompt_tokens=16, new_tokens=args.new, seed=2 * i + 2)
        decode.append(run["new_tokens"] / run["new_s"])
    shape = SHAPES[args.shape]
    read, weights = read_bandwidth(), llm.model.weight_bytes - 2 * shape.vocab_size * shape.hidden_size  # the embedding is not read through
    result = {"shape": args.shape, "bpw": args.bpw, "threads": args.threads, "rounds": args.rounds, "weight_bytes": weights}
    for name, values in (("decode", decode), ("prefill", prefill)):
        result |= {f"{name}_tok_s": round(max(values), 1), f"{name}_tok_s_median": round(statistics.median(values), 1)}
    result |= {"read_gb_s": round(read / 1e9, 2), "decode_share_of_read": round(max(decode) * weights / read, 3)}
    print(json.dumps(result, indent=1))
    llm.close()


if __name__ == "__main__":
    main()
