"""Where the time of a step goes when some layers are on the host: products, the rest of the layers, hand-over, the GPU, the step loop.

    python benchmarks/host_layers.py MODEL --shares 25 50 75            # on a GPU machine
    python benchmarks/host_layers.py MODEL --cpu --threads 1 2          # the host's part alone, without a GPU

`read`: GB/s of `ops.read_memory` by threads. `products`: one row times each kind of matrix of the host's layers, all layers in turn, so
from memory, and `cached`: one of them again and again. `program`: the host's parts one after the other, without the layers that are lent to
the GPU between them, by themselves and with pauses as long as a GPU's part, in which its threads may fall asleep. `decode`: medians over
the steps of a request. Prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import exl2nb as ex
from exl2nb import ops
from exl2nb.model.batch import Batch, SequenceSlice, batch_tensors
from exl2nb.ops import blob
from exl2nb.ops.memory_ops import large_pages, read_memory

PROMPT = [*range(5, 133)]
GIB = 1 << 30


def say(**found: Any) -> None:
    """A line of JSON."""
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}), flush=True)


def fastest(run: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Seconds of `run`: the least, and the median, of as many as fit."""
    run()
    times, end = list[float](), time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times), statistics.median(times)


def machine() -> None:
    """What the processor is."""
    wanted = ("Model name", "CPU(s)", "Thread(s) per core", "Core(s) per socket", "Socket(s)", "NUMA node(s)", "L2 cache", "L3 cache")
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    say(machine={key: found.get(key) for key in wanted}, large_pages=pages.read_text().strip() if pages.exists() else None)


def reading(threads: list[int]) -> float:
    """GB/s that all threads read, after a line for each number of them."""
    memory = large_pages(GIB)
    memory = (torch.empty(GIB, dtype=torch.uint8) if memory is None else memory).fill_(1)
    speed = 0.0
    for count in threads:
        torch.set_num_threads(count)
        speed = GIB / fastest(lambda: read_memory(memory), 0.4)[0] / 1e9
        say(read=count, gb_s=speed)
    return speed


def products(layers: Any, threads: list[int]) -> None:
    """Each kind of matrix by itself."""
    roles = {"qkv": "attention.qkv", "o": "attention.o", "gate_up": "mlp.up", "down": "mlp.down"}
    for name, path in roles.items():
        group, role = path.split(".")
        matrices: list[Tensor] = [getattr(getattr(layer, group), role) for layer in layers]
        K, N = blob.shape(matrices[0])
        x, nbytes = torch.randn(1, K), sum(len(matrix) for matrix in matrices)
        for count in threads:
            torch.set_num_threads(count)
            best, median = fastest(lambda x=x, some=matrices: [ops.linear(x, one) for one in some], 0.5)
            once = fastest(lambda x=x, one=matrices[0]: ops.linear(x, one), 0.2)[0]
            say(products=name, K=K, N=N, threads=count, us=best / len(matrices) * 1e6, gb_s=nbytes / best / 1e9,
                median_gb_s=nbytes / median / 1e9, cached_gb_s=len(matrices[0]) / once / 1e9)  # fmt: skip


def one_token(llm: ex.LLM, context: int = 128) -> Batch:
    """A step of one sequence; it writes to a page that no request has."""
    return Batch.build([SequenceSlice(ids=[7], start=context - 1, pages=[1], logit_rows="all")])


def program(parts: list[Any], batch: Batch, cache: Any, layers: int, nbytes: int, pause: float) -> float:
    """Milliseconds of the host's parts."""
    pools = [cache.part(part.span.first, part.span.last) for part in parts]
    run = lambda: [part.program.run(*batch_tensors(batch), each.k, each.v) for part, each in zip(parts, pools)]  # noqa: E731
    best, median = fastest(run, 1.5)
    times, end = list[float](), time.perf_counter() + 1.0
    while time.perf_counter() < end:
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            pass
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    say(program=layers, mib=nbytes >> 20, ms=best * 1e3, median_ms=median * 1e3, after_pauses_ms=statistics.median(times) * 1e3,
        layer_us=best / layers * 1e6, gb_s=nbytes / best / 1e9)  # fmt: skip
    return median * 1e3


