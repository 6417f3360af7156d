"""Many tokens at once on the GPU: the matrices unpacked to fp16, one by one, and torch's own products and attention.

Runs a `Program` op by op; K and V go to the cache through the kernels that decoding uses, so the two continue each other. Residual and
norms are fp32, the inputs of products fp16, their sums fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2nb.ops import gpu, reference
from exl2nb.ops.cuda_attention import gate_rows, gather_cache, norm_rows, rope_append, rotate_rows
from exl2nb.ops.layer_ops import paged_attention
from exl2nb.ops.prefill_attention import attend, attend_whole, can_attend
from exl2nb.ops.program import Program
from exl2nb.ops.records import AttentionOp, EmbedOp, GateUpOp, HeadOp, NormedOp, Op, QkvOp, ResidualOp, ResidualOutOp, RoutedOp

if TYPE_CHECKING:
    from exl2nb.ops.lora import Adapter, LoraChange

FEW = 64  # rows that go through the kernels of decode steps rather than through an unpacked matrix
ROWS_OF_KERNELS = (16, 32, 64)  # each may be computed by another kernel, of which there is one per doubling


@dataclass(frozen=True)
class Sequences:
    """What prefill must know on the host: per sequence the bounds of its tokens and its length, this step's tokens included."""

    bounds: list[int]
    lengths: list[int]


@dataclass(frozen=True)
class Inputs:
    """The step's tensors on the GPU, int32, as in `model.batch.Batch`."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    logit_rows: Tensor


@dataclass(frozen=True)
class Adapters:
    """The adapters of a step with their rows, int64 on the GPU: of the step's tokens, and of its logit rows."""

    tokens: list[tuple[Adapter, Tensor]]
    wanted: list[tuple[Adapter, Tensor]]

    @classmethod
    def of(cls, device: torch.device, adapters: Sequence[Adapter | None], rows: Tensor, wanted: Tensor) -> Adapters:
        """Of a batch.

        Args:
            adapters: row 0, 1, ... of a table. rows: int32 `(T,)` on the host, each token's, -1 for none. wanted: int32 `(R,)`.
        """

        def of(each: Tensor) -> list[tuple[Adapter, Tensor]]:
            numbers = sorted(set(each.tolist()) - {-1})
            return [(adapter, (each == n).nonzero()[:, 0].to(device)) for n in numbers if (adapter := adapters[n]) is not None]

        return cls(of(rows), of(rows[wanted.long()]))


def prefill(
    program: Program,
    inputs: Inputs,
    sequences: Sequences,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    *,
    watch: Callable[[Op, Tensor, Tensor | None], None] | None = None,
    lora: Adapters | None = None,
    blocks: Sequence[tuple[int, int, int, int]] = (),
) -> Tensor:
    """Logits f32 `(R, V)` of a step of any number of tokens; K and V are written to their slots.

    watch: called after every op with the op, the residual stream f32 `(T, H)`, and what attention or MLP left to be added.
    lora: adapters of the tokens. blocks: runs of tokens that see each other whole, as `model.batch.Batch.blocks` gives them.
    """
    run = Run(program, inputs, sequences, k_pools, v_pools, lora, blocks)
    for run.number, op in enumerate(program.steps):
        getattr(run, op.name)(op)
        if watch is not None:
            watch(op, run.x, run.done.get(False))
    return run.logits


def unembed(program: Program, x: Tensor) -> Tensor:
    """The program's head on rows f32 `(R, H)` of the residual stream: logits f32 `(R, V)`."""
    nothing = torch.empty(0, dtype=torch.int32, device=x.device)
    rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
    run = Run(program, Inputs(*[nothing] * 6, logit_rows=rows), Sequences([], []), [], [])
    run.x = x
    head = program.steps[-1]
    assert isinstance(head, HeadOp)
    run.norm_head(head)
    return run.logits


