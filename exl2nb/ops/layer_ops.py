"""The ops of a network on the CPU, one call each: embedding, projections, attention, MLPs, matrix products, and the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check_argument, define_op, dynamic_size
from exl2nb.ops.blob_weights import cached_dense
from exl2nb.ops.kv_codes import page_size
from exl2nb.ops.records import QkvOp, RoutedOp
from exl2nb.ops.reference import ACTIVATION_NAMES


def _embed(table: Tensor, ids: Tensor, scale: float = 1.0, position_table: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    inside = ids.numel() == 0 or (int(ids.min()) >= 0 and int(ids.max()) < table.shape[0])
    check_argument(inside, "embed", "a token id", ids.tolist()[:8], f"0 to {table.shape[0] - 1}")
    if position_table is not None:
        check_argument(positions is not None, "embed", "positions", None, "one position per token")
        assert positions is not None
        inside = positions.numel() == 0 or (int(positions.min()) >= 0 and int(positions.max()) < len(position_table))
        check_argument(inside, "embed", "a position", positions.tolist()[:8], f"0 to {len(position_table) - 1}")
    return reference.embed(table, ids, scale, position_table, positions)


define_op(
    "embed(Tensor table, Tensor ids, float scale=1.0, Tensor? position_table=None, Tensor? positions=None) -> Tensor",
    fake=lambda table, ids, *_, **__: table.new_empty(ids.shape[0], table.shape[1], dtype=torch.float32),
    reference=_embed,
)


def _output_like(x: Tensor, bias: Tensor | None, parts: int = 1) -> Tensor:
    """An output without data: a row for each of x, as many columns as the bias has, over `parts`; without one only the blob knows."""
    return x.new_empty(x.shape[0], dynamic_size() if bias is None else bias.shape[0] // parts, dtype=torch.float32)


_linear_op = define_op(
    "linear(Tensor x, Tensor blob, Tensor? bias) -> Tensor",
    fake=lambda x, blob, bias: _output_like(x, bias),
    reference=lambda x, blob, bias: reference.linear(x, cached_dense(blob), bias),
)
define_op(
    "linear_residual(Tensor(a!) residual, Tensor x, Tensor blob, Tensor? bias, Tensor? norm=None, float eps=0.0, float scale=1.0) -> ()",
    fake=lambda *_, **__: None,
    reference=lambda residual, x, blob, *rest: reference.linear_residual(residual, x, cached_dense(blob), *rest),
)


def linear(x: Tensor, blob: Tensor, bias: Tensor | None = None) -> Tensor:
    """X f32 `(M, K)` times the blob's matrix, plus bias f32 `(N,)` -> f32 `(M, N)`."""
    return _linear_op(x, blob, bias)


def _norm_gate_up(x: Tensor, norm: Tensor | None, eps: float, blob: Tensor, bias: Tensor | None, activation: int, *rest: Any) -> Tensor:
    return reference.norm_gate_up(x, norm, eps, cached_dense(blob), bias, ACTIVATION_NAMES[activation], *rest)


define_op(
    "norm_gate_up(Tensor x, Tensor? norm, float eps, Tensor blob, Tensor? bias, int activation, Tensor? norm_bias=None, "
    "bool layer_norm=False, bool gated=True) -> Tensor",
    fake=lambda x, norm, eps, blob, bias, activation, norm_bias=None, layer_norm=False, gated=True: _output_like(
        x, bias, 2 if gated else 1
    ),
    reference=_norm_gate_up,
)


define_op(
    "norm_head(Tensor x, Tensor? norm, float eps, Tensor blob, Tensor? bias, Tensor? norm_bias=None, bool layer_norm=False) -> Tensor",
    fake=lambda x, norm, eps, blob, bias, norm_bias=None, layer_norm=False: _output_like(x, bias),
    reference=lambda x, norm, eps, blob, *rest: reference.norm_head(x, norm, eps, cached_dense(blob), *rest),
)


def _routed_mlp(
    x: Tensor, norm: Tensor | None, eps: float, router: Tensor, up: list[Tensor], down: list[Tensor], top_k: int, renormalize: float,
    activation: int, *rest: Any,
) -> Tensor:  # fmt: skip
    norm_bias, layer_norm, shared_up, shared_down, shared_gate, post_norm, post_eps, scale = rest
    experts = RoutedOp(
        norm=norm, eps=eps, blob=router, up=up, down=down, top_k=top_k, renormalize=renormalize, activation=ACTIVATION_NAMES[activation],
        norm_bias=norm_bias, layer_norm=layer_norm, shared_up=shared_up, shared_down=shared_down, shared_gate=shared_gate,
        post_norm=post_norm, post_eps=post_eps, scale=scale,
    )  # fmt: skip
    return reference.routed_mlp(x, experts, cached_dense)


define_op(
    "routed_mlp(Tensor(a!) x, Tensor? norm, float eps, Tensor router, Tensor[] up, Tensor[] down, int top_k, float renormalize, "
    "int activation, Tensor? norm_bias=None, bool layer_norm=False, Tensor? shared_up=None, Tensor? shared_down=None, "
    "Tensor? shared_gate=None, Tensor? post_norm=None, float post_eps=0.0, float scale=1.0) -> Tensor",
    fake=lambda x, norm, eps, router, up, down, top_k, *_, **__: x.new_empty(x.shape[0], top_k, dtype=torch.int32),
    reference=_routed_mlp,
)


def _norm_qkv_rope(
    x: Tensor, norm: Tensor | None, eps: float, blob: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor,
    slots: Tensor, k_pool: Tensor, v_pool: Tensor, *rest: Any,
) -> Tensor:  # fmt: skip
    op, num_slots = "norm_qkv_rope", k_pool.shape[0] * page_size(k_pool)
    for what, values, end in (("a slot", slots, num_slots), ("a position", positions, len(cos))):
        inside = not len(x) or (int(values.min()) >= 0 and int(values.max()) < end)
        check_argument(inside, op, what, values.tolist()[:8], f"0 to {end - 1}")
    names = "num_heads", "num_kv_heads", "head_dim", "q_norm", "k_norm", "norm_bias", "layer_norm", "interleaved", "clip"
    layer = QkvOp(norm=norm, eps=eps, blob=cached_dense(blob), bias=bias, cos=cos, sin=sin, **dict(zip(names, rest)))
    return reference.norm_qkv_rope(x, layer, positions, slots, k_pool, v_pool)


def _norm_qkv_rope_fake(x: Tensor, *rest: object) -> Tensor:
    num_heads, _, head_dim = rest[10:13]
    return x.new_empty(x.shape[0], num_heads, head_dim, dtype=torch.float32)  # type: ignore[arg-type]


define_op(
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
        check_argument(
            len(used) * P >= length, op, f"context_lens[{b}]", length, f"at most {block_table.shape[1] * P} (the pages of block_table)"
        )
        inside = len(used) == 0 or (int(used.min()) >= 0 and int(used.max()) < k_pool.shape[0])
        check_argument(inside, op, f"a page of sequence {b}", used.tolist()[:8], f"0 to {k_pool.shape[0] - 1}")
    return reference.paged_attention(q, k_pool, v_pool, block_table, cu_seqlens, lens, *rest)


_paged_attention_op = define_op(
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
