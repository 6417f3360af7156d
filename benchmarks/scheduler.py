"""What the host does per decode step besides the model: schedule, tensors, sampling, text. And what batching and reuse bring.

    python benchmarks/scheduler.py            # host work with a model that computes nothing
    python benchmarks/scheduler.py --demo     # the demo model too: batches, and a repeated prompt of 1000 tokens
    python benchmarks/scheduler.py --gpu DIR  # beside a model on the GPU: how long a step is, how long the GPU waits for the host

Prints one JSON object. Host work in microseconds per step, the best of the rounds and their median, on one thread without a reader, for
two kinds of executor: one that hands out logits, which the host samples (greedy, 4096 tokens in the vocabulary), and one that brings drawn
tokens, as a GPU does, one step ahead.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import exl2nb
from exl2nb.cache.spec import PAGE_SIZE
from exl2nb.generator.batch_buffers import MAX_ROWS, BatchBuilder
from exl2nb.generator.loop import StepLoop
from exl2nb.generator.pager import Pager
from exl2nb.generator.request import Request
from exl2nb.generator.scheduler import Scheduler
from exl2nb.generator.sequence import RunningRequest
from exl2nb.model.runner import GPU_CHUNKS, HOST_CHUNKS
from exl2nb.sampling.draw import Sampled
from exl2nb.tokenizer.tokenizer import Tokenizer

PAGES, VOCAB, WARM, STEPS = 64, 4096, 30, 400
DEMO = Path(exl2nb.__file__).parent / "demo_model"


class Null:
    """Computes nothing: the same logits, or the same drawn token, for every row."""

    def __init__(self, lookahead: int) -> None:
        self.lookahead, self.prepared = lookahead, 0
        self._logits = np.random.default_rng(0).normal(size=(64, VOCAB)).astype(np.float32)
        self._drawn = Sampled(300, -1.0, 1)

    def can_draw(self, state: Any, *, drafts: bool = False) -> bool:
        """As a device does; the host's executor is asked itself."""
        return self.lookahead > 0

    def launch(self, step: Any) -> Null:
        """Keep how many rows there are."""
        self._rows = len(step.draws)
        return self

    def result(self) -> list[Any]:
        """One per row."""
        return [self._drawn] * self._rows if self.lookahead else list(self._logits[: self._rows])

    def copy(self, source: int, target: int) -> None:
        """Nothing to copy."""

    def close(self) -> None:
        """Nothing to close."""


def host_work(tokenizer: Tokenizer, batch: int, lookahead: int, rounds: int) -> dict[str, float]:
    """Microseconds per decode step."""
    found = []
    for _ in range(rounds):
        pager = Pager(PAGES, page_size=PAGE_SIZE, copy=lambda source, target: None)
        builder = BatchBuilder(max_tokens=batch * MAX_ROWS + HOST_CHUNKS.max_tokens, max_sequences=batch, max_pages=16, page_size=PAGE_SIZE)
        loop = StepLoop(Scheduler(pager, max_sequences=batch), builder, Null(lookahead))
        for i in range(batch):
            ids = random.Random(i).choices(range(3, 200), k=20)
            request = Request.of(ids, where="benchmark", temperature=0, max_tokens=900, ignore_eos=True)
            loop.add(RunningRequest(request, tokenizer, context=2048))
        with torch.inference_mode():
            for _ in range(WARM):
                loop.step()
            start = time.perf_counter()
            for _ in range(STEPS):
                loop.step()
            found.append((time.perf_counter() - start) / STEPS * 1e6)
        assert len(loop.scheduler.running) == batch
    return {"best_us": round(min(found), 1), "median_us": round(statistics.median(found), 1)}


class Timed:
    """The executor of a model on the GPU, with an event before and after every step, and a clock around the wait for results."""

    lookahead = 1

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.waited = self.launching = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, step: Any) -> Any:
        """The same, timed."""
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began = time.perf_counter()
        pair[0].record()
        pending = self._inner.launch(step)
        pair[1].record()
        self.launching += time.perf_counter() - began
        self.events.append(pair)
        return _TimedStep(self, pending, pair[1])


class _TimedStep:
    def __init__(self, executor: Timed, pending: Any, over: torch.cuda.Event) -> None:
        self._executor, self._pending, self._over = executor, pending, over

    def result(self) -> list[Any]:
        """The same, timed."""
        began = time.perf_counter()
        self._over.synchronize()
        self._executor.waited += time.perf_counter() - began
        return self._pending.result()


