"""Many tokens at once on the GPU: the matrices unpacked to fp16, one by one, and torch's own products and attention.

Runs a `Program` op by op; K and V go to the cache through the kernels that decoding uses, so the two continue each other. Residual and
norms are fp32, the inputs of products fp16, their sums fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2nb.ops import gpu, reference
from exl2nb.ops.cuda_attention import gate_rows, gather_cache, norm_rows, rope_append, rotate_rows
from exl2nb.ops.interpreter import At, Backend, Block, Inputs, interpret
from exl2nb.ops.layer_ops import paged_attention
from exl2nb.ops.prefill_attention import attend_prefix, attend_whole, can_attend
from exl2nb.ops.program import Program
from exl2nb.ops.records import AttentionOp, EmbedOp, GateUpOp, HeadOp, NormedOp, Op, QkvOp, ResidualOp, RoutedOp

if TYPE_CHECKING:
    from exl2nb.ops.lora_table import Adapter, LoraChange

MAX_STEP_KERNEL_ROWS = 64  # rows that go through the kernels of decode steps rather than through an unpacked matrix
ROWS_OF_KERNELS = (16, 32, 64)  # each may be computed by another kernel, of which there is one per doubling


@dataclass(frozen=True)
class Sequences:
    """What prefill must know on the host: per sequence the bounds of its tokens and its length, this step's tokens included."""

    bounds: list[int]
    lengths: list[int]


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
    at: At | None = None,
    lora: Adapters | None = None,
    blocks: Sequence[Block] = (),
) -> Tensor:
    """Logits f32 `(R, V)` of a step of any number of tokens; K and V are written to their slots.

    at: as `interpret` takes it. lora: adapters of the tokens. blocks: runs of tokens that see each other whole.
    """
    return interpret(program.steps, GpuBackend(program, inputs, sequences, k_pools, v_pools, lora, blocks), at=at)


def unembed_rows(program: Program, x: Tensor) -> Tensor:
    """The program's head on rows f32 `(R, H)` of the residual stream: logits f32 `(R, V)`."""
    inputs = Inputs.nothing(x.device, logit_rows=torch.arange(len(x), dtype=torch.int32, device=x.device))
    return interpret(program.steps[-1:], GpuBackend(program, inputs, Sequences([], []), [], []), x)


