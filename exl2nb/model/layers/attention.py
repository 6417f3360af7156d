"""The attention half of a decoder layer: x += o(attention(norm(x)))."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from exl2nb import ops
from exl2nb.model.layers.norm import Added, Norm
from exl2nb.model.layers.step import Step


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
    added: Added
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    rope: str
    interleaved: bool
    clip: float

    def mixed(self, x: Tensor, step: Step) -> Tensor:
        """What attention reads out for x f32 `(T, H)` -> `(T, Hq * D)`; K and V of the step go into the cache."""
        batch, k_pool, v_pool = step.batch, step.cache.k[self.layer], step.cache.v[self.layer]
        q = ops.norm_qkv_rope(
            x, self.norm.weight, self.norm.eps, self.qkv, self.qkv_bias, *step.ropes[self.rope], batch.positions, batch.slot_mapping,
            k_pool, v_pool, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            q_norm=self.q_norm, k_norm=self.k_norm, interleaved=self.interleaved, clip=self.clip, **self.norm.options,
        )  # fmt: skip
        return ops.paged_attention(
            q, k_pool, v_pool, batch.block_table, batch.cu_seqlens, batch.context_lens,
            scale=self.scale, window=self.window, softcap=self.softcap,
        )  # fmt: skip

    def add(self, x: Tensor, mixed: Tensor) -> None:
        """Project `mixed` and add it to x, in place."""
        ops.linear_residual(x, mixed, self.o, self.o_bias, norm=self.added.norm, eps=self.added.eps, scale=self.added.scale)

    def record_mixed(self, program: ops.Program, ropes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Write `mixed` down in a program."""
        program.norm_qkv_rope(
            self.norm.weight, self.norm.eps, self.qkv, self.qkv_bias, *ropes[self.rope],
            layer=self.layer, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            q_norm=self.q_norm, k_norm=self.k_norm, interleaved=self.interleaved, clip=self.clip, **self.norm.options,
        )  # fmt: skip
        program.paged_attention(layer=self.layer, scale=self.scale, window=self.window, softcap=self.softcap)

    def record_add(self, program: ops.Program) -> None:
        """Write `add` down in a program."""
        program.linear_residual(self.o, self.o_bias, norm=self.added.norm, eps=self.added.eps, scale=self.added.scale)
