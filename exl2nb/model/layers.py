"""The layers of a decoder: weights, the forward pass op by op, and the same ops recorded in a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.cache.pool import CachePart, KVCache
from exl2nb.model.batch import Batch
from exl2nb.ops.prefill_attention import attend_whole


class Step(NamedTuple):
    """The batch, the cache it reads and writes, and per kind of RoPE its tables (cos, sin), f32 `(positions, rotary_dim/2)`."""

    batch: Batch
    cache: KVCache | CachePart
    ropes: Mapping[str, tuple[Tensor, Tensor]]


class NormOptions(TypedDict):
    """Keywords of every op that begins with a norm."""

    norm_bias: Tensor | None
    layer_norm: bool


@dataclass(frozen=True, kw_only=True)
class Norm:
    """weight, bias: f32 `(H,)`; no weight, no norm. layer: LayerNorm instead of RMS."""

    weight: Tensor | None
    bias: Tensor | None = None
    eps: float
    layer: bool = False

    @property
    def options(self) -> NormOptions:
        """What the ops take by keyword; weight and eps go by position."""
        return {"norm_bias": self.bias, "layer_norm": self.layer}


@dataclass(frozen=True, kw_only=True)
class ResidualAdd:
    """How a result is added to the residual stream: times `scale`, after an RMS norm of it where `norm` f32 `(H,)` is given."""

    norm: Tensor | None = None
    eps: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """table: f16, bf16 or f32 `(V, H)`, its rows times `scale`; position_table: learned positions `(max_pos, H)`, or None."""

    table: Tensor
    scale: float = 1.0
    position_table: Tensor | None = None

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Ids and positions int32 `(T,)` -> f32 `(T, H)`."""
        return ops.embed(self.table, ids, scale=self.scale, position_table=self.position_table, positions=positions)

    def record(self, program: ops.Program) -> None:
        """Record the same op in a program."""
        program.add(ops.EmbedOp(table=self.table, scale=self.scale, position_table=self.position_table))


