"""Attention: norm, q/k/v, rotation and cache write in one op; causal attention over a paged cache in the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check, define
from exl2nb.ops.kv_codes import page_size
from exl2nb.ops.records import QkvOp
from exl2nb.ops.weights import dense


def _norm_qkv_rope(
    x: Tensor, norm: Tensor | None, eps: float, blob: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor,
    slots: Tensor, k_pool: Tensor, v_pool: Tensor, *rest: Any,
) -> Tensor:  # fmt: skip
    op, num_slots = "norm_qkv_rope", k_pool.shape[0] * page_size(k_pool)
    for what, values, end in (("a slot", slots, num_slots), ("a position", positions, len(cos))):
        inside = not len(x) or (int(values.min()) >= 0 and int(values.max()) < end)
        check(inside, op, what, values.tolist()[:8], f"0 to {end - 1}")
    names = "num_heads", "num_kv_heads", "head_dim", "q_norm", "k_norm", "norm_bias", "layer_norm", "interleaved", "clip"
    layer = QkvOp(norm=norm, eps=eps, blob=dense(blob), bias=bias, cos=cos, sin=sin, **dict(zip(names, rest)))
    return reference.norm_qkv_rope(x, layer, positions, slots, k_pool, v_pool)


def _norm_qkv_rope_fake(x: Tensor, *rest: object) -> Tensor:
    num_heads, _, head_dim = rest[10:13]
    return x.new_empty(x.shape[0], num_heads, head_dim, dtype=torch.float32)  # type: ignore[arg-type]


define(
    "norm_qkv_rope(Tensor x, Tensor? norm, float eps, Tensor blob, Tensor? bias, Tensor cos, Tensor sin, Tensor positions, Tensor slots, "
    "Tensor(a!) k_pool, Tensor(b!) v_pool, int num_heads, int num_kv_heads, int head_dim, Tensor? q_norm, Tensor? k_norm, "
    "Tensor? norm_bias=None, bool layer_norm=False, bool interleaved=False, float clip=0.0) -> Tensor",
    fake=_norm_qkv_rope_fake,
    reference=_norm_qkv_rope,
)


def _paged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, cu_seqlens: Tensor, lens: Tensor, *rest: Any
) -> Tensor:
    op, P = "paged_attention", page_size(k_pool)
    for b, length in enumerate(lens.tolist()):
        used = block_table[b, : (length + P - 1) // P]
        check(len(used) * P >= length, op, f"context_lens[{b}]", length, f"at most {block_table.shape[1] * P} (the pages of block_table)")
        inside = len(used) == 0 or (int(used.min()) >= 0 and int(used.max()) < k_pool.shape[0])
        check(inside, op, f"a page of sequence {b}", used.tolist()[:8], f"0 to {k_pool.shape[0] - 1}")
    return reference.paged_attention(q, k_pool, v_pool, block_table, cu_seqlens, lens, *rest)


_paged_attention_op = define(
    "paged_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, Tensor cu_seqlens, Tensor context_lens, "
    "float scale, int window, float softcap) -> Tensor",
    fake=lambda q, *_: q.new_empty(q.shape[0], q.shape[1] * q.shape[2], dtype=torch.float32),
    reference=_paged_attention,
)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of this step's queries over their sequences' pages.

    Args:
        q: f32 `(T, Hq, D)`, D a multiple of 8 from 8 to 256; q head h reads KV head h // (Hq // Hkv).
        k_pool, v_pool: f16 or f32 `(num_pages, Hkv, P, D)`, or codes, as in `norm_qkv_rope`.
        block_table: int32 `(B, max_pages)`; entries past a sequence's last page are not read.
        cu_seqlens: int32 `(B + 1,)`, prefix sums of the queries per sequence. context_lens: int32 `(B,)`, this step's tokens included:
            query i of n in sequence b has position context_lens[b] - n + i and sees the keys at positions up to its own.
        scale: factor of the scores. window: keys seen at most, the own one included; 0 = all. softcap: c * tanh(s / c); 0 = none.

    Returns:
        f32 `(T, Hq * D)`.

    Raises:
        RuntimeError, ValueError: shapes disagree, or a page is out of range.
    """
    return _paged_attention_op(q, k_pool, v_pool, block_table, cu_seqlens, context_lens, scale, window, softcap)
