"""A forward pass op by op that captures, and can edit, the activations at the points of `model.points`.

It runs the engine's own ops, so activations that are not edited have the engine's bits. Values inside a fused op (the queries before RoPE,
the attention pattern, the gate) are computed again in fp32: beside the op to capture them, in its place to edit them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.cache.pool import KVCache
from exl2nb.model.batch import TENSORS, Batch
from exl2nb.model.points import Edits, Point
from exl2nb.ops import gpu_prefill, kv_codes, reference
from exl2nb.ops.lora import LoraTable, merged
from exl2nb.ops.program import Program
from exl2nb.ops.records import AttentionOp, EmbedOp, GateUpOp, HeadOp, NormedOp, Op, QkvOp, ResidualOp, RoutedOp

QUERIES = 128  # whose attention pattern is in memory at once
Seen = Callable[[Point, Tensor, int], None]
"""Takes the value of a point and the position of its first token: all tokens of the step, but of attention a block of queries
`(Hq, n, keys)`."""


class Backend(Protocol):
    """The ops of one device on one step. x is f32 `(T, H)`; what is added to it is added in place."""

    def embed(self, a: EmbedOp) -> Tensor:
        """The embedding, positions included."""
        ...

    def qkv(self, x: Tensor, a: QkvOp) -> Any:
        """What `attend` takes; K and V are written."""
        ...

    def rotated(self, made: Any) -> Tensor:
        """The rotated queries f32 `(T, Hq, D)` in what `qkv` made."""
        ...

    def attend(self, made: Any, a: AttentionOp) -> Tensor:
        """The heads' output f32 `(T, Hq * D)`."""
        ...

    def add(self, x: Tensor, y: Tensor, a: ResidualOp) -> None:
        """The projection of y, added to x."""
        ...

    def gate_up(self, x: Tensor, a: GateUpOp) -> Tensor:
        """The MLP's activations f32 `(T, I)`."""
        ...

    def routed(self, x: Tensor, a: RoutedOp) -> None:
        """The experts' results, added to x."""
        ...

    def head(self, x: Tensor, rows: Tensor, a: HeadOp) -> Tensor:
        """Logits f32 `(R, V)` of some rows."""
        ...

    def linear(self, x: Tensor, blob: Tensor, bias: Tensor | None) -> Tensor:
        """One product f32."""
        ...