class GpuBackend(Backend):
    """The ops of prompts on the GPU, of one step."""

    def __init__(
        self,
        program: Program,
        inputs: Inputs,
        sequences: Sequences,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        lora: Adapters | None = None,
        blocks: Sequence[Block] = (),
    ) -> None:
        self.lora, self.number = lora or Adapters([], []), 0  # number: of the op, for adapters
        self.blocks = blocks
        self.program, self.inputs, self.sequences, self.k, self.v = program, inputs, sequences, k_pools, v_pools
        self.gathered = False  # what attention left, from all ranks
        self._unpacked_half: Tensor | None = None

    def begin(self, number: int, op: Op) -> Op:
        """As `Backend.begin`."""
        self.number = number
        return op

    def embed(self, op: EmbedOp) -> Tensor:
        """As `Backend.embed`."""
        i = self.inputs
        x = reference.embed(op.table, i.ids, op.scale, op.position_table, i.positions)
        for change, rows in self._changes():
            for part in change.parts:
                low = part.a[i.ids[rows].long(), : part.rank].float() * part.scale
                x[rows, part.first : part.first + part.b.shape[1]] += low @ part.b.float()
        return x

    def qkv(self, x: Tensor, op: QkvOp) -> tuple[Tensor, ...]:
        """As `Backend.qkv`: q, k and v."""
        i, heads = self.inputs, (op.num_heads, op.num_kv_heads, op.head_dim)
        h, pools = self._normed(x, op), (self.k[op.layer], self.v[op.layer])
        bare = op.bias is None and op.q_norm is None and op.k_norm is None and not op.clip and not op.interleaved
        whole = op.head_dim % 16 == 0 and 2 * op.cos.shape[1] == op.head_dim
        if bare and whole and pools[0].dtype == pools[1].dtype == torch.float16:
            y = self._adapted(h, op.blob, None, half=True)
            rotate_rows(y, op.cos, op.sin, i.positions, i.slots, *pools, *heads)
            return y.view(len(y), -1, op.head_dim).split([op.num_heads, op.num_kv_heads, op.num_kv_heads], 1)
        y = self._adapted(h, op.blob, op.bias)
        return rope_append(
            y, op.cos, op.sin, i.positions, i.slots, *pools, op.q_norm, op.k_norm, *heads, op.eps, op.layer_norm, op.interleaved, op.clip
        )

    def attend(self, made: tuple[Tensor, ...], op: AttentionOp) -> Tensor:
        """As `Backend.attend`."""
        q, pools, pages = made[0], (self.k[op.layer], self.v[op.layer]), self.inputs.block_table
        mixed = self._attend(made, op)
        del made
        for first, last, row, end in self.blocks:
            y = attend_whole(q[first:last], *pools, pages[row], end, scale=op.scale, window=op.window, softcap=op.softcap)
            mixed[first:last] = y.to(mixed.dtype)
        if peers := self.program.peers:
            mixed = mixed.float().reshape(len(q), -1)
            mixed, self.gathered = peers.gather(mixed, [mixed.shape[1]] * peers.size), True
        return mixed

    def _attend(self, made: tuple[Tensor, ...], op: AttentionOp) -> Tensor:
        q, k, v = made
        head_dim, k_pool, v_pool = q.shape[2], self.k[op.layer], self.v[op.layer]
        longest, softcap, i = max(self.sequences.lengths), op.softcap, self.inputs
        window = op.window if 0 < op.window < longest else 0
        if torch.float32 in (k_pool.dtype, v_pool.dtype) or not can_attend(head_dim, window=window, softcap=softcap):
            return paged_attention(
                q.float().contiguous(), k_pool, v_pool, i.block_table, i.cu_seqlens, i.context_lens, scale=op.scale, window=op.window,
                softcap=softcap,
            )  # fmt: skip
        bounds, parts = self.sequences.bounds, []
        for row, (first, last, length) in enumerate(zip(bounds, bounds[1:], self.sequences.lengths)):
            if length == last - first and k_pool.dtype == v_pool.dtype == torch.float16:
                keys, values = k[first:last], v[first:last]
            else:  # what is stored, so that a prompt in pieces sees what a prompt at once would
                keys, values = gather_cache(k_pool, v_pool, i.block_table[row], length, head_dim)
            parts.append(attend_prefix(q[first:last], keys, values, scale=op.scale, window=window, softcap=softcap))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add(self, x: Tensor, y: Tensor, op: ResidualOp) -> Tensor:
        """As `Backend.add`."""
        y = y.half()
        whole, self.gathered = self.gathered and not op.side, self.gathered and op.side  # attention's matrix is whole on every rank
        if peers := None if whole else self.program.peers:
            z = peers.add(self._adapted(y, op.blob, op.bias))
            return x.add_(z if op.norm is None else F.rms_norm(z, (z.shape[1],), op.norm, op.eps), alpha=op.scale)
        if len(y) > MAX_STEP_KERNEL_ROWS and op.norm is None and not self._changes():  # added up in the product
            torch.addmm(x, y, self.weight(op.blob, y.device), out_dtype=torch.float32, alpha=op.scale, out=x)
            return x if op.bias is None else x.add_(op.bias, alpha=op.scale)
        z = self._adapted(y, op.blob, op.bias)
        if op.norm is not None:
            plain, z = z, F.rms_norm(z, (z.shape[1],), op.norm, op.eps)
            for change, rows in self._changes():
                if change.norm is not None:
                    z[rows] = F.rms_norm(plain[rows], (z.shape[1],), change.norm, op.eps)
        return x.add_(z, alpha=op.scale)

    def gate_up(self, x: Tensor, op: GateUpOp) -> Tensor:
        """As `Backend.gate_up`."""
        y = self._adapted(self._normed(x, op), op.blob, op.bias, half=True)
        return gate_rows(y, reference.ACTIVATION_NAMES.index(op.activation), op.gated)

    def routed(self, x: Tensor, op: RoutedOp) -> Tensor:
        """As `Backend.routed`: expert by expert, for the rows that chose it; the host waits for the choice."""
        h = norm_rows(x, op.norm, op.norm_bias, op.eps, op.layer_norm)
        chosen, weight = reference.route(self.product(h, op.blob, None).float(), op.top_k, op.renormalize)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():  # rising, so that a row's experts are added in that order
            rows, place = torch.where(chosen == expert)
            y = self.product(self._gated(h[rows], op.up[expert], op.activation), op.down[expert], None)
            out.index_add_(0, rows, weight[rows, place, None] * y)
        if op.shared_up is not None and op.shared_down is not None:
            shared = self.product(self._gated(h, op.shared_up, op.activation), op.shared_down, None)
            out += shared if op.shared_gate is None else self.product(h, op.shared_gate, None).sigmoid() * shared
        if self.program.peers:
            out = self.program.peers.add(out)
        return x.add_(out if op.post_norm is None else F.rms_norm(out, (out.shape[1],), op.post_norm, op.post_eps), alpha=op.scale)

    def _gated(self, h: Tensor, blob: Tensor, activation: str) -> Tensor:
        return gate_rows(self.product(h, blob, None, half=True), reference.ACTIVATION_NAMES.index(activation), True)

    def head(self, x: Tensor, op: HeadOp) -> Tensor:
        """As `Backend.head`."""
        rows = x.index_select(0, self.inputs.logit_rows)
        wanted = self._changes(self.lora.wanted)
        logits = self._adapted(self._normed(rows, op, wanted), op.blob, op.bias, changes=wanted)
        peers = self.program.peers
        return peers.gather(logits, peers.vocab) if peers else logits

    def linear(self, x: Tensor, blob: Tensor, bias: Tensor | None) -> Tensor:
        """As `Backend.linear`."""
        return self.product(x.half(), blob, bias).float()

    # ---- adapters

    def _changes(self, of: list[tuple[Adapter, Tensor]] | None = None) -> list[tuple[LoraChange, Tensor]]:
        """What the adapters change in the current op, and in which rows."""
        of = self.lora.tokens if of is None else of
        return [(change, rows) for adapter, rows in of if (change := adapter.get(self.number)) is not None]

    def _normed(self, x: Tensor, op: NormedOp, changes: list[tuple[LoraChange, Tensor]] | None = None) -> Tensor:
        """The norm in front of an op's matrix, f16."""
        y = norm_rows(x, op.norm, op.norm_bias, op.eps, op.layer_norm)
        for change, rows in self._changes() if changes is None else changes:
            if change.norm is not None:
                y[rows] = norm_rows(x[rows], change.norm, change.norm_bias, op.eps, op.layer_norm)
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

    def product(self, x: Tensor, blob: Tensor, bias: Tensor | None, *, half: bool = False) -> Tensor:
        """X f16 `(M, K)` times a matrix, plus a bias: f32 `(M, N)`, or f16 with `half`."""
        if len(x) <= MAX_STEP_KERNEL_ROWS:
            y = gpu.linear_from_head(self.program.heads[blob.data_ptr()], x.float(), bias, stream_k=True)
            return y.half() if half else y
        weight = self.weight(blob, x.device)
        y = torch.mm(x, weight) if half else torch.mm(x, weight, out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)

    def weight(self, blob: Tensor, device: torch.device) -> Tensor:
        """A matrix f16 `(K, N)`, overwritten by the next one."""
        head = self.program.heads[blob.data_ptr()]
        weight = self.room(*gpu.head_shape(head), device)
        gpu.unpack_into(head, weight)
        return weight

    def room(self, K: int, N: int, device: torch.device) -> Tensor:
        """Where a matrix f16 `(K, N)` may go: one buffer for all of them, since a buffer each would leave holes among the activations."""
        if self._unpacked_half is None or self._unpacked_half.numel() < K * N:
            self._unpacked_half = torch.empty(max(K * N, self.program.widest), dtype=torch.float16, device=device)
        return self._unpacked_half[: K * N].view(K, N)
