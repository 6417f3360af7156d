"""The attention half of a decoder layer: x += o(attention(norm(x)))."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from exl2nb import ops
from exl2nb.model.layers.step import Step


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Weights and shape of one layer's attention.

    norm: f32 `(H,)`. qkv: blob of [q; k; v]; qkv_bias: f32 over all three, or None. o: blob; o_bias: f32 `(H,)` or None.
    """

    layer: int
    norm: Tensor
    eps: float
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float

    def __call__(self, x: Tensor, step: Step) -> None:
        """Add this half to x f32 `(T, H)` in place; K and V of the step go into the cache."""
        batch, k_pool, v_pool = step.batch, step.cache.k[self.layer], step.cache.v[self.layer]
        q = ops.norm_qkv_rope(
            x, self.norm, self.eps, self.qkv, self.qkv_bias, step.cos, step.sin, batch.positions, batch.slot_mapping, k_pool, v_pool,
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
        )  # fmt: skip
        mixed = ops.paged_attention(
            q, k_pool, v_pool, batch.block_table, batch.cu_seqlens, batch.context_lens,
            scale=self.scale, window=self.window, softcap=self.softcap,
        )  # fmt: skip
        ops.linear_residual(x, mixed, self.o, self.o_bias)

    def record(self, program: ops.Program, cos: Tensor, sin: Tensor) -> None:
        """Write the same down in a program."""
        program.norm_qkv_rope(
            self.norm, self.eps, self.qkv, self.qkv_bias, cos, sin,
            layer=self.layer, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
        )  # fmt: skip
        program.paged_attention(layer=self.layer, scale=self.scale, window=self.window, softcap=self.softcap)
        program.linear_residual(self.o, self.o_bias)
