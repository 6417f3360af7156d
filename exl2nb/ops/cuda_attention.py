"""Attention as the CUDA engine runs it: rotation, cache write and attention of a decode step in one op, and the pieces of prefill.

The engine calls the same launch functions from its own step; these ops show each of them to tests and to prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.ops import kv_codes, reference
from exl2nb.ops._library import define_op

Outputs = tuple[Tensor, Tensor]


def fragment_place(row: Tensor) -> Tensor:
    """Place of stored rows `row` (int, any shape) in a matrix input: blocks of 32 in the order of the tensor cores' B fragments."""
    return (row & ~31) + ((row & 7) >> 1) * 8 + ((row >> 4) & 1) * 4 + ((row >> 3) & 1) * 2 + (row & 1)


@dataclass(frozen=True)
class _Heads:
    """From one row of [q; k; v] to what attention uses: the reference of the rotation."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    layer_norm: bool
    interleaved: bool
    clip: float

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, k and v of qkv `(T, (Hq + 2 Hkv) * D)`: `(T, heads, D)` each."""
        y = qkv.view(len(qkv), -1, self.head_dim)
        y = y.clamp(-self.clip, self.clip) if self.clip else y
        q, k, v = y.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        at = positions.long()
        q, k = (
            reference.rope(reference.head_norm(x, weight, self.eps, self.layer_norm), cos[at], sin[at], self.interleaved)
            for x, weight in ((q, self.q_norm), (k, self.k_norm))
        )
        return q.contiguous(), k.contiguous(), v.contiguous()