class Run:
    """The state of one walk over a program: `prefill` calls the method of each op's name; `model.trace` calls them one by one."""

    def __init__(
        self,
        program: Program,
        inputs: Inputs,
        sequences: Sequences,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        lora: Adapters | None = None,
        blocks: Sequence[tuple[int, int, int, int]] = (),
    ) -> None:
        self.lora, self.number = lora or Adapters([], []), 0  # number: of the op, for adapters
        self.blocks = blocks
        self.program, self.inputs, self.sequences, self.k, self.v = program, inputs, sequences, k_pools, v_pools
        self.x = self.logits = torch.empty(0)
        self.done: dict[bool, Tensor] = {}
        self.parts: tuple[Tensor, ...] = ()  # q, k, v until attention has read them
        self.gathered = False  # what attention left, from all ranks
        self._unpacked_half: Tensor | None = None

    def embed(self, a: EmbedOp) -> None:
        """The residual stream of the tokens."""
        i = self.inputs
        self.x = reference.embed(a.table, i.ids, a.scale, a.position_table, i.positions)
        for change, rows in self._changes():
            for part in change.parts:
                low = part.a[i.ids[rows].long(), : part.rank].float() * part.scale
                self.x[rows, part.first : part.first + part.b.shape[1]] += low @ part.b.float()

    def norm_qkv_rope(self, a: QkvOp) -> None:
        """Q, K and V of the stream; K and V go to the cache."""
        i, layer, heads = self.inputs, a.layer, (a.num_heads, a.num_kv_heads, a.head_dim)
        x, pools = self._normed(self.x, a), (self.k[layer], self.v[layer])
        bare = a.bias is None and a.q_norm is None and a.k_norm is None and not a.clip and not a.interleaved
        if bare and a.head_dim % 16 == 0 and 2 * a.cos.shape[1] == a.head_dim and pools[0].dtype == pools[1].dtype == torch.float16:
            y = self._adapted(x, a.blob, None, half=True)
            rotate_rows(y, a.cos, a.sin, i.positions, i.slots, *pools, *heads)
            q, k, v = y.view(len(y), -1, a.head_dim).split([a.num_heads, a.num_kv_heads, a.num_kv_heads], 1)
            self.parts = q, k, v
            return
        y = self._adapted(x, a.blob, a.bias)
        self.parts = rope_append(
            y, a.cos, a.sin, i.positions, i.slots, *pools, a.q_norm, a.k_norm, *heads, a.eps, a.layer_norm, a.interleaved,
            a.clip,
        )  # fmt: skip

    def paged_attention(self, a: AttentionOp) -> None:
        """Attention over the cache, left in `done`."""
        q, pools, pages = self.parts[0], (self.k[a.layer], self.v[a.layer]), self.inputs.block_table
        self._attend(a)
        for first, last, row, end in self.blocks:
            y = attend_whole(q[first:last], *pools, pages[row], end, scale=a.scale, window=a.window, softcap=a.softcap)
            self.done[False][first:last] = y.to(self.done[False].dtype)
        if peers := self.program.peers:
            mixed = self.done[False].float().reshape(len(q), -1)
            self.done[False], self.gathered = peers.gather(mixed, [mixed.shape[1]] * peers.size), True

    def _attend(self, a: AttentionOp) -> None:
        (q, k, v), self.parts = self.parts, ()
        layer, head_dim = a.layer, q.shape[2]
        k_pool, v_pool = self.k[layer], self.v[layer]
        longest, softcap, i = max(self.sequences.lengths), a.softcap, self.inputs
        window = a.window if 0 < a.window < longest else 0
        if torch.float32 in (k_pool.dtype, v_pool.dtype) or not can_attend(head_dim, window=window, softcap=softcap):
            self.done[False] = paged_attention(
                q.float().contiguous(), k_pool, v_pool, i.block_table, i.cu_seqlens, i.context_lens, scale=a.scale, window=a.window,
                softcap=softcap,
            )  # fmt: skip
            return
        bounds, parts = self.sequences.bounds, []
        for row, (first, last, length) in enumerate(zip(bounds, bounds[1:], self.sequences.lengths)):
            if length == last - first and k_pool.dtype == v_pool.dtype == torch.float16:
                keys, values = k[first:last], v[first:last]
            else:  # what is stored, so that a prompt in pieces sees what a prompt at once would
                keys, values = gather_cache(k_pool, v_pool, i.block_table[row], length, head_dim)
            parts.append(attend(q[first:last], keys, values, scale=a.scale, window=window, softcap=softcap))
        self.done[False] = parts[0] if len(parts) == 1 else torch.cat(parts)

    def linear_residual(self, a: ResidualOp) -> None:
        """The projection of what is in `done`, added to the stream."""
        x, scale = self.done.pop(a.side).half(), a.scale
        whole, self.gathered = self.gathered and not a.side, self.gathered and a.side  # attention's matrix is whole on every rank
        if peers := None if whole else self.program.peers:
            y = peers.add(self._adapted(x, a.blob, a.bias))
            self.x.add_(y if a.norm is None else F.rms_norm(y, (y.shape[1],), a.norm, a.eps), alpha=scale)
            return
        if len(x) > FEW and a.norm is None and not self._changes():  # added up in the product
            torch.addmm(self.x, x, self.weight(a.blob, x.device), out_dtype=torch.float32, alpha=scale, out=self.x)
            if a.bias is not None:
                self.x.add_(a.bias, alpha=scale)
            return
        y = self._adapted(x, a.blob, a.bias)
        if a.norm is not None:
            plain, y = y, F.rms_norm(y, (y.shape[1],), a.norm, a.eps)
            for change, rows in self._changes():
                if change.norm is not None:
                    y[rows] = F.rms_norm(plain[rows], (y.shape[1],), change.norm, a.eps)
        self.x.add_(y, alpha=scale)

    def norm_gate_up(self, a: GateUpOp) -> None:
        """The MLP's activations, left in `done`."""
        y = self._adapted(self._normed(self.x, a), a.blob, a.bias, half=True)
        self.done[a.side] = gate_rows(y, reference.ACTIVATIONS.index(a.activation), a.gated)

    def routed_mlp(self, e: RoutedOp) -> None:
        """Expert by expert, for the rows that chose it; the host waits for the choice."""
        h = norm_rows(self.x, e.norm, e.norm_bias, e.eps, e.layer_norm)
        chosen, weight = reference.route(self.product(h, e.blob, None).float(), e.top_k, e.renormalize)
        out = torch.zeros_like(self.x)
        for expert in chosen.unique().tolist():  # rising, so that a row's experts are added in that order
            rows, place = torch.where(chosen == expert)
            y = self.product(self._gated(h[rows], e.up[expert], e.activation), e.down[expert], None)
            out.index_add_(0, rows, weight[rows, place, None] * y)
        if e.shared_up is not None and e.shared_down is not None:
            shared = self.product(self._gated(h, e.shared_up, e.activation), e.shared_down, None)
            out += shared if e.shared_gate is None else self.product(h, e.shared_gate, None).sigmoid() * shared
        if self.program.peers:
            out = self.program.peers.add(out)
        self.x.add_(out if e.post_norm is None else F.rms_norm(out, (out.shape[1],), e.post_norm, e.post_eps), alpha=e.scale)

    def _gated(self, h: Tensor, blob: Tensor, activation: str) -> Tensor:
        return gate_rows(self.product(h, blob, None, half=True), reference.ACTIVATIONS.index(activation), True)

    def norm_head(self, a: HeadOp) -> None:
        """Logits of the wanted rows."""
        rows = self.x.index_select(0, self.inputs.logit_rows)
        wanted = self._changes(self.lora.wanted)
        self.logits = self._adapted(self._normed(rows, a, wanted), a.blob, a.bias, changes=wanted)
        if peers := self.program.peers:
            self.logits = peers.gather(self.logits, peers.vocab)

    # ---- adapters

    def _changes(self, of: list[tuple[Adapter, Tensor]] | None = None) -> list[tuple[LoraChange, Tensor]]:
        """What the adapters change in the current op, and in which rows."""
        of = self.lora.tokens if of is None else of
        return [(change, rows) for adapter, rows in of if (change := adapter.get(self.number)) is not None]

    def _normed(self, x: Tensor, a: NormedOp, changes: list[tuple[LoraChange, Tensor]] | None = None) -> Tensor:
        """The norm in front of an op's matrix, f16."""
        y = norm_rows(x, a.norm, a.norm_bias, a.eps, a.layer_norm)
        for change, rows in self._changes() if changes is None else changes:
            if change.norm is not None:
                y[rows] = norm_rows(x[rows], change.norm, change.norm_bias, a.eps, a.layer_norm)
        return y

    def _adapted(
        self,
        x: Tensor,
        blob: Tensor,
        bias: Tensor | None,
        *,
        half: bool = False,
        changes: list[tuple[LoraChange, Tensor]] | None = None,
    ) -> Tensor:
        """`product`, and what the adapters add to it."""
        changes = self._changes() if changes is None else changes
        y = self.product(x, blob, bias, half=half and not changes)
        for change, rows in changes:
            every = len(rows) == len(y)  # they ascend
            own, mine = (x, y) if every else (x[rows], y[rows])
            for part in change.parts:
                low = torch.mm(own, part.a, out_dtype=torch.float32)[:, : part.rank] * part.scale
                mine[:, part.first : part.first + part.b.shape[1]] += low @ part.b.float()
            if change.gain is not None:
                mine += change.gain * mine
            if change.bias is not None:
                mine += change.bias
            if not every:
                y[rows] = mine
        return y.half() if half and changes else y

    def residual_out(self, a: ResidualOutOp) -> None:
        """The stream itself, of every token."""
        self.logits = self.x

    def product(self, x: Tensor, blob: Tensor, bias: Tensor | None, *, half: bool = False) -> Tensor:
        """X f16 `(M, K)` times a matrix, plus a bias: f32 `(M, N)`, or f16 with `half`."""
        if len(x) <= FEW:
            y = gpu.linear(self.program.heads[blob.data_ptr()], x.float(), bias, stream_k=True)
            return y.half() if half else y
        weight = self.weight(blob, x.device)
        y = torch.mm(x, weight) if half else torch.mm(x, weight, out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)

    def weight(self, blob: Tensor, device: torch.device) -> Tensor:
        """A matrix f16 `(K, N)`, overwritten by the next one."""
        head = self.program.heads[blob.data_ptr()]
        weight = self.room(*gpu.shape_of(head), device)
        gpu.unpack_into(head, weight)
        return weight

    def room(self, K: int, N: int, device: torch.device) -> Tensor:
        """Where a matrix f16 `(K, N)` may go: one buffer for all of them, since a buffer each would leave holes among the activations."""
        if self._unpacked_half is None or self._unpacked_half.numel() < K * N:
            self._unpacked_half = torch.empty(max(K * N, self.program.widest), dtype=torch.float16, device=device)
        return self._unpacked_half[: K * N].view(K, N)
