"""The MLP's first half: norm, gate and up, activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check, define, dynamic_size
from exl2nb.ops.reference import ACTIVATIONS
from exl2nb.ops.weights import dense


def _norm_gate_up(x: Tensor, norm: Tensor | None, eps: float, blob: Tensor, bias: Tensor | None, activation: int, *rest: Any) -> Tensor:
    return reference.norm_gate_up(x, norm, eps, dense(blob), bias, ACTIVATIONS[activation], *rest)


_norm_gate_up_op = define(
    "norm_gate_up(Tensor x, Tensor? norm, float eps, Tensor blob, Tensor? bias, int activation, Tensor? norm_bias=None, "
    "bool layer_norm=False, bool gated=True) -> Tensor",
    fake=lambda x, norm, eps, blob, bias, activation, norm_bias=None, layer_norm=False, gated=True: x.new_empty(
        x.shape[0], dynamic_size() if bias is None else bias.shape[0] // (2 if gated else 1), dtype=torch.float32
    ),
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
