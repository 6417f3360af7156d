"""Embedding, matrix products with a weight blob, the MLP's first half, and the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check, define, dynamic_size
from exl2nb.ops.reference import ACTIVATIONS
from exl2nb.ops.weights import dense


def _embed(table: Tensor, ids: Tensor, scale: float = 1.0, position_table: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    inside = ids.numel() == 0 or (int(ids.min()) >= 0 and int(ids.max()) < table.shape[0])
    check(inside, "embed", "a token id", ids.tolist()[:8], f"0 to {table.shape[0] - 1}")
    if position_table is not None:
        check(positions is not None, "embed", "positions", None, "one position per token")
        assert positions is not None
        inside = positions.numel() == 0 or (int(positions.min()) >= 0 and int(positions.max()) < len(position_table))
        check(inside, "embed", "a position", positions.tolist()[:8], f"0 to {len(position_table) - 1}")
    return reference.embed(table, ids, scale, position_table, positions)


_embed_op = define(
    "embed(Tensor table, Tensor ids, float scale=1.0, Tensor? position_table=None, Tensor? positions=None) -> Tensor",
    fake=lambda table, ids, *_, **__: table.new_empty(ids.shape[0], table.shape[1], dtype=torch.float32),
    reference=_embed,
)


def embed(
    table: Tensor, ids: Tensor, *, scale: float = 1.0, position_table: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """Rows `ids` int32 `(T,)` of table `(V, H)` f16, bf16 or f32, times `scale` -> f32 `(T, H)`.

    Learned positions: the rows `positions` int32 `(T,)` of `position_table` `(max_pos, H)` are added. An id or position outside its table
    raises.
    """
    return _embed_op(table, ids, scale, position_table, positions)


def _out(x: Tensor, bias: Tensor | None, parts: int = 1) -> Tensor:
    """An output without data: a row for each of x, as many columns as the bias has, over `parts`; without one only the blob knows."""
    return x.new_empty(x.shape[0], dynamic_size() if bias is None else bias.shape[0] // parts, dtype=torch.float32)


_linear_op = define(
    "linear(Tensor x, Tensor blob, Tensor? bias) -> Tensor",
    fake=lambda x, blob, bias: _out(x, bias),
    reference=lambda x, blob, bias: reference.linear(x, dense(blob), bias),
)
_linear_residual_op = define(
    "linear_residual(Tensor(a!) residual, Tensor x, Tensor blob, Tensor? bias, Tensor? norm=None, float eps=0.0, float scale=1.0) -> ()",
    fake=lambda *_, **__: None,
    reference=lambda residual, x, blob, *rest: reference.linear_residual(residual, x, dense(blob), *rest),
)


def linear(x: Tensor, blob: Tensor, bias: Tensor | None = None) -> Tensor:
    """X f32 `(M, K)` times the blob's matrix, plus bias f32 `(N,)` -> f32 `(M, N)`."""
    return _linear_op(x, blob, bias)


def linear_residual(
    residual: Tensor,
    x: Tensor,
    blob: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Residual f32 `(M, N)` += scale * (x f32 `(M, K)` @ matrix + bias), in place; with norm f32 `(N,)` after an RMS norm of the sum."""
    _linear_residual_op(residual, x, blob, bias, norm, eps, scale)


def _norm_gate_up(x: Tensor, norm: Tensor | None, eps: float, blob: Tensor, bias: Tensor | None, activation: int, *rest: Any) -> Tensor:
    return reference.norm_gate_up(x, norm, eps, dense(blob), bias, ACTIVATIONS[activation], *rest)


_norm_gate_up_op = define(
    "norm_gate_up(Tensor x, Tensor? norm, float eps, Tensor blob, Tensor? bias, int activation, Tensor? norm_bias=None, "
    "bool layer_norm=False, bool gated=True) -> Tensor",
    fake=lambda x, norm, eps, blob, bias, activation, norm_bias=None, layer_norm=False, gated=True: _out(x, bias, 2 if gated else 1),
    reference=_norm_gate_up,
)


def norm_gate_up(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    blob: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    norm_bias: Tensor | None = None,
    layer_norm: bool = False,
    gated: bool = True,
) -> Tensor:
    """Norm of x f32 `(T, H)`, the stacked matrix [gate; up] (N = 2 * I), act(gate) * up -> f32 `(T, I)`.

    `activation`: one of `reference.ACTIVATIONS` ("silu", "gelu", "gelu_tanh"). norm, norm_bias, layer_norm: as in `norm_qkv_rope`.
    gated: False for the matrix up alone (N = I) and act(up).
    """
    check(activation in ACTIVATIONS, "norm_gate_up", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
    return _norm_gate_up_op(x, norm, eps, blob, bias, ACTIVATIONS.index(activation), norm_bias, layer_norm, gated)


_norm_head_op = define(
    "norm_head(Tensor x, Tensor? norm, float eps, Tensor blob, Tensor? bias, Tensor? norm_bias=None, bool layer_norm=False) -> Tensor",
    fake=lambda x, norm, eps, blob, bias, norm_bias=None, layer_norm=False: _out(x, bias),
    reference=lambda x, norm, eps, blob, *rest: reference.norm_head(x, norm, eps, dense(blob), *rest),
)


def norm_head(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    blob: Tensor,
    bias: Tensor | None = None,
    *,
    norm_bias: Tensor | None = None,
    layer_norm: bool = False,
) -> Tensor:
    """Norm of x f32 `(R, H)` (as in `norm_qkv_rope`), then the head's matrix -> logits f32 `(R, V)`."""
    return _norm_head_op(x, norm, eps, blob, bias, norm_bias, layer_norm)
