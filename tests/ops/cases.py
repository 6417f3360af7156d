"""Random matrices, pools, batches and a small network as op arguments: what several op tests share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.cache.spec import PAGE_STORAGES
from exl2nb.ops import kv_codes, reference
from exl2nb.ops.interpreter import CpuBackend, Inputs, interpret

P = 256
NAMES = ("ids", "positions", "slots", "block_table", "cu_seqlens", "context_lens", "logit_rows")
"""Of the tensors of a batch, in their order."""


def exl2(
    K: int, N: int, groups: list[tuple[int, int]], *, seed: int = 0, scale: float = 0.02
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random valid EXL2 tensors; groups = [(bits, rows)], summing to K."""
    g = torch.Generator().manual_seed(seed)
    assert sum(rows for _, rows in groups) == K
    packed_rows = [bits * rows // 32 for bits, rows in groups]
    q_weight = torch.randint(-(2**31), 2**31, (sum(packed_rows), N), generator=g, dtype=torch.int64).to(torch.int32)
    q_scale = torch.randint(-(2**31), 2**31, (len(groups), N // 8), generator=g, dtype=torch.int64).to(torch.int32)
    steps = torch.tensor([scale / 2 ** (bits - 1) for bits, _ in groups])
    q_scale_max = (steps * (1 + torch.rand(len(groups), generator=g))).half()
    firsts = [sum(packed_rows[:i]) for i in range(len(groups))]
    q_groups = torch.tensor([v for (bits, _), first in zip(groups, firsts) for v in (bits, first)], dtype=torch.int16)
    return q_weight, q_scale, q_scale_max, q_groups, torch.randperm(K, generator=g).to(torch.int32)


@dataclass(frozen=True)
class GptqCase:
    """Arguments of `ops.pack_gptq` and the f32 matrix `(K, N)` they mean."""

    arguments: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
    bits: int
    weight: Tensor

    def pack(self) -> Tensor:
        """The blob."""
        return ops.pack_gptq(*self.arguments, bits=self.bits, in_features=len(self.weight))


def gptq(
    K: int, N: int, bits: int, size: int, *, act_order: bool = False, zeros: bool = True, wide: bool = False, seed: int = 0
) -> GptqCase:
    """Groups of `size` rows, the last one shorter; act_order scatters them; groups that are no whole units are padded."""
    g = torch.Generator().manual_seed(seed)
    groups = -(-K // size)
    group_of = torch.arange(K) // size
    if act_order:
        group_of = group_of[torch.randperm(K, generator=g)]
    qweight = torch.randint(-(2**31), 2**31, (K * bits // 32, N), generator=g, dtype=torch.int64).to(torch.int32)
    scales = (0.5 + torch.rand(groups, N, generator=g)) / 2**bits
    scales = scales if wide else scales.half()
    zero = torch.randint(0, 2**bits + 1, (groups, N), generator=g).short() if zeros else None
    members = [(group_of == i).nonzero()[:, 0] for i in range(groups)]
    padded = [torch.nn.functional.pad(rows, (0, -len(rows) % 32), value=K) for rows in members]
    perm = torch.cat(padded).to(torch.int32)
    sizes = torch.tensor([len(rows) for rows in padded], dtype=torch.int32)
    codes = reference.codes(qweight, torch.tensor([bits, 0], dtype=torch.int16), K)[0].float()
    middle = torch.full((groups, N), 2.0 ** (bits - 1)) if zero is None else zero.float()
    weight = (codes - middle[group_of]) * scales.float()[group_of]
    identity = torch.equal(perm.long(), torch.arange(K))
    return GptqCase((qweight, scales, zero, None if identity else perm, sizes), bits, weight)


@dataclass
class Net:
    """Random decoder; `program` holds its ops, `run` runs them one by one.

    bits: of every matrix, in groups of `group` rows and a last one of what is left; 0: three widths in each. gptq: all but the head in that
    format. scale: of the largest weights. headed: False for a part of a model, which returns the residual stream.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    inter: int = 96
    vocab: int = 101
    bias: bool = False
    head_norms: bool = False
    dense: bool = False
    pages: int = 4
    storages: tuple[str, str] = ("fp16", "fp16")
    window: int = 0
    softcap: float = 0.0
    bits: int = 0
    group: int = 64
    gptq: bool = False
    scale: float = 0.3
    headed: bool = True
    device: str = "cpu"
    weights: list[dict[str, Tensor | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(7)
        self.table = torch.randn(self.vocab, self.hidden, generator=g).half().to(self.device)
        angles = torch.arange(4 * P)[:, None] * (10000.0 ** (-torch.arange(self.head_dim // 2) / (self.head_dim // 2)))[None]
        self.cos, self.sin = angles.cos().contiguous().to(self.device), angles.sin().contiguous().to(self.device)

        def norm(n: int) -> Tensor:
            return (1 + 0.1 * torch.randn(n, generator=g)).to(self.device)

        def maybe(flag: bool, n: int) -> Tensor | None:
            return (0.1 * torch.randn(n, generator=g)).to(self.device) if flag else None

        q, kv, D = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.head_dim
        for i in range(self.layers):
            self.weights.append(
                {
                    "norm1": norm(self.hidden),
                    "norm2": norm(self.hidden),
                    "qkv": ops.pack_concat([self.matrix(self.hidden, n, seed=9 * i + j, perm=9 * i) for j, n in enumerate((q, kv, kv))]),
                    "o": self.matrix(q, self.hidden, seed=9 * i + 3),
                    "gate_up": ops.pack_concat([self.matrix(self.hidden, self.inter, seed=9 * i + j, perm=9 * i + 4) for j in (4, 5)]),
                    "down": self.matrix(self.inter, self.hidden, seed=9 * i + 6),
                    "qkv_bias": maybe(self.bias, q + 2 * kv),
                    "o_bias": maybe(self.bias, self.hidden),
                    "gu_bias": maybe(self.bias, 2 * self.inter),
                    "q_norm": norm(D) if self.head_norms else None,
                    "k_norm": norm(D) if self.head_norms else None,
                }
            )
        self.norm = norm(self.hidden)
        self.head = self.matrix(self.hidden, self.vocab, seed=99)
        self.program = self.build()

    def matrix(self, K: int, N: int, *, seed: int, perm: int | None = None) -> Tensor:
        """One packed matrix: mixed widths, one width, or f16."""
        if self.dense:
            return ops.pack_dense(torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).mul(0.1).half().to(self.device))
        if self.gptq and N % 32 == 0:
            made = gptq(K, N, self.bits, self.group, act_order=perm is None, seed=seed)
            qweight, scales, *rest = (None if t is None else t.to(self.device) for t in made.arguments)
            return ops.pack_gptq(qweight, (scales * self.scale).half(), *rest, bits=made.bits, in_features=K)
        groups = [(6, 32), *[(4, 32)] * (K // 32 - 2), (3, 32)]
        if self.bits:
            groups = [(self.bits, min(self.group, K - row)) for row in range(0, K, self.group)]
        parts = list(exl2(K, -(-N // 32) * 32, groups, seed=seed, scale=self.scale))
        if perm is not None:
            parts[4] = torch.randperm(K, generator=torch.Generator().manual_seed(perm)).to(torch.int32)
        return ops.pack_exl2(*(part.to(self.device) for part in parts), out_features=N)

    def pools(self) -> tuple[list[Tensor], list[Tensor]]:
        """Fresh K and V pools of `storages`, filled with values that would show if they were read."""
        return tuple([new_pool(kind, self.pages, self.kv_heads, self.head_dim) for _ in range(self.layers)] for kind in self.storages)

    def projection(self, w: dict, layer: int = 0) -> ops.QkvOp:
        """The first half of a layer's attention."""
        heads = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return ops.QkvOp(
            norm=w["norm1"], eps=1e-5, blob=w["qkv"], bias=w["qkv_bias"], cos=self.cos, sin=self.sin, **heads, q_norm=w["q_norm"],
            k_norm=w["k_norm"], layer=layer,
        )  # fmt: skip

    def build(self) -> ops.Program:
        """The whole step as a program."""
        p = ops.Program(self.device)
        p.add(ops.EmbedOp(table=self.table))
        for i, w in enumerate(self.weights):
            p.add(self.projection(w, i))
            p.add(ops.AttentionOp(layer=i, scale=self.head_dim**-0.5, window=self.window, softcap=self.softcap))
            p.add(ops.ResidualOp(blob=w["o"], bias=w["o_bias"]))
            p.add(ops.GateUpOp(norm=w["norm2"], eps=1e-5, blob=w["gate_up"], bias=w["gu_bias"]))
            p.add(ops.ResidualOp(blob=w["down"]))
        p.add(ops.HeadOp(norm=self.norm, eps=1e-5, blob=self.head) if self.headed else ops.ResidualOutOp())
        return p

    def run(self, *arguments) -> Tensor:
        """The same step, op by op. The arguments are those of `Program.run`."""
        return op_by_op(self.program, *arguments)


def op_by_op(program, *arguments) -> Tensor:
    """A program's step through the compiled single ops. The arguments are those of `Program.run`."""
    *batch, k_pools, v_pools = arguments
    return interpret(program.steps, CpuBackend(Inputs(*batch), k_pools, v_pools))


def new_pool(storage: str, pages: int, heads: int, head_dim: int, *, page: int = P, fill: float = 1e3) -> Tensor:
    """A pool of any storage; every byte of a coded one is 0x7e, every number of a plain one `fill`: seen if it is read."""
    size = pages * heads * PAGE_STORAGES[storage].row_bytes(page, head_dim)
    pool = PAGE_STORAGES[storage].pool(torch.zeros(size, dtype=torch.uint8), pages, heads, page, head_dim)
    if pool.dim() == 4:
        return pool.fill_(fill)
    pool.view(torch.uint8).fill_(0x7E)
    return pool


def i32(values) -> Tensor:
    """int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def same_bits(ours, theirs) -> bool:
    """Whether two rows of tensors are equal to the bit, NaN included."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


def batch(sequences: list[tuple[int, list[int], list[int]]], rows=None) -> tuple[Tensor, ...]:
    """Batch tensors of sequences `(start, ids, pages)`: ids at positions start.., logits of all rows or of `rows`."""
    ids = [i for _, part, _ in sequences for i in part]
    positions = [range(start, start + len(part)) for start, part, _ in sequences]
    slots = [pages[p // P] * P + p % P for at, (_, _, pages) in zip(positions, sequences) for p in at]
    bounds = [0, *itertools.accumulate(len(at) for at in positions)]
    tables = i32([pages for _, _, pages in sequences]), i32(bounds), i32([at.stop for at in positions])
    return i32(ids), i32([p for at in positions for p in at]), i32(slots), *tables, i32(range(len(ids)) if rows is None else rows)


def single(start: int, ids: list[int], pages: list[int]) -> tuple[Tensor, ...]:
    """Batch tensors of one sequence."""
    return batch([(start, ids, pages)])


def prompts(net: Net, counts: list[int], rows=None) -> tuple[Tensor, ...]:
    """Batch tensors of new sequences of so many tokens, each in a page of its own."""
    ends = itertools.accumulate(counts)
    return batch(
        [(0, [(17 * i) % net.vocab for i in range(end - n, end)], [page]) for page, (n, end) in enumerate(zip(counts, ends))], rows
    )


def attention_case(lengths, queries, Hq, Hkv, D, pair=("fp16", "fp16"), *, page=P, seed=0) -> tuple[Tensor, ...]:
    """Random q and pools; unused pages and slots hold NaN or codes that would show, which must not be read into a result."""
    g = torch.Generator().manual_seed(seed)
    needs = [-(-n // page) for n in lengths]
    order, used = torch.randperm(sum(needs) + 2, generator=g), 0
    pools = [new_pool(kind, len(order), Hkv, D, page=page, fill=float("nan")) for kind in pair]
    table = torch.full((len(lengths), max(needs)), -7, dtype=torch.int32)
    for b, n in enumerate(lengths):
        table[b, : needs[b]] = order[used : used + needs[b]]
        used += needs[b]
        at = torch.arange(n)
        for pool in pools:
            kv_codes.write_slots(pool, table[b, at // page].long() * page + at % page, torch.randn(n, Hkv, D, generator=g))
    q = torch.randn(sum(queries), Hq, D, generator=g)
    return q, *pools, table, i32([0, *itertools.accumulate(queries)]), i32(lengths)


def refused_bytes(blob, x, count):
    """How many of the first `count` bytes of a blob make `linear` refuse it when they are inverted; none may crash it."""
    refused = 0
    for at in range(count):
        damaged = blob.clone()
        damaged[at] ^= 0xFF
        try:
            ops.linear(x, damaged)
        except RuntimeError:
            refused += 1
    return refused
