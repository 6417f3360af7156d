"""One linear: from dense weight and factor to EXL2 tensors. Knows nothing of allocation or files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl2nb.converter.hessian import Factor
from exl2nb.ops.gptq import Quantized, gptq_quantize
from exl2nb.quant.exl2 import Exl2Tensors, encode

Groups = Sequence[tuple[int, int]]


def run(weight: Tensor, factor: Factor, groups: Groups, column_weight: Tensor | None = None) -> Quantized:
    """GPTQ on one matrix.

    Args:
        weight: f32 `(N, K)`, the nn.Linear layout.
        factor: order and factor of its input's Hessian.
        groups: (bits, rows) from top to bottom of the stored order.
        column_weight: f32 `(N,)`; None counts all columns alike.
    """
    table = torch.tensor([value for group in groups for value in group], dtype=torch.int32)
    columns = torch.ones(weight.shape[0]) if column_weight is None else column_weight.float().contiguous()
    return gptq_quantize(weight.T[factor.perm].contiguous(), factor.upper, columns, table)


def quantize(weight: Tensor, factor: Factor, groups: Groups, *, bias: Tensor | None = None) -> tuple[Exl2Tensors, float]:
    """Quantise one matrix and pack it.

    Returns:
        The tensors, and the sum over columns of `dW^T H dW`.
    """
    result = run(weight, factor, groups)
    packed = encode(result.codes, result.scale_index, result.scale_max, groups, factor.perm, bias=bias)
    return packed, float(result.loss.double().sum())


def dense(packed: Exl2Tensors, out_features: int) -> Tensor:
    """What the loader will compute with, in the nn.Linear layout: f32 `(out_features, K)`, padding dropped."""
    return packed.reconstruct()[:, :out_features].T.float().contiguous()