class _HostOps:
    """The ops of the CPU engine."""

    def __init__(self, batch: Batch, cache: KVCache) -> None:
        self._batch, self._cache = batch, cache

    def embed(self, a: EmbedOp) -> Tensor:
        return ops.embed(a.table, self._batch.input_ids, scale=a.scale, position_table=a.position_table, positions=self._batch.positions)

    def qkv(self, x: Tensor, a: QkvOp) -> Tensor:
        k, v = self._cache.k[a.layer], self._cache.v[a.layer]
        return ops.norm_qkv_rope(x, a, self._batch.positions, self._batch.slot_mapping, k, v)

    def rotated(self, made: Tensor) -> Tensor:
        return made

    def attend(self, made: Tensor, a: AttentionOp) -> Tensor:
        b, k, v = self._batch, self._cache.k[a.layer], self._cache.v[a.layer]
        options = {"scale": a.scale, "window": a.window, "softcap": a.softcap}
        return ops.paged_attention(made, k, v, b.block_table, b.cu_seqlens, b.context_lens, **options)

    def add(self, x: Tensor, y: Tensor, a: ResidualOp) -> None:
        ops.linear_residual(x, y, a.blob, a.bias, norm=a.norm, eps=a.eps, scale=a.scale)

    def gate_up(self, x: Tensor, a: GateUpOp) -> Tensor:
        return ops.norm_gate_up(
            x, a.norm, a.eps, a.blob, a.bias, activation=a.activation, norm_bias=a.norm_bias, layer_norm=a.layer_norm, gated=a.gated
        )

    def routed(self, x: Tensor, a: RoutedOp) -> None:
        ops.routed_mlp(x, a)

    def head(self, x: Tensor, rows: Tensor, a: HeadOp) -> Tensor:
        chosen = torch.index_select(x, 0, rows)
        return ops.norm_head(chosen, a.norm, a.eps, a.blob, a.bias, norm_bias=a.norm_bias, layer_norm=a.layer_norm)

    def linear(self, x: Tensor, blob: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear(x.contiguous(), blob, bias)


def forward_adapted(table: LoraTable, batch: Batch, cache: KVCache, observe: Callable[[str, Tensor], None] | None) -> Tensor:
    """A step of one adapter op by op on the CPU, each matrix with the adapter merged into it, in fp32, for the moment that it is used.

    observe: see `Model.forward_by_ops`. Logits f32 `(R, V)` before the softcap.
    """
    assert batch.adapters is not None
    assert len(set(batch.adapters.tolist())) == 1, "one adapter"
    seen: Callable[[str, Tensor], None] = observe or (lambda name, value: None)
    own, adapter, layer, parts = _HostOps(batch, cache), int(batch.adapters[0]), 0, ["middle", "output"]
    x = made = torch.empty(0)
    done: dict[bool, Tensor] = {}
    for op in range(len(table.program.steps)):
        a = merged(table.words, adapter, op)
        if isinstance(a, EmbedOp):
            x = own.embed(a)
            seen("embedding", x)
        elif isinstance(a, QkvOp):
            layer, parts = a.layer, ["middle", "output"]
            made = own.qkv(x, a)
        elif isinstance(a, AttentionOp):
            done[False] = own.attend(made, a)
            seen(f"layers.{layer}.attention", done[False])
        elif isinstance(a, GateUpOp):
            done[a.side] = own.gate_up(x, a)
        elif isinstance(a, HeadOp):
            return own.head(x, batch.logit_rows, a)
        else:
            if isinstance(a, RoutedOp):
                own.routed(x, a)
            elif isinstance(a, ResidualOp):
                own.add(x, done.pop(a.side), a)
            seen(f"layers.{layer}.{parts.pop(0)}", x)
    raise AssertionError("a program ends with its head")


class _GpuOps:
    """The ops of prefill on the GPU."""

    def __init__(self, program: Program, batch: Batch, cache: KVCache) -> None:
        sequences = gpu_prefill.Sequences(batch.cu_seqlens.tolist(), batch.context_lens.tolist())
        self._run = gpu_prefill.Run(program, gpu_prefill.Inputs(*TENSORS(batch)), sequences, cache.k, cache.v)

    def embed(self, a: EmbedOp) -> Tensor:
        self._run.embed(a)
        return self._run.x

    def qkv(self, x: Tensor, a: QkvOp) -> Any:
        self._run.x = x
        self._run.norm_qkv_rope(a)
        return self._run.parts

    def rotated(self, made: Any) -> Tensor:
        return made[0].float()

    def attend(self, made: Any, a: AttentionOp) -> Tensor:
        self._run.parts = made
        self._run.paged_attention(a)
        return self._run.done[False].float()

    def add(self, x: Tensor, y: Tensor, a: ResidualOp) -> None:
        self._run.x, self._run.done[a.side] = x, y
        self._run.linear_residual(a)

    def gate_up(self, x: Tensor, a: GateUpOp) -> Tensor:
        self._run.x = x
        self._run.norm_gate_up(a)
        return self._run.done[a.side].float()

    def routed(self, x: Tensor, a: RoutedOp) -> None:
        self._run.x = x
        self._run.routed_mlp(a)

    def head(self, x: Tensor, rows: Tensor, a: HeadOp) -> Tensor:
        self._run.x, self._run.inputs = x, replace(self._run.inputs, logit_rows=rows)
        self._run.norm_head(a)
        return self._run.logits

    def linear(self, x: Tensor, blob: Tensor, bias: Tensor | None) -> Tensor:
        return self._run.product(x.half(), blob, bias).float()


@dataclass(frozen=True)
class Borrowed:
    """A layer of another model of the same shape: its steps, and the program that they belong to."""

    steps: Sequence[Op]
    program: Program


class Walk:
    """One step of one sequence, seen and edited.

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
        self._own = self._backend(program)
        self._ops: Backend = self._own
        self._end = int(batch.context_lens[0])
        self._start = self._end - len(batch.input_ids)
        self._where = ""
        self._normed: Tensor | None = None  # of attention, edited; the MLP of a parallel layer reads it too

    def run(self) -> Tensor:
        """Logits f32 `(R, V)`, before the softcap."""
        first, last = self._program.steps[0], self._program.steps[-1]
        assert isinstance(first, EmbedOp)
        assert isinstance(last, HeadOp)
        x = self._embed(first)
        for layer, steps in enumerate(self._program.layers):
            borrowed = self._borrowed.get(layer)
            self._ops = self._own if borrowed is None else self._backend(borrowed.program)
            self._where, self._normed = f"blocks.{layer}.", None
            x = self._layer(x, steps if borrowed is None else borrowed.steps)
            if self._batch.pictures is not None and layer < len(self._batch.pictures.deep):
                x[self._batch.pictures.rows.to(x.device)] += self._batch.pictures.deep[layer].to(x.device)
        self._ops, self._where = self._own, ""
        return self._head(x, last)

    def _backend(self, program: Program) -> Backend:
        return _HostOps(self._batch, self._cache) if program.device.type == "cpu" else _GpuOps(program, self._batch, self._cache)

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

    # ---- the model

    def _embed(self, a: EmbedOp) -> Tensor:
        x = self._own.embed(a)
        pictures = self._batch.pictures
        if pictures is not None:
            x[pictures.rows.to(x.device)] = pictures.values.to(x.device)
        if not (self._wants("hook_embed") or self._edited("hook_embed")):
            return x
        words, table = reference.embed(a.table, self._batch.input_ids, a.scale), a.position_table
        if pictures is not None:
            words[pictures.rows.to(x.device)] = pictures.values.to(x.device)
        edited = self._at("hook_embed", words)
        if not self._edited("hook_embed"):
            return x
        return edited if table is None else edited + table[self._batch.positions.long()].float()

    def _layer(self, x: Tensor, steps: Sequence[Op]) -> Tensor:
        x = self._at("hook_resid_pre", x)
        done: dict[bool, Tensor] = {}
        made: Any = None
        projection: QkvOp | None = None
        added = 0
        for a in steps:
            if isinstance(a, QkvOp):
                projection, made = a, self._project(x, a)
            elif isinstance(a, AttentionOp):
                assert projection is not None
                done[False] = self._attend(made, a, projection)
            elif isinstance(a, GateUpOp):
                done[a.side] = self._gate_up(x, a)
            elif isinstance(a, ResidualOp):
                added += 1
                x = self._add("hook_attn_out" if added == 1 else "hook_mlp_out", x, done[a.side], a)
                if added == 1 and not self._parallel:
                    x = self._at("hook_resid_mid", x)
            elif isinstance(a, RoutedOp):
                x = self._routed(x, a)
        return self._at("hook_resid_post", x)

    def _norm(self, x: Tensor, a: NormedOp) -> Tensor:
        return reference.norm(x, a.norm, a.eps, a.norm_bias, a.layer_norm)

    def _project(self, x: Tensor, a: QkvOp) -> Any:
        """Queries, keys and values: the engine's, or made here where one of their points is edited."""
        before, after = ("ln1.hook_normalized", "attn.hook_q", "attn.hook_k"), ("attn.hook_v", "attn.hook_rot_q", "attn.hook_rot_k")
        edited = self._edited(*before, *after)
        made = None if edited else self._ops.qkv(x, a)
        if edited or self._wants(*before):
            h = self._at("ln1.hook_normalized", self._norm(x, a))
            self._normed = h
        if edited or self._wants("attn.hook_q", "attn.hook_k"):
            y = self._ops.linear(self._normed, a.blob, a.bias).view(len(x), -1, a.head_dim)  # pyright: ignore[reportArgumentType]
            q, k, v = (y.clamp(-a.clip, a.clip) if a.clip else y).split([a.num_heads, a.num_kv_heads, a.num_kv_heads], 1)
            q, k = self._at("attn.hook_q", q), self._at("attn.hook_k", k)
            if edited:
                rows = self._batch.positions.long()
                cos, sin = a.cos[rows], a.sin[rows]
                q, k = (
                    reference.rope(reference.head_norm(z, norm, a.eps, a.layer_norm), cos, sin, a.interleaved)
                    for norm, z in ((a.q_norm, q), (a.k_norm, k))
                )
                parts = {"attn.hook_rot_q": q, "attn.hook_rot_k": k, "attn.hook_v": v}
                made = tuple(self._replaced(part, value) for part, value in parts.items())
                for pool, value in zip((self._cache.k[a.layer], self._cache.v[a.layer]), made[1:]):
                    kv_codes.write(pool, self._batch.slot_mapping, value)
                made = tuple(z.half() for z in made) if isinstance(self._ops, _GpuOps) else made[0].contiguous()
        if self._wants("attn.hook_rot_q"):
            self._show("attn.hook_rot_q", self._ops.rotated(made))
        for part, pool in (("attn.hook_rot_k", self._cache.k[a.layer]), ("attn.hook_v", self._cache.v[a.layer])):
            if self._wants(part):  # what attention will read, as the cache holds it
                self._show(part, self._stored(pool, a.head_dim)[self._start :])
        return made

    def _replaced(self, part: str, value: Tensor) -> Tensor:
        name = self._where + part
        return self._edits.apply(self._known[name], value, self._start) if name in self._edits else value

    def _show(self, part: str, value: Tensor) -> None:
        self._seen(self._known[self._where + part], value, self._start)

    def _stored(self, pool: Tensor, head_dim: int) -> Tensor:
        """A pool's numbers for the whole sequence so far, f32 `(S, Hkv, D)`."""
        pages = self._batch.block_table[0, : -(-self._end // kv_codes.page_size(pool))]
        return kv_codes.read(pool, pages, head_dim).transpose(1, 2).flatten(0, 1)[: self._end]

    def _attend(self, made: Any, a: AttentionOp, projection: QkvOp) -> Tensor:
        parts = ("attn.hook_attn_scores", "attn.hook_pattern")
        edited = self._edited(*parts)
        z = None if edited else self._ops.attend(made, a)
        num_heads, num_kv_heads, D = projection.num_heads, projection.num_kv_heads, projection.head_dim
        if edited or self._wants(*parts):
            mixed = self._patterns(self._ops.rotated(made), a, (num_heads, num_kv_heads, D))
            z = mixed if z is None else z
        assert z is not None
        if not (self._wants("attn.hook_z") or self._edited("attn.hook_z")):
            return z
        return self._at("attn.hook_z", z.view(len(z), num_heads, D)).reshape(len(z), -1).contiguous()

    def _patterns(self, q: Tensor, a: AttentionOp, heads: tuple[int, int, int]) -> Tensor:
        """Scores and pattern, a block of queries at a time; the heads' output `(T, Hq * D)` that follows from them."""
        num_heads, num_kv_heads, D = heads
        keys, values = (
            self._stored(pool[a.layer], D).transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, 0)
            for pool in (self._cache.k, self._cache.v)
        )
        queries, out, start = q.transpose(0, 1), [], self._start
        try:
            for first in range(0, q.shape[0], QUERIES):
                block = queries[:, first : first + QUERIES]
                self._start = start + first
                end = self._start + block.shape[1]
                scores = block @ keys[:, :end].transpose(1, 2) * a.scale
                if a.softcap:
                    scores = a.softcap * torch.tanh(scores / a.softcap)
                distance = torch.arange(self._start, end)[:, None] - torch.arange(end)
                hidden = (distance < 0) | (distance >= a.window) if a.window else distance < 0
                scores = self._at("attn.hook_attn_scores", scores.masked_fill(hidden.to(q.device), float("-inf")))
                out.append(self._at("attn.hook_pattern", scores.softmax(-1)) @ values[:, :end])
        finally:
            self._start = start
        return torch.cat(out, 1).transpose(0, 1).reshape(q.shape[0], -1)

    def _gate_up(self, x: Tensor, a: GateUpOp) -> Tensor:
        part = "ln1.hook_normalized" if self._parallel else "ln2.hook_normalized"
        halves = ("mlp.hook_pre", "mlp.hook_pre_linear")
        edited = self._edited(part, *halves)
        inner = None if edited else self._ops.gate_up(x, a)
        if edited or self._wants(*halves, *(() if self._parallel else (part,))):
            if self._parallel:
                h = self._normed if self._normed is not None and self._edited(part) else self._norm(x, a)
            else:
                h = self._at(part, self._norm(x, a))
            if edited or self._wants(*halves):
                y = self._ops.linear(h, a.blob, a.bias)
                gate, up = y.chunk(2, -1) if a.gated else (y, None)
                gate = self._at(halves[0], gate)
                up = None if up is None else self._at(halves[1], up)
                made = reference.activate(gate, a.activation)
                inner = (made if up is None else made * up) if inner is None else inner
        assert inner is not None
        return self._at("mlp.hook_post", inner).contiguous()

    def _add(self, part: str, x: Tensor, y: Tensor, a: ResidualOp) -> Tensor:
        """The stream after a projection of y; seen or edited, it is computed apart."""
        if self._wants(part) or self._edited(part):
            result = torch.zeros_like(x)
            self._ops.add(result, y.clone(), a)
            result = self._at(part, result)
            if self._edited(part):
                return x + result
        self._ops.add(x, y, a)
        return x

    def _routed(self, x: Tensor, e: RoutedOp) -> Tensor:
        parts = ("ln2.hook_normalized", "mlp.hook_expert_weights", "mlp.hook_expert_indices", "hook_mlp_out")
        if not (self._wants(*parts) or self._edited(*parts)):
            self._ops.routed(x, e)
            return x
        h = self._at("ln2.hook_normalized", reference.norm(x, e.norm, e.eps, e.norm_bias, e.layer_norm))
        chosen, weight = reference.route(self._ops.linear(h, e.blob, None), e.top_k, e.renormalize)
        chosen, weight = self._at("mlp.hook_expert_indices", chosen), self._at("mlp.hook_expert_weights", weight)
        if not self._edited(*parts):
            before = x.clone()
            self._ops.routed(x, e)
            if self._wants("hook_mlp_out"):
                self._show("hook_mlp_out", x - before)
            return x

        def expert(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
            gate, other = self._ops.linear(rows, up, None).chunk(2, -1)
            return self._ops.linear(reference.activate(gate, e.activation) * other, down, None)

        out = torch.zeros_like(h)
        for i in chosen.clamp(0, len(e.up) - 1).unique().tolist():
            rows, place = torch.where(chosen == i)
            out.index_add_(0, rows, weight[rows, place, None] * expert(h[rows], e.up[i], e.down[i]))
        if e.shared_up is not None and e.shared_down is not None:
            shared = expert(h, e.shared_up, e.shared_down)
            out += shared if e.shared_gate is None else self._ops.linear(h, e.shared_gate, None).sigmoid() * shared
        result = e.scale * (out if e.post_norm is None else reference.rms_norm(out, e.post_norm, e.post_eps))
        return x + self._at("hook_mlp_out", result)

    def _head(self, x: Tensor, a: HeadOp) -> Tensor:
        part = "ln_final.hook_normalized"
        rows = self._batch.logit_rows
        if self._edited(part) or self._wants(part):
            h = self._at(part, self._norm(x, a) / self._logit_scale)
            if self._edited(part):
                logits = self._own.linear(h[rows.long()] * self._logit_scale, a.blob, a.bias)
                return logits
        return self._own.head(x, rows, a)
