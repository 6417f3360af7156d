"""Final norm and logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import define, dynamic_size
from exl2nb.ops.weights import dense


def _norm_head(x: Tensor, norm: Tensor | None, eps: float, blob: Tensor, *rest: Any) -> Tensor:
    return reference.norm_head(x, norm, eps, dense(blob), *rest)


_norm_head_op = define(
    "norm_head(Tensor x, Tensor? norm, float eps, Tensor blob, Tensor? bias, Tensor? norm_bias=None, bool layer_norm=False) -> Tensor",
    fake=lambda x, norm, eps, blob, bias, norm_bias=None, layer_norm=False: x.new_empty(
        x.shape[0], dynamic_size() if bias is None else bias.shape[0], dtype=torch.float32
    ),
    reference=_norm_head,
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
