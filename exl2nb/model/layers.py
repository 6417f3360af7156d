"""The layers of a decoder: their weights, and the ops that they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypedDict

from torch import Tensor

from exl2nb import ops

Ropes = Mapping[str, tuple[Tensor, Tensor]]
"""Per kind of RoPE its tables (cos, sin), f32 `(positions, rotary_dim/2)`."""


class NormFields(TypedDict):
    """The fields of an op that begins with a norm."""

    norm: Tensor | None
    eps: float
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
    def fields(self) -> NormFields:
        """As an op has them."""
        return {"norm": self.weight, "eps": self.eps, "norm_bias": self.bias, "layer_norm": self.layer}


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

    @property
    def op(self) -> ops.EmbedOp:
        """The op."""
        return ops.EmbedOp(table=self.table, scale=self.scale, position_table=self.position_table)

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Ids and positions int32 `(T,)` -> f32 `(T, H)`."""
        return self.op(ids, positions)


@dataclass(frozen=True, kw_only=True)
class Head:
    """matrix: blob with V outputs."""

    norm: Norm
    matrix: Tensor

    @property
    def op(self) -> ops.HeadOp:
        """The op."""
        return ops.HeadOp(**self.norm.fields, blob=self.matrix)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits f32 `(R, V)` of rows of the residual stream f32 `(R, H)`."""
        return self.op(x.contiguous())


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Weights and shape of one layer's attention.

    qkv: blob of [q; k; v]; qkv_bias: f32 over all three, or None. q_norm, k_norm: as `ops.QkvOp` has them. o: blob; o_bias: f32
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

    def mix(self, ropes: Ropes) -> list[ops.Op]:
        """The ops up to the heads' output."""
        cos, sin = ropes[self.rope]
        qkv = ops.QkvOp(
            **self.norm.fields, blob=self.qkv, bias=self.qkv_bias, cos=cos, sin=sin, num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, q_norm=self.q_norm, k_norm=self.k_norm, layer=self.layer,
            interleaved=self.interleaved, clip=self.clip,
        )  # fmt: skip
        return [qkv, ops.AttentionOp(layer=self.layer, scale=self.scale, window=self.window, softcap=self.softcap)]

    @property
    def add(self) -> ops.ResidualOp:
        """The op that projects the heads' output and adds it."""
        return ops.ResidualOp(blob=self.o, bias=self.o_bias, norm=self.added.norm, eps=self.added.eps, scale=self.added.scale)


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

    def activate(self, *, side: bool = False) -> ops.GateUpOp:
        """The op for the activations; side: in the second buffer, where the first one holds the output of attention."""
        inner = {"activation": self.activation, "gated": self.gated}
        return ops.GateUpOp(**self.norm.fields, blob=self.up, bias=self.up_bias, **inner, side=side)

    def add(self, *, side: bool = False) -> ops.ResidualOp:
        """The op that projects the activations and adds them."""
        added = self.added
        return ops.ResidualOp(blob=self.down, bias=self.down_bias, norm=added.norm, eps=added.eps, scale=added.scale, side=side)


@dataclass(frozen=True, kw_only=True)
class RoutedMLP:
    """Weights of one layer's experts.

    router: blob, an output per expert. up, down: per expert the blobs of [gate; up] and of down. shared_up, shared_down, shared_gate: the
    expert that every token visits, and its sigmoid's matrix, or None. renormalize: as in `model.config.MoE`.
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
        return self.op(x)

    @property
    def unused_expert_bytes(self) -> int:
        """Bytes of the experts that one token does not use, on average."""
        total = sum(blob.nbytes for blob in (*self.up, *self.down))
        return total - total * self.top_k // len(self.up)

    @property
    def op(self) -> ops.RoutedOp:
        """The op."""
        return ops.RoutedOp(
            **self.norm.fields, blob=self.router, up=self.up, down=self.down, top_k=self.top_k, renormalize=self.renormalize,
            activation=self.activation, shared_up=self.shared_up, shared_down=self.shared_down, shared_gate=self.shared_gate,
            post_norm=self.added.norm, post_eps=self.added.eps, scale=self.added.scale,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layer:
    """parallel: attention and MLP read the same input; never with a routed MLP."""

    attention: Attention
    mlp: MLP | RoutedMLP
    parallel: bool

    def ops(self, ropes: Ropes, *, mlp: bool = True) -> list[ops.Op]:
        """The ops of the layer, in order. mlp: False for attention alone."""
        attention, inner = self.attention, self.mlp
        if not mlp:
            return [*attention.mix(ropes), attention.add]
        if isinstance(inner, RoutedMLP):
            return [*attention.mix(ropes), attention.add, inner.op]
        if self.parallel:
            return [*attention.mix(ropes), inner.activate(side=True), attention.add, inner.add(side=True)]
        return [*attention.mix(ropes), attention.add, inner.activate(), inner.add()]


def field_tensors(part: Any) -> Iterator[Tensor]:
    """Every tensor in the fields of a dataclass, nested ones and tuples of them included."""
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from (item for item in value if isinstance(item, Tensor))
        elif is_dataclass(value):
            yield from field_tensors(value)
