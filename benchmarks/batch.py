"""What a batch brings on the CPU: tokens a second of some requests together, over those of one request alone.

    python benchmarks/batch.py                       # the demo model in fp16, 8 requests over 1, all threads
    python benchmarks/batch.py MODEL --sizes 1 2 4 8 16 --rounds 21 --threads 1

A round measures every number of requests, in turns, so that a slower minute of the machine slows all of them. Prints medians over the
rounds: tokens a second, microseconds of a decode step, of them inside `Model.forward` and outside it (where steps do not run ahead of the
host), processor time a step (of all threads), and the ratio to one request: median of the rounds' own ratios, and ratio of the medians.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import exl2nb
from exl2nb.ops import _load

TOKENS = 128


class Clocked:
    """A model whose steps of one token a sequence are timed."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.seconds: list[float] = []

    def __call__(self, batch: Any, cache: Any) -> Any:
        """The same, timed."""
        began = time.perf_counter()
        logits = self._forward(batch, cache)
        if batch.logit_rows.shape == batch.input_ids.shape:
            self.seconds.append(time.perf_counter() - began)
        return logits


def processor_s() -> float:
    """Processor time of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def turn(llm: exl2nb.LLM, clocked: Clocked, size: int) -> dict[str, float]:
    """One run of `size` greedy requests of 128 new tokens each."""
    prompts = [llm.tokenizer.encode(f"Number {i}: it was") for i in range(size)]
    clocked.seconds.clear()
    used, began = processor_s(), time.perf_counter()
    done = llm.batch([{"prompt": ids, "stream": False} for ids in prompts], max_tokens=TOKENS, temperature=0, ignore_eos=True).run()
    wall, used = time.perf_counter() - began, processor_s() - used
    step = wall / TOKENS * 1e6
    forward = statistics.fmean(clocked.seconds) * 1e6 if len(clocked.seconds) > TOKENS / 2 else math.nan  # else they ran ahead
    tokens = sum(len(one.tokens) for one in done.values())
    return {
        "tok_s": tokens / wall,
        "step_us": step,
        "forward_us": forward,
        "outside_us": step - forward,
        "processor_us": used / TOKENS * 1e6,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="a model directory; without one, the demo model")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 8], help="numbers of requests; the first is what the others are compared with"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with exl2nb.load(options.model, device="cpu", progress=None) if options.model else exl2nb.demo(progress=None, device="cpu") as llm:
        clocked = llm.engine.model.forward = Clocked(llm.engine.model.forward)  # pyright: ignore[reportAttributeAccessIssue]
        for size in options.sizes:
            turn(llm, clocked, size)
        rounds = [{size: turn(llm, clocked, size) for size in options.sizes} for _ in range(options.rounds)]
    print(f"{_load.load_libraries().isa}, {torch.get_num_threads()} threads, {options.rounds} rounds in turns, medians")
    first = options.sizes[0]
    for size in options.sizes:
        of = {name: statistics.median(one[size][name] for one in rounds) for name in rounds[0][size]}
        ratios = sorted(one[size]["tok_s"] / one[first]["tok_s"] for one in rounds)
        whole = of["tok_s"] / statistics.median(one[first]["tok_s"] for one in rounds)
        inside = f" = forward {of['forward_us']:5.0f} + {of['outside_us']:4.0f}," if of["forward_us"] > 0 else ", one ahead of the host,"
        parts = f"step {of['step_us']:5.0f} us{inside} processor {of['processor_us']:5.0f}"
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), of medians {whole:.2f}"
        print(f"{size:3d} requests: {of['tok_s']:6.0f} tok/s, {parts}; over {first}: {spread}")


if __name__ == "__main__":
    main()
