"""Speed of the CPU kernels as ratios to a sequential read of memory in the same run.

    python benchmarks/gemv.py [--threads 1,2] [--size 4096] [--quick] [--json out.json]

GPTQ: the same one row against GPTQ matrices of equal width and groups (128), symmetric, and with zero points and act-order, in turns.
GEMV: one row times size x size at each width; matrices rotate through at least 1 GiB, so nothing is cached. GEMM: 512 rows, in GMAC/s.
Step: `decode_step` of the demo model's shape (12 layers, 256 hidden, 4096 tokens, 4 bits), in ms per token; its weights stay in cache.
Yardstick: `ops.read_memory` of 1 GiB with as many threads. Every number is the best of several rounds, taken in turns with the yardstick.
"""

from __future__ import annotations

import argparse
import json
import mmap
import time
from collections.abc import Callable

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.ops import _load

GIB = 1 << 30
WIDTHS = (2, 3, 4, 5, 6, 8)


def huge(size: int) -> Tensor:
    """uint8 memory in huge pages where the system gives them, as the weights are."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def exl2(K: int, N: int, bits: int, group: int = 128) -> tuple[Tensor, ...]:
    """Random EXL2 tensors of one width."""
    groups = K // group
    q_weight = torch.randint(-(2**31), 2**31, (K * bits // 32, N), dtype=torch.int64).to(torch.int32)
    q_scale = torch.randint(-(2**31), 2**31, (groups, N // 8), dtype=torch.int64).to(torch.int32)
    table = torch.tensor([[bits, g * group * bits // 32] for g in range(groups)], dtype=torch.int16).flatten()
    return q_weight, q_scale, torch.full((groups,), 0.02 / 2**bits).half(), table, torch.randperm(K).to(torch.int32)


def gptq(size: int, bits: int, *, plain: bool, group: int = 128) -> Tensor:
    """A random GPTQ matrix; plain: symmetric, rows in order."""
    qweight = torch.randint(-(2**31), 2**31, (size * bits // 32, size), dtype=torch.int64).to(torch.int32)
    groups = size // group
    zeros = None if plain else torch.randint(0, 2**bits, (groups, size)).short()
    perm = None if plain else torch.randperm(size).to(torch.int32)
    rows = torch.full((groups,), group, dtype=torch.int32)
    return ops.pack_gptq(qweight, torch.full((groups, size), 0.02 / 2**bits).half(), zeros, perm, rows, bits=bits, in_features=size)


def best(run: Callable[[], object], rounds: int) -> float:
    """Shortest time of `run` in seconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def gemv(size: int, bits: int, threads: list[int], memory: Tensor, rounds: int, total: int) -> list[dict[str, float]]:
    """One width: GB/s of weights and the ratio to the yardstick, per thread count."""
    parts = exl2(size, size, bits)
    first = ops.pack_exl2(*parts)
    blobs = [first, *(ops.pack_exl2(*parts) for _ in range(total // len(first)))]
    x = torch.randn(1, size)
    rows = []
    for n in threads:
        torch.set_num_threads(n)
        read_s, pass_s = [], []
        for _ in range(rounds):
            read_s.append(best(lambda: ops.read_memory(memory), 1))
            pass_s.append(best(lambda: [ops.linear(x, b) for b in blobs], 1))
        read = len(memory) / min(read_s) / 1e9
        speed = sum(len(b) for b in blobs) / min(pass_s) / 1e9
        rows.append(
            {"bits": bits, "threads": n, "us": min(pass_s) / len(blobs) * 1e6, "GB/s": speed, "read GB/s": read, "ratio": speed / read}
        )
    return rows


def beside_gptq(size: int, threads: list[int], rounds: int, total: int) -> list[dict[str, float]]:
    """Microseconds per product of EXL2 and GPTQ, and how much longer GPTQ takes."""
    rows = []
    x = torch.randn(1, size)
    for bits in (2, 3, 4, 8):
        parts, copies = exl2(size, size, bits), range(max(2, total // (size * size * bits // 8)))
        blobs = {
            "exl2": [ops.pack_exl2(*parts) for _ in copies],
            "gptq": [gptq(size, bits, plain=True) for _ in copies],
            "gptq zeros, act-order": [gptq(size, bits, plain=False) for _ in copies],
        }
        for n in threads:
            torch.set_num_threads(n)
            times: dict[str, float] = dict.fromkeys(blobs, float("inf"))
            for _ in range(rounds):
                for name, some in blobs.items():
                    spent = best(lambda some=some: [ops.linear(x, b) for b in some], 1) / len(some)
                    times[name] = min(times[name], spent)
            row: dict[str, float] = {"bits": bits, "threads": n}
            row |= {f"{name} us": t * 1e6 for name, t in times.items()}
            rows.append({**row, "ratio": times["gptq"] / times["exl2"], "ratio zeros": times["gptq zeros, act-order"] / times["exl2"]})
    return rows


def gemm(size: int, kind: str, threads: list[int], rounds: int, M: int = 512) -> list[dict[str, float | str]]:
    """GMAC/s of M rows times size x size."""
    blob = ops.pack_dense(torch.randn(size, size).half()) if kind == "f16" else ops.pack_exl2(*exl2(size, size, int(kind)))
    x = torch.randn(M, size)
    rows: list[dict[str, float | str]] = []
    for n in threads:
        torch.set_num_threads(n)
        s = best(lambda: ops.linear(x, blob), rounds)
        rows.append({"weights": kind, "threads": n, "ms": s * 1e3, "GMAC/s": M * size * size / s / 1e9})
    return rows


def small_program() -> tuple[ops.Program, list[Tensor], list[Tensor]]:
    """The demo model's shape at 4 bits with a 6-bit head, and its pools."""
    H, inter, V, heads, kv, D, layers = 256, 768, 4096, 4, 2, 64, 12
    angles = torch.rand(1024, D // 2)
    norm = torch.ones(H)
    program = ops.Program()
    program.add(ops.EmbedOp(table=torch.randn(V, H).half()))
    for i in range(layers):
        parts = exl2(H, (heads + 2 * kv) * D, 4, 32)
        tables = {"cos": angles.cos(), "sin": angles.sin()}
        sizes = {"num_heads": heads, "num_kv_heads": kv, "head_dim": D}
        program.add(ops.QkvOp(norm=norm, eps=1e-5, blob=ops.pack_exl2(*parts), **tables, **sizes, layer=i))
        program.add(ops.AttentionOp(layer=i, scale=D**-0.5))
        program.add(ops.ResidualOp(blob=ops.pack_exl2(*exl2(heads * D, H, 4, 32))))
        program.add(ops.GateUpOp(norm=norm, eps=1e-5, blob=ops.pack_exl2(*exl2(H, 2 * inter, 4, 32))))
        program.add(ops.ResidualOp(blob=ops.pack_exl2(*exl2(inter, H, 4, 32))))
    program.add(ops.HeadOp(norm=norm, eps=1e-5, blob=ops.pack_exl2(*exl2(H, V, 6, 128))))
    pools = [[torch.zeros(4, kv, 256, D, dtype=torch.float16) for _ in range(layers)] for _ in range(2)]
    return program, pools[0], pools[1]


def steps(threads: list[int], rounds: int) -> list[dict[str, float]]:
    """Ms per token of decode_step at a few context lengths, and prefill of 512 tokens in tok/s."""

    def i32(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    program, k, v = small_program()
    rows = []
    for n in threads:
        torch.set_num_threads(n)
        row: dict[str, float] = {"threads": n}
        for context in (16, 512, 1000):
            at = context - 1
            batch = (i32([5]), i32([at]), i32([at]), i32([[0, 1, 2, 3]]), i32([0, 1]), i32([context]), i32([0]))
            row[f"ms at {context}"] = best(lambda batch=batch: [program.run(*batch, k, v) for _ in range(20)], rounds) / 20 * 1e3
        T = 512
        batch = (i32([5] * T), i32(range(T)), i32(range(T)), i32([[0, 1, 2, 3]]), i32([0, T]), i32([T]), i32([T - 1]))
        row["prefill tok/s"] = T / best(lambda batch=batch: program.run(*batch, k, v), rounds)
        rows.append(row)
    return rows


def table(title: str, rows: list[dict]) -> None:
    """Print rows under a title."""
    print(f"\n{title}")
    print("  ".join(f"{name:>13}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:13.2f}" if isinstance(value, float) else f"{value!s:>13}" for value in row.values()))


def main() -> None:
    """Run all three parts, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", choices=["gemv", "gptq", "gemm", "step"])
    parser.add_argument("--json")
    args = parser.parse_args()
    threads, rounds = [int(n) for n in args.threads.split(",")], 3 if args.quick else 7
    print(f"instruction set: {_load.load_libraries().isa}")
    result: dict[str, object] = {"isa": _load.load_libraries().isa}
    if args.only in (None, "gemv"):
        memory = huge(GIB)
        found = [row for b in args.widths.split(",") for row in gemv(args.size, int(b), threads, memory, rounds, GIB)]
        table(f"GEMV {args.size} x {args.size}, one row", found)
        result["gemv"] = found
    if args.only in (None, "gptq"):
        found = beside_gptq(args.size, threads, 2 * rounds, GIB // 8)
        table(f"EXL2 beside GPTQ, {args.size} x {args.size}, one row", found)
        result["gptq"] = found
    if args.only in (None, "gemm"):
        found = [row for kind in ("2", "3", "4", "5", "6", "8", "f16") for row in gemm(args.size, kind, threads, max(2, rounds // 2))]
        table(f"GEMM {args.size} x {args.size}, 512 rows", found)
        result["gemm"] = found
    if args.only in (None, "step"):
        found = steps(threads, 3 * rounds)
        table("Whole steps, demo model's shape, 4 bits", found)
        result["step"] = found
    if args.json:
        with open(args.json, "w") as out:
            json.dump(result, out, indent=1)


if __name__ == "__main__":
    main()
