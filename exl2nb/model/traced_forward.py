"""A forward pass op by op that captures, and can edit, the activations at the points of `model.points`.

It runs the engine's own ops, so activations that are not edited have the engine's bits. Values inside a fused op (the queries before RoPE,
the attention pattern, the gate) are computed again in fp32: beside the op to capture them, in its place to edit them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.model.batch import Batch, batch_tensors
from exl2nb.model.points import Edits, Point
from exl2nb.ops import gpu_prefill, kv_codes, reference
from exl2nb.ops.interpreter import Backend, CpuBackend, Inputs, interpret
from exl2nb.ops.program import Program
from exl2nb.ops.records import AttentionOp, EmbedOp, GateUpOp, HeadOp, NormedOp, Op, QkvOp, ResidualOp, RoutedOp

QUERIES_PER_BLOCK = 128  # whose attention pattern is in memory at once
Seen = Callable[[Point, Tensor, int], None]
"""Takes the value of a point and the position of its first token: all tokens of the step, but of attention a block of queries
`(Hq, n, keys)`."""


@dataclass(frozen=True)
class Borrowed:
    """A layer of another model of the same shape: its steps, and the program that they belong to."""

    steps: Sequence[Op]
    program: Program


class Traced(Backend):
    """The ops of a model for one step of one sequence, seen and edited.

    Args:
        program: the model's. batch: tokens of one sequence, on the model's device. cache: that it reads and writes.
        known: the points. wanted: names of those that `seen` is called for. edits: what is replaced. borrowed: layers of other models.
        parallel: attention and MLP read the same normed input. logit_scale: factor that is folded into the last norm.
    """

    def __init__(
        self,
        program: Program,
        batch: Batch,
        cache: KVCache,
        *,
        known: Mapping[str, Point],
        wanted: frozenset[str],
        seen: Seen,
        edits: Edits,
        borrowed: Mapping[int, Borrowed] | None = None,
        parallel: bool = False,
        logit_scale: float = 1.0,
    ) -> None:
        self._program, self._batch, self._cache, self._known, self._wanted = program, batch, cache, known, wanted
        self._seen, self._edits, self._borrowed, self._parallel, self._logit_scale = seen, edits, borrowed or {}, parallel, logit_scale
        self._own = self._ops = self._backend(program)
        self._end = int(batch.context_lens[0])
        self._start = self._end - len(batch.input_ids)
        self._layer, self._where = -1, ""
        self._projection: QkvOp | None = None  # of the layer
        self._added = 0  # what the layer has added to the stream
        self._normed: Tensor | None = None  # of attention, edited; the MLP of a parallel layer reads it too

    def run(self) -> Tensor:
        """Logits f32 `(R, V)`, before the softcap."""
        layers = [self._borrowed[i].steps if i in self._borrowed else steps for i, steps in enumerate(self._program.layers)]
        steps = [self._program.steps[0], *(op for layer in layers for op in layer), self._program.steps[-1]]
        return interpret(steps, self, at=self._between)

    def _backend(self, program: Program) -> Backend:
        inputs, k, v = Inputs(*batch_tensors(self._batch)), self._cache.k, self._cache.v
        if program.device.type == "cpu":
            return CpuBackend(inputs, k, v)
        sequences = gpu_prefill.Sequences(self._batch.cu_seqlens.tolist(), self._batch.context_lens.tolist())
        return gpu_prefill.GpuBackend(program, inputs, sequences, k, v)

    def begin(self, number: int, op: Op) -> Op:
        """As `Backend.begin`: a layer begins with its QkvOp."""
        if isinstance(op, QkvOp):
            self._layer, self._added, self._normed, self._projection = self._layer + 1, 0, None, op
            self._where = f"blocks.{self._layer}."
            borrowed = self._borrowed.get(self._layer)
            self._ops = self._own if borrowed is None else self._backend(borrowed.program)
        elif isinstance(op, HeadOp):
            self._ops, self._where = self._own, ""
        return self._ops.begin(number, op)

    def _between(self, point: str, x: Tensor) -> Tensor:
        """The residual stream around the halves of a layer."""
        kind = point.rpartition(".")[2]
        if kind == "input":
            return self._at("hook_resid_pre", x)
        if kind == "middle" and not self._parallel:
            return self._at("hook_resid_mid", x)
        if kind == "output":
            x, pictures = self._at("hook_resid_post", x), self._batch.pictures
            if pictures is not None and self._layer < len(pictures.deep):
                x[pictures.rows.to(x.device)] += pictures.deep[self._layer].to(x.device)
        return x

    def linear(self, x: Tensor, blob: Tensor, bias: Tensor | None) -> Tensor:
        """As `Backend.linear`."""
        return self._ops.linear(x, blob, bias)

    # ---- points

    def _edited(self, *parts: str) -> bool:
        return self._edits.any(self._where + part for part in parts)

    def _wants(self, *parts: str) -> bool:
        return any(self._where + part in self._wanted for part in parts)

    def _at(self, part: str, value: Tensor) -> Tensor:
        """The value of a point after its edits; shown where it is wanted."""
        name = self._where + part
        if name in self._edits:
            value = self._edits.apply(self._known[name], value, self._start)
        if name in self._wanted:
            self._seen(self._known[name], value, self._start)
        return value

    # ---- the ops

    def embed(self, op: EmbedOp) -> Tensor:
        """As `Backend.embed`, pictures included."""
        x = self._ops.embed(op)
        pictures = self._batch.pictures
        if pictures is not None:
            x[pictures.rows.to(x.device)] = pictures.values.to(x.device)
        if not (self._wants("hook_embed") or self._edited("hook_embed")):
            return x
        words, table = reference.embed(op.table, self._batch.input_ids, op.scale), op.position_table
        if pictures is not None:
            words[pictures.rows.to(x.device)] = pictures.values.to(x.device)
        edited = self._at("hook_embed", words)
        if not self._edited("hook_embed"):
            return x
        return edited if table is None else edited + table[self._batch.positions.long()].float()

    def _norm(self, x: Tensor, op: NormedOp) -> Tensor:
        return reference.norm(x, op.norm, op.eps, op.norm_bias, op.layer_norm)

    def qkv(self, x: Tensor, op: QkvOp) -> tuple[Tensor, ...]:
        """As `Backend.qkv`: the engine's, or made here where one of their points is edited."""
        before, after = ("ln1.hook_normalized", "attn.hook_q", "attn.hook_k"), ("attn.hook_v", "attn.hook_rot_q", "attn.hook_rot_k")
        edited = self._edited(*before, *after)
        made = None if edited else self._ops.qkv(x, op)
        if edited or self._wants(*before):
            self._normed = self._at("ln1.hook_normalized", self._norm(x, op))
        if edited or self._wants("attn.hook_q", "attn.hook_k"):
            y = self.linear(self._normed, op.blob, op.bias).view(len(x), -1, op.head_dim)  # pyright: ignore[reportArgumentType]
            q, k, v = (y.clamp(-op.clip, op.clip) if op.clip else y).split([op.num_heads, op.num_kv_heads, op.num_kv_heads], 1)
            q, k = self._at("attn.hook_q", q), self._at("attn.hook_k", k)
            if edited:
                rows = self._batch.positions.long()
                cos, sin = op.cos[rows], op.sin[rows]
                q, k = (
                    reference.rope(reference.head_norm(z, norm, op.eps, op.layer_norm), cos, sin, op.interleaved)
                    for norm, z in ((op.q_norm, q), (op.k_norm, k))
                )
                parts = {"attn.hook_rot_q": q, "attn.hook_rot_k": k, "attn.hook_v": v}
                made = tuple(self._replaced(part, value) for part, value in parts.items())
                for pool, value in zip((self._cache.k[op.layer], self._cache.v[op.layer]), made[1:]):
                    kv_codes.write_slots(pool, self._batch.slot_mapping, value)
                made = tuple(z.half() for z in made) if isinstance(self._ops, gpu_prefill.GpuBackend) else (made[0].contiguous(),)
        assert made is not None
        if self._wants("attn.hook_rot_q"):
            self._show("attn.hook_rot_q", made[0].float())
        for part, pool in (("attn.hook_rot_k", self._cache.k[op.layer]), ("attn.hook_v", self._cache.v[op.layer])):
            if self._wants(part):  # what attention will read, as the cache holds it
                self._show(part, self._stored(pool, op.head_dim)[self._start :])
        return made

    def _replaced(self, part: str, value: Tensor) -> Tensor:
        name = self._where + part
        return self._edits.apply(self._known[name], value, self._start) if name in self._edits else value

    def _show(self, part: str, value: Tensor) -> None:
        self._seen(self._known[self._where + part], value, self._start)

    def _stored(self, pool: Tensor, head_dim: int) -> Tensor:
        """A pool's numbers for the whole sequence so far, f32 `(S, Hkv, D)`."""
        pages = self._batch.block_table[0, : -(-self._end // kv_codes.page_size(pool))]
        return kv_codes.read_pages(pool, pages, head_dim).transpose(1, 2).flatten(0, 1)[: self._end]

    def attend(self, made: tuple[Tensor, ...], op: AttentionOp) -> Tensor:
        """As `Backend.attend`: the engine's, or made here where the pattern is edited."""
        parts = ("attn.hook_attn_scores", "attn.hook_pattern")
        edited = self._edited(*parts)
        z, qkv = None if edited else self._ops.attend(made, op).float(), self._projection
        assert qkv is not None, "a layer begins with its QkvOp"
        if edited or self._wants(*parts):
            mixed = self._patterns(made[0].float(), op, (qkv.num_heads, qkv.num_kv_heads, qkv.head_dim))
            z = mixed if z is None else z
        assert z is not None
        if not (self._wants("attn.hook_z") or self._edited("attn.hook_z")):
            return z
        return self._at("attn.hook_z", z.view(len(z), qkv.num_heads, qkv.head_dim)).reshape(len(z), -1).contiguous()

    def _patterns(self, q: Tensor, op: AttentionOp, heads: tuple[int, int, int]) -> Tensor:
        """Scores and pattern, a block of queries at a time; the heads' output `(T, Hq * D)` that follows from them."""
        num_heads, num_kv_heads, D = heads
        keys, values = (
            self._stored(pool[op.layer], D).transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, 0)
            for pool in (self._cache.k, self._cache.v)
        )
        queries, out, start = q.transpose(0, 1), [], self._start
        try:
            for first in range(0, q.shape[0], QUERIES_PER_BLOCK):
                block = queries[:, first : first + QUERIES_PER_BLOCK]
                self._start = start + first
                end = self._start + block.shape[1]
                scores = block @ keys[:, :end].transpose(1, 2) * op.scale
                if op.softcap:
                    scores = op.softcap * torch.tanh(scores / op.softcap)
                distance = torch.arange(self._start, end)[:, None] - torch.arange(end)
                hidden = (distance < 0) | (distance >= op.window) if op.window else distance < 0
                scores = self._at("attn.hook_attn_scores", scores.masked_fill(hidden.to(q.device), float("-inf")))
                out.append(self._at("attn.hook_pattern", scores.softmax(-1)) @ values[:, :end])
        finally:
            self._start = start
        return torch.cat(out, 1).transpose(0, 1).reshape(q.shape[0], -1)

    def gate_up(self, x: Tensor, op: GateUpOp) -> Tensor:
        """As `Backend.gate_up`: the engine's, or made here where one of its points is edited."""
        part = "ln1.hook_normalized" if self._parallel else "ln2.hook_normalized"
        halves = ("mlp.hook_pre", "mlp.hook_pre_linear")
        edited = self._edited(part, *halves)
        inner = None if edited else self._ops.gate_up(x, op).float()
        if edited or self._wants(*halves, *(() if self._parallel else (part,))):
            if self._parallel:
                h = self._normed if self._normed is not None and self._edited(part) else self._norm(x, op)
            else:
                h = self._at(part, self._norm(x, op))
            if edited or self._wants(*halves):
                y = self.linear(h, op.blob, op.bias)
                gate, up = y.chunk(2, -1) if op.gated else (y, None)
                gate = self._at(halves[0], gate)
                up = None if up is None else self._at(halves[1], up)
                made = reference.activate(gate, op.activation)
                inner = (made if up is None else made * up) if inner is None else inner
        assert inner is not None
        return self._at("mlp.hook_post", inner).contiguous()

    def add(self, x: Tensor, y: Tensor, op: ResidualOp) -> Tensor:
        """As `Backend.add`; a result that is seen or edited is computed before it is added."""
        part = "hook_mlp_out" if self._added else "hook_attn_out"
        self._added += 1
        if self._wants(part) or self._edited(part):
            result = self._at(part, self._ops.add(torch.zeros_like(x), y.clone(), op))
            if self._edited(part):
                return x + result
        return self._ops.add(x, y, op)

    def routed(self, x: Tensor, op: RoutedOp) -> Tensor:
        """As `Backend.routed`; experts whose points are edited are computed here."""
        parts = ("ln2.hook_normalized", "mlp.hook_expert_weights", "mlp.hook_expert_indices", "hook_mlp_out")
        if not (self._wants(*parts) or self._edited(*parts)):
            return self._ops.routed(x, op)
        h = self._at("ln2.hook_normalized", reference.norm(x, op.norm, op.eps, op.norm_bias, op.layer_norm))
        chosen, weight = reference.route(self.linear(h, op.blob, None), op.top_k, op.renormalize)
        chosen, weight = self._at("mlp.hook_expert_indices", chosen), self._at("mlp.hook_expert_weights", weight)
        if not self._edited(*parts):
            before = x.clone()
            x = self._ops.routed(x, op)
            if self._wants("hook_mlp_out"):
                self._show("hook_mlp_out", x - before)
            return x

        def expert(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
            gate, other = self.linear(rows, up, None).chunk(2, -1)
            return self.linear(reference.activate(gate, op.activation) * other, down, None)

        out = torch.zeros_like(h)
        for i in chosen.clamp(0, len(op.up) - 1).unique().tolist():
            rows, place = torch.where(chosen == i)
            out.index_add_(0, rows, weight[rows, place, None] * expert(h[rows], op.up[i], op.down[i]))
        if op.shared_up is not None and op.shared_down is not None:
            shared = expert(h, op.shared_up, op.shared_down)
            out += shared if op.shared_gate is None else self.linear(h, op.shared_gate, None).sigmoid() * shared
        result = op.scale * (out if op.post_norm is None else reference.rms_norm(out, op.post_norm, op.post_eps))
        return x + self._at("hook_mlp_out", result)

    def head(self, x: Tensor, op: HeadOp) -> Tensor:
        """As `Backend.head`; logits of an edited norm are computed here."""
        part = "ln_final.hook_normalized"
        if self._edited(part) or self._wants(part):
            h = self._at(part, self._norm(x, op) / self._logit_scale)
            if self._edited(part):
                return self.linear(h[self._batch.logit_rows.long()] * self._logit_scale, op.blob, op.bias)
        return self._ops.head(x, op)
