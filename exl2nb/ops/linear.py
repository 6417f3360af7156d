"""Matrix products with a weight blob."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import define, dynamic_size
from exl2nb.ops.weights import dense


def _linear(x: Tensor, blob: Tensor, bias: Tensor | None) -> Tensor:
    return reference.linear(x, dense(blob), bias)


def _linear_residual(residual: Tensor, x: Tensor, blob: Tensor, *rest: Any) -> None:
    reference.linear_residual(residual, x, dense(blob), *rest)


_linear_op = define(
    "linear(Tensor x, Tensor blob, Tensor? bias) -> Tensor",
    fake=lambda x, blob, bias: x.new_empty(x.shape[0], dynamic_size() if bias is None else bias.shape[0], dtype=torch.float32),
    reference=_linear,
)
_linear_residual_op = define(
    "linear_residual(Tensor(a!) residual, Tensor x, Tensor blob, Tensor? bias, Tensor? norm=None, float eps=0.0, float scale=1.0) -> ()",
    fake=lambda residual, x, blob, bias, norm=None, eps=0.0, scale=1.0: None,
    reference=_linear_residual,
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