def beside_gpu(llm: exl2nb.LLM, batch: int, **sampling: Any) -> dict[str, float]:
    """A step of so many requests: wall time, the GPU's part, how long it is idle between steps, and what the host does meanwhile."""
    engine = llm.engine
    executor = Timed(engine.loop.executor)
    pager = Pager(engine.spec.num_pages, page_size=PAGE_SIZE, copy=executor.copy)
    builder = BatchBuilder(max_tokens=batch * MAX_ROWS + 2048, max_sequences=batch, max_pages=16, page_size=PAGE_SIZE)
    loop = StepLoop(Scheduler(pager, max_sequences=batch, chunks=GPU_CHUNKS), builder, executor)

    def run() -> tuple[float, float, float, list[Any]]:
        for i in range(batch):
            ids = random.Random(i).choices(range(3, 200), k=64)
            request = Request.of(ids, where="benchmark", seed=i, **sampling, max_tokens=STEPS + 3 * WARM, ignore_eos=True)
            loop.add(RunningRequest(request, llm.tokenizer, context=llm.context))
        for _ in range(2 * WARM):
            loop.step()
        executor.events.clear()
        executor.waited = executor.launching = 0.0
        start = time.perf_counter()
        for _ in range(STEPS):
            loop.step()
        wall = (time.perf_counter() - start) / STEPS * 1e6
        waited, launching, events = executor.waited / STEPS * 1e6, executor.launching / STEPS * 1e6, executor.events
        assert len(loop.scheduler.running) == batch
        loop.drain()
        return wall, waited, launching, events

    with torch.inference_mode():
        wall, waited, launching, events = engine.call(run)
    busy = statistics.median(first.elapsed_time(last) for first, last in events) * 1e3
    idle = statistics.median(one[1].elapsed_time(two[0]) for one, two in pairwise(events)) * 1e3
    found = {"wall_us": wall, "gpu_us": busy, "gpu_idle_us": idle, "host_us": wall - waited - launching, "launch_us": launching}
    return {**{name: round(value, 1) for name, value in found.items()}, "host_share": round((wall - waited - launching) / wall, 4)}


def batches(llm: exl2nb.LLM, rounds: int) -> dict[str, dict[str, float]]:
    """Decoded tokens per second of all requests together, the best, and the median over the rounds of how many times that of one request.

    A round measures every number of requests, so that a slower minute of the machine slows all of them.
    """
    sizes = (1, 2, 4, 8, 16)
    turns: list[dict[int, float]] = []
    for _ in range(rounds):
        turn = {}
        for batch in sizes:
            prompts = [llm.tokenizer.encode(f"Number {i}: it was") for i in range(batch)]
            start = time.perf_counter()
            done = llm.batch([{"prompt": ids, "stream": False} for ids in prompts], max_tokens=128, temperature=0, ignore_eos=True).run()
            turn[batch] = sum(len(one.tokens) for one in done.values()) / (time.perf_counter() - start)
        turns.append(turn)
    return {
        "best": {str(batch): round(max(turn[batch] for turn in turns), 1) for batch in sizes},
        "over_1": {str(batch): round(statistics.median(turn[batch] / turn[1] for turn in turns), 2) for batch in sizes},
    }


def repeated_prompt(llm: exl2nb.LLM, rounds: int) -> dict[str, float]:
    """Seconds to the first token of a prompt of 1000 tokens: the first time, and again."""
    first, again = [], []
    for seed in range(rounds):
        ids = random.Random(seed).choices(range(3, 200), k=1000)
        llm.cache.clear()
        one, two = (llm.generate(ids, max_tokens=1, temperature=0) for _ in range(2))
        first.append(one.timings.first_token_s)
        again.append(two.timings.first_token_s)
    return {"first_ms": round(min(first) * 1e3, 2), "again_ms": round(min(again) * 1e3, 2), "share": round(min(again) / min(first), 4)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--gpu", default=None, help="a model to load on the GPU")
    parser.add_argument("--model", default=None, help="instead of the demo model's own weights")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(DEMO)
    found: dict[str, Any] = {
        kind: {str(batch): host_work(tokenizer, batch, lookahead, options.rounds) for batch in (1, 4, 16)}
        for kind, lookahead in (("logits", 0), ("drawn", 1))
    }
    if options.gpu:
        with exl2nb.load(options.gpu, device="cuda", max_sequences=16, cache_tokens=16 * 1024, progress=None) as llm:
            kinds: dict[str, dict[str, float]] = {"greedy": {"temperature": 0}, "top_p": {"top_p": 0.95}}
            found["gpu"] = {f"{batch} {name}": beside_gpu(llm, batch, **some) for name, some in kinds.items() for batch in (1, 16)}
    if options.demo or options.model:
        load = exl2nb.load(options.model, progress=None) if options.model else exl2nb.demo(progress=None)
        with load as llm:
            llm.generate("It was", max_tokens=20)
            found["tok_s"] = batches(llm, options.rounds)
            found["prompt_1000"] = repeated_prompt(llm, options.rounds)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
