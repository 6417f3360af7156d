"""How fast prompts are computed on a GPU, beside what torch's own products and attention would need for the same shapes.

    python benchmarks/prefill.py llama2-7b@2048 llama2-70b:2.55@128,2048 llama3-8b@2048,32768 --bound

SHAPE[:BPW]@TOKENS,...: shapes of make_random_model.py, about 4.0 bits unless said. The time is that of `llm.generate` up to the first
token, nothing reused; the median of `--rounds` after two that warm up. `--bound`: a layer's products in bf16 (cuBLAS) and torch's causal
attention, all tokens at once, times the layers: no norms, activations, cache or unpacking. Prints one JSON object a line; models stay in
`--models`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from make_random_model import SHAPES, Shape

import exl2nb as ex


def prefill_s(llm: ex.LLM, tokens: int, rounds: int) -> list[float]:
    """Seconds up to the first token, each round another prompt."""
    vocab, found = llm.config.vocab_size, []
    llm.cache.reuse = False
    for number in range(rounds + 2):
        prompt = [3 + (number * 997 + i * 7) % (vocab - 3) for i in range(tokens)]
        start = time.perf_counter()
        llm.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True)
        found.append(time.perf_counter() - start)
    return found[2:]


def folder_of(model: str, models: Path) -> Path:
    """Where a model SHAPE[:BPW] is; it is made where it is missing."""
    (name, _, bpw), folder = model.partition(":"), models / model.replace(":", "-")
    if not (folder / "config.json").exists():
        maker = Path(__file__).with_name("make_random_model.py")
        subprocess.run([sys.executable, str(maker), name, str(folder), "--bpw", bpw or "4.0"], check=True, stdout=subprocess.DEVNULL)
    return folder


def bound_s(shape: Shape, tokens: int, rounds: int = 3) -> tuple[float, float]:
    """Seconds that all layers' products, and all layers' attention, take torch."""
    new = {"device": "cuda", "dtype": torch.bfloat16}
    matrices = [torch.randn(k, n, **new) * 0.02 for k, n in shape.linears().values()]
    inputs = {k: torch.randn(tokens, k, **new) for k in {matrix.shape[0] for matrix in matrices}}
    q, k, v = (
        torch.randn(1, heads, tokens, shape.head_dim, **new) for heads in (shape.num_attention_heads, *[shape.num_key_value_heads] * 2)
    )

    def products() -> None:
        for matrix in matrices:
            inputs[matrix.shape[0]] @ matrix

    def attention() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    times = []
    for work in (products, attention):
        best = float("inf")
        for number in range(rounds + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start) if number else best
        times.append(best * shape.num_hidden_layers)
    return times[0], times[1]


def main() -> None:
    """Make what is missing, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="SHAPE[:BPW]@TOKENS,...")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm"), help="where models are kept")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bound", action="store_true", help="time torch's products and attention as well")
    parser.add_argument("--only-make", action="store_true", help="make the models and stop")
    args = parser.parse_args()
    for case in args.cases:
        model, _, counts = case.partition("@")
        shape, folder = SHAPES[model.partition(":")[0]], folder_of(model, args.models)
        if args.only_make:
            continue
        tokens = [int(count) for count in counts.split(",")]
        room = max(tokens) + 512
        with ex.load(folder, device="cuda", context=room, cache_tokens=room, progress=None) as llm:
            for count in tokens:
                times = prefill_s(llm, count, args.rounds if count <= 4096 else 2)
                middle = statistics.median(times)
                found: dict[str, Any] = {
                    "model": folder.name,
                    "tokens": count,
                    "ms": round(1e3 * middle, 2),
                    "tok_s": round(count / middle),
                }
                if args.bound:
                    products, attention = bound_s(shape, count)
                    found |= {"torch_products_ms": round(1e3 * products, 2), "torch_attention_ms": round(1e3 * attention, 2)}
                    found["share_of_bound"] = round((products + attention) / middle, 3)
                found["gpu"] = torch.cuda.get_device_name()
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
