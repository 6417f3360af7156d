"""A captured decode step on the GPU without the engine around it: microseconds, and with `--profile` how long each kernel keeps the step.

    python benchmarks/cuda_step.py MODEL --batch 64 --context 1056 --profile
    python benchmarks/cuda_step.py MODEL --batch 16 --adapters 16

Replays of one graph follow one another, so this is the step's own time: what `exl2nb bench` takes longer is the host's. A kernel's share is
the time from the end of the kernel that ended before it to its own end, so that kernels that overlap are counted once; the profiler makes
all of them a little slower. Products of many tokens are numbered from attention on: o_proj, gate and up, down, the next QKV (or the head).
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import exl2nb
from exl2nb import ops
from exl2nb.model.gpu_forward import cache_formats
from exl2nb.ops.cuda_sample import Row, pack_rows, sample_rows
from exl2nb.ops.gpu import head_shape
from exl2nb.ops.lora_table import FUSED_LORA_OPS, LoraChange, LoraPart

SMALL = ("sample_rows", "embed_kernel", "rows_kernel", "gates", "Memcpy")
PRODUCTS = ("stream_k_wgmma", "stream_k_gemm", "stream_k_lora", "skinny_gemm")
KERNELS = ("persistent_gemm", "persistent_lora", "attention_decode", *PRODUCTS, "lora_shrink", "lora_sums", "lora_expand", *SMALL)
PAGE, WARM_UP, REPLAYS, PROFILED = 256, 20, 50, 12


class CapturedStep:
    """One decode step of `batch` sequences that have `context` tokens each, greedy, as a graph."""

    def __init__(self, llm: exl2nb.LLM, batch: int, context: int, pages: int, adapters: int = 0, rank: int = 16) -> None:
        model, cache, device = llm.model, llm.engine.cache, torch.device("cuda")
        self.batch, self.context, self.layers = batch, context, len(cache.k)
        self._ids, self._positions, self._lens, self._steps = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(4))
        table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=device)
        logits = torch.zeros(batch, model.gpu.vocab, device=device)
        params = pack_rows([Row(temperature=0.0)] * batch).to(device)
        results = torch.zeros(4, batch, 4, dtype=torch.int32).pin_memory()
        kernels, heads = model.gpu.step_kernels(batch), (cache.spec.num_kv_heads, cache.spec.head_dim)
        self._kept = kernels, table, bounds, logits, params, results  # the graph knows their addresses only

        lora = None
        if adapters:
            model.set_adapters([random_adapter(model.network_and_program[1], rank, seed) for seed in range(adapters)])
            lora = model.adapter_buffers(), torch.arange(batch, dtype=torch.int32, device=device) % adapters

        def step() -> None:
            kernels.run(
                self._ids, self._positions, table, bounds, self._lens, None, cache.k, cache.v, cache_formats(cache),
                heads, logits, lora=lora,
            )  # fmt: skip
            following = self._steps, self._ids, self._positions, self._lens, None, None
            sample_rows(logits, params, None, *following, 4, True, None, results)

        step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=torch.cuda.Stream()):
            step()

    def replay(self, count: int) -> float:
        """Microseconds of one of `count` replays, from the same context on every time."""
        self._positions.fill_(self.context)
        self._lens.fill_(self.context + 1)
        self._ids.copy_(torch.arange(5, 5 + self.batch))
        self._steps.zero_()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            self._graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / count * 1e3

    def shares(self) -> dict[str, float]:
        """Microseconds by which each kind of kernel makes the step longer, medians over replays."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.replay(PROFILED)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        ended = sorted((e["ts"] + e["dur"], e["name"]) for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy"))
        last = [i for i, (_, name) in enumerate(ended) if "sample_rows" in name]
        found: dict[str, list[float]] = collections.defaultdict(list)
        for before, here in itertools.pairwise(last[2:]):
            taken: collections.Counter[str] = collections.Counter()
            since, end = 0, ended[before][0]
            for time, name in ended[before + 1 : here + 1]:
                kind = next((k for k in KERNELS if k in name), name[:40])
                if kind == "attention_decode":
                    since = 0
                elif kind in PRODUCTS:
                    since += 1
                    kind = f"{kind} {since}"
                taken[kind] += time - end
                end = time
            for kind, us in taken.items():
                found[kind].append(us)
        return {kind: round(statistics.median(us), 2) for kind, us in found.items()}


def random_adapter(program: ops.Program, rank: int, seed: int) -> dict[int, LoraChange]:
    """Small changes of every matrix of the layers, on the GPU: q, k, v, gate and up have parts of their own."""
    g, found = torch.Generator("cuda").manual_seed(seed), {}
    for number, op in enumerate(program.steps):
        if not isinstance(op, FUSED_LORA_OPS):
            continue
        K, N = head_shape(program.heads[op.blob.data_ptr()])
        kv = (N - K) // 2 if isinstance(op, ops.QkvOp) else 0  # where the heads are as wide as the model
        firsts = {"norm_qkv_rope": (0, N - 2 * kv, N - kv), "norm_gate_up": (0, N // 2), "linear_residual": (0,)}[op.name]
        parts = []
        for first, end in zip(firsts, (*firsts[1:], N)):
            a, b = (torch.randn(shape, generator=g, device="cuda") for shape in ((K, rank), (rank, end - first)))
            parts.append(LoraPart.of(a * K**-0.5, 0.01 * b, torch.ones(rank, device="cuda"), first))
        found[number] = LoraChange(parts=tuple(parts))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model directory")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--cache", default="fp16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--adapters", type=int, default=0, help="so many random ones, the sequences' by turns")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--profile", action="store_true", help="kernels, too")
    args = parser.parse_args()
    pages = (args.context + 64) // PAGE + 1
    with exl2nb.load(
        args.model, device="cuda", cache=args.cache, context=pages * PAGE, cache_tokens=args.batch * pages * PAGE,
        max_sequences=max(16, args.batch), progress=None,
    ) as llm:  # fmt: skip
        step = CapturedStep(llm, args.batch, args.context, pages, args.adapters, args.rank)
        step.replay(WARM_UP)
        times = sorted(step.replay(REPLAYS) for _ in range(args.rounds))
        us = statistics.median(times)
        found: dict[str, Any] = {
            "model": llm.name,
            "batch": args.batch,
            "context": args.context,
            "cache": args.cache,
            "adapters": args.adapters,
        }
        found |= {"layers": step.layers, "us": round(us, 1), "us_best": round(times[0], 1), "tok_s": round(args.batch / us * 1e6, 1)}
        if args.profile:
            found["us_by_kernel"] = step.shares()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