def decode(llm: ex.LLM, tokens: int, bound_ms: float) -> None:
    """Medians of the parts of a step."""
    model = llm.model
    host, whole, ends = list[float](), list[float](), list[float]()
    run_part, in_turn, spent = model._run, model._in_turn, [0.0]

    def run_host(part: Any, *arguments: Any) -> Any:
        begun = time.perf_counter()
        found = run_part(part, *arguments)
        spent[0] += time.perf_counter() - begun if part.gpu is None else 0.0
        return found

    def timed(*arguments: Any, **options: Any) -> Any:
        begun, spent[0] = time.perf_counter(), 0.0
        found = in_turn(*arguments, **options)
        ends.append(time.perf_counter())
        whole.append(ends[-1] - begun)
        host.append(spent[0])
        return found

    model._run, model._in_turn = run_host, timed
    try:
        for _ in range(2):
            host.clear(), whole.clear(), ends.clear()
            llm.generate(PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True)
    finally:
        del model._run, model._in_turn
    steps = [b - a for a, b in pairwise(ends[1:])]
    step, host_ms, whole_ms = (statistics.median(some) * 1e3 for some in (steps, host[2:], whole[2:]))
    say(
        decode=llm.model.where, tok_s=1e3 / step, step_ms=step, host_ms=host_ms, gpu_and_hand_over_ms=whole_ms - host_ms,
        loop_ms=step - whole_ms, bound_ms=bound_ms, share=bound_ms / step,
    )  # fmt: skip


def graph(llm: ex.LLM) -> float:
    """Milliseconds of the GPU's captured part by itself; 0 where there is none."""
    last = llm.model.parts[-1]
    found = [one for one in last.captured.values() if one is not None]
    if not found:
        return 0.0
    best = float("inf")
    for _ in range(20):
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        found[0]._graph.replay()
        second.record()
        second.synchronize()
        best = min(best, first.elapsed_time(second))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shares", nargs="*", type=int, default=[25, 50, 75], help="%% of the layers on the host")
    parser.add_argument("--threads", nargs="*", type=int, default=[torch.get_num_threads()], help="the last number is used for steps")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cpu", action="store_true", help="all parts on the CPU")
    parser.add_argument("--brief", action="store_true", help="steps alone")
    args = parser.parse_args()
    machine()
    cpu = reading(args.threads[-1:] if args.brief else args.threads)
    number = json.loads((args.model / "config.json").read_text())["num_hidden_layers"]
    for turn, share in enumerate(args.shares):
        on_host = max(1, number * share // 100)
        options: dict[str, Any] = {"devices": ["cpu", "cpu"]} if args.cpu else {"gpu_layers": number - on_host}
        with ex.load(args.model, context=1024, cache_tokens=4096, progress=None, **options) as llm:
            torch.set_num_threads(args.threads[-1])
            llm.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
            model = llm.model
            parts = [part for part in model.parts if part.gpu is None]
            layers = [layer for part in parts for layer in model.network.layers[part.span.first : part.span.last]]
            if not turn and not args.brief:
                products(layers, args.threads)
            torch.set_num_threads(args.threads[-1])
            shares = ex.plan(
                args.model, devices=options.get("devices") or {"cuda": f"{number - on_host} layers", "cpu": "rest"}, context=4096
            ).shares
            nbytes = next(one.read for one in shares if one.device == "cpu")
            gpu_ms = graph(llm)
            program(parts, one_token(llm), llm.engine.cache, len(layers), nbytes, max(1e-3, gpu_ms / 1e3))
            say(graph_ms=gpu_ms)
            decode(llm, args.tokens, nbytes / cpu / 1e6 + gpu_ms)


if __name__ == "__main__":
    main()