def _attend_step(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, k_pool: Tensor, v_pool: Tensor, block_table: Tensor,
    cu_seqlens: Tensor, context_lens: Tensor, workspace: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, inverse: list[Tensor],
    num_heads: int, num_kv_heads: int, head_dim: int, eps: float, layer_norm: bool, interleaved: bool, clip: float, scale: float,
    window: int, softcap: float, pdl: bool, large_chunks: bool = False,
) -> Outputs:  # fmt: skip
    bounds = cu_seqlens.tolist()
    places = [torch.arange(n - (b - a), n) for a, b, n in zip(bounds, bounds[1:], context_lens.tolist())]
    slots = torch.cat([block_table[i, p // 256].long() * 256 + p % 256 for i, p in enumerate(places)])
    heads = _Heads(num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps, layer_norm, interleaved, clip)
    q, k, v = heads.split(qkv, cos, sin, torch.cat(places) if positions is None else positions)
    kv_codes.write_slots(k_pool, slots, k)
    kv_codes.write_slots(v_pool, slots, v)
    every = torch.arange(k_pool.shape[0])
    keys, values = (kv_codes.read_pages(pool, every, head_dim) for pool in (k_pool, v_pool))
    out = reference.paged_attention(q, keys, values, block_table, cu_seqlens, context_lens, scale, window, softcap)
    x = torch.zeros(len(inverse), len(out), -(-out.shape[1] // 32) * 32, dtype=torch.float16)
    for copy, order in zip(x, inverse):
        copy[:, fragment_place(order.long())] = out.half()
    return out, x


def _attend_step_fake(qkv: Tensor, *rest: object) -> Outputs:
    inverse, heads, _, D = rest[11:15]
    K = heads * D  # type: ignore[operator]
    x = qkv.new_empty(len(inverse), qkv.shape[0], (K + 31) // 32 * 32, dtype=torch.float16)  # type: ignore[arg-type]
    return qkv.new_empty(qkv.shape[0], K), x


attention_step = define_op(
    "attention_step(Tensor(d!) qkv, Tensor cos, Tensor sin, Tensor? positions, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor block_table, "
    "Tensor cu_seqlens, Tensor context_lens, Tensor(c!) workspace, Tensor? q_norm, Tensor? k_norm, Tensor[] inverse, int num_heads, "
    "int num_kv_heads, int head_dim, float eps, bool layer_norm, bool interleaved, float clip, float scale, int window, float softcap, "
    "bool pdl, bool large_chunks=False) -> (Tensor, Tensor)",
    fake=_attend_step_fake,
    reference=_attend_step,
)
"""One layer's attention of a decode step, from q, k, v before rotation: `csrc/cuda/attention/attention.h`, attention_decode_launch.

qkv f32 `(T, (Hq + 2 Hkv) * D)`, at most 8 tokens per sequence; workspace uint8 of `attention_workspace` bytes, zeroed once. inverse: int32
`(Hq * D,)` each, feature -> stored row. Returns f32 `(T, Hq * D)` and f16 `(len(inverse), T, stride)`, the next matrix's inputs;
rows of unused sequences hold anything. large_chunks: the launch is shared out by the number of sequences, and bits depend on that.
"""

attention_workspace = define_op(
    "attention_workspace(Tensor like, int tokens, int num_heads, int num_kv_heads, int head_dim) -> int",
    fake=lambda like, *_: 0,
    reference=lambda like, *_: 0,
)
"""Bytes that attention_step needs for steps of up to `tokens` tokens on the device of `like`."""


def _append_rows(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, q_norm: Tensor | None,
    k_norm: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, layer_norm: bool, interleaved: bool, clip: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    heads = _Heads(num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps, layer_norm, interleaved, clip)
    q, k, v = heads.split(qkv, cos, sin, positions)
    kept = slots >= 0
    kv_codes.write_slots(k_pool, slots[kept], k[kept])
    kv_codes.write_slots(v_pool, slots[kept], v[kept])
    return q.half(), k.half(), v.half()


rope_append = define_op(
    "rope_append(Tensor(d!) qkv, Tensor cos, Tensor sin, Tensor positions, Tensor slots, Tensor(a!) k_pool, Tensor(b!) v_pool, "
    "Tensor? q_norm, Tensor? k_norm, int num_heads, int num_kv_heads, int head_dim, float eps, bool layer_norm, bool interleaved, "
    "float clip) -> (Tensor, Tensor, Tensor)",
    fake=lambda qkv, *a: tuple(qkv.new_empty(qkv.shape[0], n, a[10], dtype=torch.float16) for n in (a[8], a[9], a[9])),
    reference=_append_rows,
)
"""Prefill: q, k, v of any number of tokens, rotated, f16 `(T, heads, D)` each; K and V also to `slots` (negative: not) of the cache."""


def _gather_pages(k_pool: Tensor, v_pool: Tensor, pages: Tensor, length: int, head_dim: int) -> Outputs:
    k, v = (kv_codes.read_pages(p, pages, head_dim).transpose(1, 2).flatten(0, 1)[:length].half().contiguous() for p in (k_pool, v_pool))
    return k, v


gather_cache = define_op(
    "gather_cache(Tensor k_pool, Tensor v_pool, Tensor pages, int length, int head_dim) -> (Tensor, Tensor)",
    fake=lambda k, v, pages, n, D: tuple(k.new_empty(n, k.shape[1], D, dtype=torch.float16) for _ in range(2)),
    reference=_gather_pages,
)
"""The first `length` tokens of a sequence whose pages are `pages` int32 `(n,)`: K and V, f16 `(length, Hkv, D)`, for dense attention."""


F16_MAX = 65504.0  # the largest fp16


norm_rows = define_op(
    "norm_rows(Tensor x, Tensor? weight, Tensor? bias, float eps, bool layer_norm) -> Tensor",
    fake=lambda x, *_: x.half(),
    reference=lambda x, weight, bias, eps, layer_norm: reference.norm(x, weight, eps, bias, layer_norm).clamp(-F16_MAX, F16_MAX).half(),
)
"""The norm before a product: f32 `(T, H)` -> f16, cut to finite numbers; without a weight only that."""


def _gate_activation(y: Tensor, activation: int, gated: bool) -> Tensor:
    kind, wide = reference.ACTIVATION_NAMES[activation], y.float()
    if not gated:
        return reference.activate(wide, kind).clamp(-F16_MAX, F16_MAX).half()
    gate, up = wide.chunk(2, 1)
    return (reference.activate(gate, kind) * up).clamp(-F16_MAX, F16_MAX).half()


gate_rows = define_op(
    "gate_rows(Tensor y, int activation, bool gated) -> Tensor",
    fake=lambda y, _, gated: y.new_empty(y.shape[0], y.shape[1] // (2 if gated else 1)),
    reference=_gate_activation,
)
"""y f16 `(T, 2I)` -> act(first half) * second half, f16 `(T, I)`; not gated: act(y). activation: index in reference.ACTIVATIONS."""


def _rotate_rows(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, num_heads: int,
    num_kv_heads: int, head_dim: int,
) -> None:  # fmt: skip
    turning, at = num_heads + num_kv_heads, positions.long()
    y = qkv.view(len(qkv), -1, head_dim)
    y[:, :turning] = reference.rope(y[:, :turning].float(), cos[at], sin[at], False).clamp(-F16_MAX, F16_MAX).half()
    kept = slots >= 0
    kv_codes.write_slots(k_pool, slots[kept], y[kept, num_heads:turning].float())
    kv_codes.write_slots(v_pool, slots[kept], y[kept, turning:].float())


rotate_rows = define_op(
    "rotate_rows(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor positions, Tensor slots, Tensor(b!) k_pool, Tensor(c!) v_pool, "
    "int num_heads, int num_kv_heads, int head_dim) -> ()",
    fake=lambda *_: None,
    reference=_rotate_rows,
)
"""qkv f16 `(T, (Hq + 2 Hkv) * D)`: q and k rotated in place, all D dims; k, v to `slots` of f16 pools (negative: none)."""


def _merge_parts(parts: list[Tensor], lse: list[Tensor]) -> Tensor:
    weights = torch.stack(lse).softmax(0).transpose(1, 2)[..., None]
    return (weights * torch.stack(parts)).sum(0).half()


merge_parts = define_op(
    "merge_parts(Tensor[] parts, Tensor[] lse) -> Tensor",
    fake=lambda parts, _: torch.empty_like(parts[0]),
    reference=_merge_parts,
)
"""Attention over all keys from that over up to 16 runs of them: f16 `(T, Hq, D)` each, lse f32 `(Hq, T)`, the logarithm of a run's sum."""
