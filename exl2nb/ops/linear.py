"""Embedding, matrix products with a weight blob, MLPs, and the head.

Of routed MLPs the weights of experts that no row chose are not read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check, define, dynamic_size
from exl2nb.ops.records import RoutedOp
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


define(
    "embed(Tensor table, Tensor ids, float scale=1.0, Tensor? position_table=None, Tensor? positions=None) -> Tensor",
    fake=lambda table, ids, *_, **__: table.new_empty(ids.shape[0], table.shape[1], dtype=torch.float32),
    reference=_embed,
)


def _out(x: Tensor, bias: Tensor | None, parts: int = 1) -> Tensor:
    """An output without data: a row for each of x, as many columns as the bias has, over `parts`; without one only the blob knows."""
    return x.new_empty(x.shape[0], dynamic_size() if bias is None else bias.shape[0] // parts, dtype=torch.float32)


_linear_op = define(
    "linear(Tensor x, Tensor blob, Tensor? bias) -> Tensor",
    fake=lambda x, blob, bias: _out(x, bias),
    reference=lambda x, blob, bias: reference.linear(x, dense(blob), bias),
)
define(
    "linear_residual(Tensor(a!) residual, Tensor x, Tensor blob, Tensor? bias, Tensor? norm=None, float eps=0.0, float scale=1.0) -> ()",
    fake=lambda *_, **__: None,
    reference=lambda residual, x, blob, *rest: reference.linear_residual(residual, x, dense(blob), *rest),
)


def linear(x: Tensor, blob: Tensor, bias: Tensor | None = None) -> Tensor:
    """X f32 `(M, K)` times the blob's matrix, plus bias f32 `(N,)` -> f32 `(M, N)`."""
    return _linear_op(x, blob, bias)


def _norm_gate_up(x: Tensor, norm: Tensor | None, eps: float, blob: Tensor, bias: Tensor | None, activation: int, *rest: Any) -> Tensor:
    return reference.norm_gate_up(x, norm, eps, dense(blob), bias, ACTIVATIONS[activation], *rest)


define(
    "norm_gate_up(Tensor x, Tensor? norm, float eps, Tensor blob, Tensor? bias, int activation, Tensor? norm_bias=None, "
    "bool layer_norm=False, bool gated=True) -> Tensor",
    fake=lambda x, norm, eps, blob, bias, activation, norm_bias=None, layer_norm=False, gated=True: _out(x, bias, 2 if gated else 1),
    reference=_norm_gate_up,
)


define(
    "norm_head(Tensor x, Tensor? norm, float eps, Tensor blob, Tensor? bias, Tensor? norm_bias=None, bool layer_norm=False) -> Tensor",
    fake=lambda x, norm, eps, blob, bias, norm_bias=None, layer_norm=False: _out(x, bias),
    reference=lambda x, norm, eps, blob, *rest: reference.norm_head(x, norm, eps, dense(blob), *rest),
)


def _routed_mlp(
    x: Tensor, norm: Tensor | None, eps: float, router: Tensor, up: list[Tensor], down: list[Tensor], top_k: int, renormalize: float,
    activation: int, *rest: Any,
) -> Tensor:  # fmt: skip
    norm_bias, layer_norm, shared_up, shared_down, shared_gate, post_norm, post_eps, scale = rest
    experts = RoutedOp(
        norm=norm, eps=eps, blob=router, up=up, down=down, top_k=top_k, renormalize=renormalize, activation=ACTIVATIONS[activation],
        norm_bias=norm_bias, layer_norm=layer_norm, shared_up=shared_up, shared_down=shared_down, shared_gate=shared_gate,
        post_norm=post_norm, post_eps=post_eps, scale=scale,
    )  # fmt: skip
    return reference.routed_mlp(x, experts, dense)


define(
    "routed_mlp(Tensor(a!) x, Tensor? norm, float eps, Tensor router, Tensor[] up, Tensor[] down, int top_k, float renormalize, "
    "int activation, Tensor? norm_bias=None, bool layer_norm=False, Tensor? shared_up=None, Tensor? shared_down=None, "
    "Tensor? shared_gate=None, Tensor? post_norm=None, float post_eps=0.0, float scale=1.0) -> Tensor",
    fake=lambda x, norm, eps, router, up, down, top_k, *_, **__: x.new_empty(x.shape[0], top_k, dtype=torch.int32),
    reference=_routed_mlp,
)