@dataclass(frozen=True, kw_only=True)
class Head:
    """matrix: blob with V outputs."""

    norm: Norm
    matrix: Tensor

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """Logits f32 `(R, V)` of the rows int32 `(R,)` of x f32 `(T, H)`."""
        return ops.norm_head(torch.index_select(x, 0, rows), self.norm.weight, self.norm.eps, self.matrix, **self.norm.options)

    def record(self, program: ops.Program) -> None:
        """Record the same op in a program."""
        program.add(ops.HeadOp(norm=self.norm.weight, eps=self.norm.eps, blob=self.matrix, **self.norm.options))


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Weights and shape of one layer's attention.

    qkv: blob of [q; k; v]; qkv_bias: f32 over all three, or None. q_norm, k_norm: as `ops.norm_qkv_rope` takes them. o: blob; o_bias: f32
    `(H,)` or None. rope: kind of the tables this layer reads. clip: of q, k and v; 0 = none.
    """

    layer: int
    norm: Norm
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    added: ResidualAdd
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    rope: str
    interleaved: bool
    clip: float

    def projection(self, ropes: Mapping[str, tuple[Tensor, Tensor]]) -> ops.QkvOp:
        """The op for norm, q, k, v and rotation. ropes: tables (cos, sin) by kind."""
        cos, sin = ropes[self.rope]
        return ops.QkvOp(
            norm=self.norm.weight, eps=self.norm.eps, **self.norm.options, blob=self.qkv, bias=self.qkv_bias, cos=cos, sin=sin,
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, q_norm=self.q_norm, k_norm=self.k_norm,
            layer=self.layer, interleaved=self.interleaved, clip=self.clip,
        )  # fmt: skip

    def attend(self, x: Tensor, step: Step) -> Tensor:
        """Attention of x f32 `(T, H)` -> `(T, Hq * D)`; K and V of the step go into the cache."""
        batch, k_pool, v_pool = step.batch, step.cache.k[self.layer], step.cache.v[self.layer]
        q = ops.norm_qkv_rope(x, self.projection(step.ropes), batch.positions, batch.slot_mapping, k_pool, v_pool)
        mixed = ops.paged_attention(
            q, k_pool, v_pool, batch.block_table, batch.cu_seqlens, batch.context_lens,
            scale=self.scale, window=self.window, softcap=self.softcap,
        )  # fmt: skip
        for first, last, sequence, end in batch.blocks():
            mixed[first:last] = attend_whole(
                q[first:last], k_pool, v_pool, batch.block_table[sequence], end, scale=self.scale, window=self.window, softcap=self.softcap
            )
        return mixed

    def add(self, x: Tensor, mixed: Tensor) -> None:
        """Project the heads' output and add it to x, in place."""
        ops.linear_residual(x, mixed, self.o, self.o_bias, norm=self.added.norm, eps=self.added.eps, scale=self.added.scale)

    def record_attend(self, program: ops.Program, ropes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Record `attend` in a program."""
        program.add(self.projection(ropes))
        program.add(ops.AttentionOp(layer=self.layer, scale=self.scale, window=self.window, softcap=self.softcap))

    def record_add(self, program: ops.Program) -> None:
        """Record `add` in a program."""
        program.add(ops.ResidualOp(blob=self.o, bias=self.o_bias, norm=self.added.norm, eps=self.added.eps, scale=self.added.scale))


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Weights of one layer's MLP. up: blob of [gate; up] where it is gated, else of up alone; biases f32 or None."""

    norm: Norm
    gated: bool
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    added: ResidualAdd
    activation: str

    def __call__(self, x: Tensor) -> None:
        """Add the MLP's result to x f32 `(T, H)` in place."""
        self.add(x, self.activate(x))

    def record(self, program: ops.Program) -> None:
        """Record the same op in a program."""
        self.record_activate(program, side=False)
        self.record_add(program, side=False)

    def activate(self, x: Tensor) -> Tensor:
        """The activations for x f32 `(T, H)` -> `(T, I)`."""
        return ops.norm_gate_up(
            x, self.norm.weight, self.norm.eps, self.up, self.up_bias, activation=self.activation, gated=self.gated, **self.norm.options
        )

    def add(self, x: Tensor, inner: Tensor) -> None:
        """Project `inner` and add it to x, in place."""
        ops.linear_residual(x, inner, self.down, self.down_bias, norm=self.added.norm, eps=self.added.eps, scale=self.added.scale)

    def record_activate(self, program: ops.Program, *, side: bool) -> None:
        """Record `activate` in a program; side: into the second buffer; the first one holds the output of attention."""
        op = ops.GateUpOp(
            norm=self.norm.weight, eps=self.norm.eps, **self.norm.options, blob=self.up, bias=self.up_bias, activation=self.activation,
            gated=self.gated, side=side,
        )  # fmt: skip
        program.add(op)

    def record_add(self, program: ops.Program, *, side: bool) -> None:
        """Record `add` in a program."""
        added = self.added
        program.add(ops.ResidualOp(blob=self.down, bias=self.down_bias, norm=added.norm, eps=added.eps, scale=added.scale, side=side))


@dataclass(frozen=True, kw_only=True)
class RoutedMLP:
    """Weights of one layer's experts.

    router: blob, an output per expert. up, down: per expert the blobs of [gate; up] and of down. shared_up, shared_down, shared_gate: the
    expert that every token visits, and its sigmoid's matrix, or None. renormalize: as in `model.moe.MoE`.
    """

    norm: Norm
    router: Tensor
    up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    shared_up: Tensor | None
    shared_down: Tensor | None
    shared_gate: Tensor | None
    top_k: int
    renormalize: float
    activation: str
    added: ResidualAdd

    def __call__(self, x: Tensor) -> Tensor:
        """Add the experts' results to x f32 `(T, H)` in place; the chosen experts int32 `(T, top_k)`."""
        return ops.routed_mlp(x, self.experts)

    def record(self, program: ops.Program) -> None:
        """Record the same op in a program."""
        program.add(self.experts)

    @property
    def unused_expert_bytes(self) -> int:
        """Bytes of the experts that one token does not use, on average."""
        total = sum(blob.nbytes for blob in (*self.up, *self.down))
        return total - total * self.top_k // len(self.up)

    @property
    def experts(self) -> ops.RoutedOp:
        """The op."""
        return ops.RoutedOp(
            norm=self.norm.weight, eps=self.norm.eps, **self.norm.options, blob=self.router, up=self.up, down=self.down, top_k=self.top_k,
            renormalize=self.renormalize, activation=self.activation, shared_up=self.shared_up, shared_down=self.shared_down,
            shared_gate=self.shared_gate, post_norm=self.added.norm, post_eps=self.added.eps, scale=self.added.scale,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layer:
    """parallel: attention and MLP read the same input; never with a routed MLP."""

    attention: Attention
    mlp: MLP | RoutedMLP
    parallel: bool

    def __call__(self, x: Tensor, step: Step, observe: Callable[[str, Tensor], None] | None = None) -> None:
        """Add this layer to x f32 `(T, H)` in place. observe: sees "attention" `(T, Hq * D)`, and x as "middle" and "output"."""
        if self.parallel and isinstance(self.mlp, MLP):
            mixed, inner = self.attention.attend(x, step), self.mlp.activate(x)
            self._add(x, mixed, observe)
            self.mlp.add(x, inner)
        else:
            self.attend(x, step, observe)
            self.mlp(x)
        if observe is not None:
            observe("output", x)

    def record(self, program: ops.Program, ropes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Record the same op in a program."""
        if self.parallel and isinstance(self.mlp, MLP):
            self.attention.record_attend(program, ropes)
            self.mlp.record_activate(program, side=True)
            self.attention.record_add(program)
            self.mlp.record_add(program, side=True)
        else:
            self.record_attention(program, ropes)
            self.mlp.record(program)

    def attend(self, x: Tensor, step: Step, observe: Callable[[str, Tensor], None] | None = None) -> None:
        """The half before the MLP."""
        self._add(x, self.attention.attend(x, step), observe)

    def _add(self, x: Tensor, mixed: Tensor, observe: Callable[[str, Tensor], None] | None) -> None:
        if observe is not None:
            observe("attention", mixed)
        self.attention.add(x, mixed)
        if observe is not None:
            observe("middle", x)

    def record_attention(self, program: ops.Program, ropes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Record `attend` in a program."""
        self.attention.record_attend(program, ropes)
        self.attention.record_add(program)


def tensors_of(part: Any) -> Iterator[Tensor]:
    """Every tensor in the fields of a dataclass, nested ones and tuples of them included."""
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from (item for item in value if isinstance(item, Tensor))
        elif is_dataclass(value):
            yield from tensors_of(value)
