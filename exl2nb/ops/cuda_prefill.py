"""What a prompt needs between torch's matrix products on the GPU: ops with their references. Knows nothing about programs."""

from __future__ import annotations

from torch import Tensor

from exl2nb.ops import kv_codes, reference
from exl2nb.ops._library import define

HALF = 65504.0  # the largest fp16


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, layer_norm: bool) -> Tensor:
    return reference.norm(x, weight, eps, bias, layer_norm).clamp(-HALF, HALF).half()


norm_rows = define(
    "norm_rows(Tensor x, Tensor? weight, Tensor? bias, float eps, bool layer_norm) -> Tensor",
    fake=lambda x, *_: x.half(),
    reference=_norm,
)
"""The norm before a product: f32 `(T, H)` -> f16, cut to finite numbers; without a weight only that."""


def _gate(y: Tensor, activation: int, gated: bool) -> Tensor:
    kind, wide = reference.ACTIVATIONS[activation], y.float()
    if not gated:
        return reference.activate(wide, kind).clamp(-HALF, HALF).half()
    gate, up = wide.chunk(2, 1)
    return (reference.activate(gate, kind) * up).clamp(-HALF, HALF).half()


gate_rows = define(
    "gate_rows(Tensor y, int activation, bool gated) -> Tensor",
    fake=lambda y, _, gated: y.new_empty(y.shape[0], y.shape[1] // (2 if gated else 1)),
    reference=_gate,
)
"""y f16 `(T, 2I)` -> act(first half) * second half, f16 `(T, I)`; not gated: act(y). activation: index in reference.ACTIVATIONS."""


def _rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, num_heads: int,
    num_kv_heads: int, head_dim: int,
) -> None:  # fmt: skip
    turning, at = num_heads + num_kv_heads, positions.long()
    y = qkv.view(len(qkv), -1, head_dim)
    y[:, :turning] = reference.rope(y[:, :turning].float(), cos[at], sin[at], False).clamp(-HALF, HALF).half()
    kept = slots >= 0
    kv_codes.write(k_pool, slots[kept], y[kept, num_heads:turning].float())
    kv_codes.write(v_pool, slots[kept], y[kept, turning:].float())


rotate_rows = define(
    "rotate_rows(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor positions, Tensor slots, Tensor(b!) k_pool, Tensor(c!) v_pool, "
    "int num_heads, int num_kv_heads, int head_dim) -> ()",
    fake=lambda *_: None,
    reference=_rotate,
)
"""qkv f16 `(T, (Hq + 2 Hkv) * D)`: q and k rotated in place, all D dims; k, v to `slots` of f16 pools (negative: none)."""
