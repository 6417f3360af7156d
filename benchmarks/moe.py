"""A layer of routed experts beside a plain MLP that reads as many bytes: what routing and many small matrices cost a decode step.

    python benchmarks/moe.py --threads 1

Random 4-bit weights, one token, a program of `--layers` layers; both take turns, and a line per shape gives the quartile times.
"""

from __future__ import annotations

import argparse
import time

import torch
from make_random_model import ONE
from make_random_model import matrix as random_matrix

from exl2nb import ops

SHAPES = ((1024, 8, 2, 1792), (1024, 32, 4, 512), (2048, 64, 8, 768))  # hidden, experts, per token, intermediate


def matrix(inputs: int, outputs: int) -> torch.Tensor:
    """A random 4-bit blob, in the order of its inputs."""
    parts = random_matrix(inputs, outputs, ONE[4, 128], 0.02, torch.arange(inputs, dtype=torch.int32), torch.Generator().manual_seed(0))
    return ops.pack_exl2(**parts)


def programs(hidden: int, experts: int, top_k: int, inner: int, layers: int) -> dict[str, ops.Program]:
    """The two steps, MLPs alone."""
    norm, table, head = torch.ones(hidden), torch.randn(4, hidden), ops.pack_dense(torch.randn(16, hidden))
    gate, up, down = (matrix(*shape) for shape in ((hidden, inner), (hidden, inner), (inner, hidden)))
    wide = [matrix(*shape) for shape in ((hidden, top_k * inner), (hidden, top_k * inner), (top_k * inner, hidden))]
    plain, routed = ops.Program(), ops.Program()
    plain.add(ops.EmbedOp(table=table))
    routed.add(ops.EmbedOp(table=table))
    for _ in range(layers):
        plain.add(ops.GateUpOp(norm=norm, eps=1e-5, blob=ops.pack_concat(wide[:2])))
        plain.add(ops.ResidualOp(blob=wide[2].clone()))
        ups, downs = [ops.pack_concat([gate, up]) for _ in range(experts)], [down.clone() for _ in range(experts)]
        router = ops.pack_dense(torch.randn(experts, hidden))
        routed.add(ops.RoutedOp(norm=norm, eps=1e-5, blob=router, up=ups, down=downs, top_k=top_k, renormalize=1.0))
    plain.add(ops.HeadOp(norm=norm, eps=1e-5, blob=head))
    routed.add(ops.HeadOp(norm=norm, eps=1e-5, blob=head))
    return {"plain": plain, "routed": routed}


def step(program: ops.Program) -> float:
    """Seconds of one step of one token."""
    token, pool = torch.zeros(1, dtype=torch.int32), [torch.zeros(1, 1, 256, 8)]
    bounds, length = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    start = time.perf_counter()
    program.run(token, token, token, token[None], bounds, length, token, pool, pool)
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for hidden, experts, top_k, inner in SHAPES:
        made = programs(hidden, experts, top_k, inner, args.layers)
        times: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(args.rounds):
            for name, program in made.items():
                times[name].append(step(program))
        plain, routed = (sorted(values)[len(values) // 4] for values in times.values())
        megabytes = args.layers * 1.5 * hidden * top_k * inner / 1e6
        what = f"hidden {hidden}, {experts} experts of {inner}, {top_k} per token, {megabytes:.0f} MB a step"
        print(f"{what}: plain {1e3 * plain:.2f} ms, routed {1e3 * routed:.2f} ms, routed at {plain / routed:.2f} of plain's speed")


if __name__ == "__main__":
    main()
