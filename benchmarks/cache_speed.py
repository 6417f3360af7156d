"""Attention over every kind of cache page: microseconds of one query, of a block of 64, and of writing a token.

    python benchmarks/cache_speed.py --threads 1 --context 2048 --heads 32 --kv-heads 4 --head-dim 64
    python benchmarks/cache_speed.py --device cuda --context 32768 --heads 32 --kv-heads 8 --head-dim 128 --modes fp16 k16v4 q4

Prints one JSON object per mode, best of the rounds. On the CPU the pages lie in the processor's cache where they fit: what is measured is
decoding, not memory. On CUDA it is attention of one decode step, K and V written on the way: a graph over so many layers that no cache
holds them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CACHE_MODES, CacheSpec
from exl2nb.ops import cuda_attention

LARGE_BYTES = 200 << 20


def best_us(call: Callable[[], object], rounds: int) -> float:
    """Shortest of `rounds` calls after one that does not count."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(min(times) * 1e6, 2)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def measure(mode: str, args: argparse.Namespace) -> dict[str, object]:
    """Fill a cache through the op that writes it, then read it."""
    Hq, Hkv, D, context = args.heads, args.kv_heads, args.head_dim, args.context
    cache = KVCache(CacheSpec(1, Hkv, D, -(-context // 256), mode))
    pools = (cache.k[0], cache.v[0])
    blob = ops.pack_dense(torch.randn((Hq + 2 * Hkv) * D, 8))
    still = torch.ones(1, 0)

    def write(tokens: int) -> Tensor:
        where = (torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32), *pools)
        return ops.QkvOp(blob=blob, cos=still, sin=still, num_heads=Hq, num_kv_heads=Hkv, head_dim=D)(inputs[:tokens], *where)

    inputs = torch.randn(context, 8)
    q = write(context)[:64].contiguous()
    table = torch.arange(cache.spec.num_pages, dtype=torch.int32)[None]
    result: dict[str, object] = {"mode": mode, "bits": cache.spec.bits}
    for name, n in (("query_us", 1), ("64_queries_us", 64)):
        batch = (q[:n].contiguous(), *pools, table, i32(0, n), i32(context))
        result[name] = best_us(lambda batch=batch: ops.paged_attention(*batch, scale=D**-0.5), args.rounds)
    result["write_token_us"] = best_us(lambda: write(64), args.rounds) / 64
    return result


def measure_cuda(mode: str, args: argparse.Namespace) -> dict[str, object]:
    """One decode step's attention, averaged over layers whose pages are more than the L2 cache holds."""
    Hq, Hkv, D, context = args.heads, args.kv_heads, args.head_dim, args.context
    pages = -(-context // 256)
    layers = min(64, 1 + LARGE_BYTES // CacheSpec(1, Hkv, D, pages, mode).total_bytes)
    cache = KVCache(CacheSpec(layers, Hkv, D, pages, mode), "cuda")
    qkv, angles = torch.randn(1, (Hq + 2 * Hkv) * D, device="cuda"), torch.rand(context, D // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    batch = (torch.arange(pages, dtype=torch.int32)[None].cuda(), i32(0, 1).cuda(), i32(context).cuda())
    size = torch.ops.exl2nb.attention_workspace(qkv, 1, Hq, Hkv, D)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def step() -> None:
        for k, v in zip(cache.k, cache.v):
            cuda_attention.attention_step(
                qkv, cos, sin, None, k, v, *batch, workspace, None, None, [], Hq, Hkv, D, 1e-5, False, False, 0.0,
                D**-0.5, 0, 0.0, False,
            )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return {"mode": mode, "bits": cache.spec.bits, "step_us": round(best_us(replay, args.rounds) / layers, 2), "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--context", type=int, default=960)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--modes", nargs="+", default=list(CACHE_MODES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for mode in args.modes:
        print(json.dumps((measure if args.device == "cpu" else measure_cuda)(mode, args)), flush=True)


if __name__ == "__main__":
    main()
