"""One linear: from dense weight and factor to EXL2 tensors. Knows nothing of allocation or files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exl2nb.converter.hessian import Coupling, Factor
from exl2nb.ops.gptq import Quantized, gptq_quantize
from exl2nb.quant.exl2 import Exl2Tensors, encode

Groups = Sequence[tuple[int, int]]
RUNS_ON = torch.device("cpu")  # where the op has a kernel; its inputs may come from any device


def run(weight: Tensor, factor: Factor, groups: Groups, column_weight: Tensor | None = None, coupling: Coupling | None = None) -> Quantized:
    """GPTQ on one matrix.

    Args:
        weight: f32 `(N, K)`, the nn.Linear layout.
        factor: order and factor of its input's Hessian.
        groups: (bits, rows) from top to bottom of the stored order.
        column_weight: f32 `(N,)`; None counts all columns alike, or by the coupling.
        coupling: how its outputs belong together; None rounds every column for itself.

    Returns:
        On RUNS_ON.
    """
    table = torch.tensor([value for group in groups for value in group], dtype=torch.int32)
    stored, upper = weight.T[factor.perm].to(RUNS_ON), factor.upper.to(RUNS_ON)
    if coupling is None:
        columns = stored.new_ones(stored.shape[1]) if column_weight is None else column_weight.float().to(RUNS_ON).contiguous()
        return gptq_quantize(stored.contiguous(), upper, columns, table)
    perm, spread, back = coupling.perm.to(RUNS_ON), coupling.spread.to(RUNS_ON), torch.argsort(coupling.perm).to(RUNS_ON)
    columns = spread.square() if column_weight is None else column_weight.float().to(RUNS_ON)[perm].contiguous()
    made = gptq_quantize(stored[:, perm].contiguous(), upper, columns, table, coupling.factor.to(RUNS_ON), spread)
    return Quantized(made.codes[:, back], made.scale_index[:, back], made.scale_max, made.loss[:, back])


def quantize(
    weight: Tensor, factor: Factor, groups: Groups, *, bias: Tensor | None = None, coupling: Coupling | None = None
) -> tuple[Exl2Tensors, float]:
    """Quantise one matrix and pack it.

    Returns:
        The tensors, on the CPU, and the loss: the sum over columns of `dW^T H dW`, or of `tr(G dW^T H dW)` with a coupling.
    """
    result = run(weight, factor, groups, coupling=coupling)
    parts = (result.codes.cpu().contiguous(), result.scale_index.cpu().contiguous(), result.scale_max.cpu())
    packed = encode(*parts, groups, factor.perm.cpu(), bias=None if bias is None else bias.cpu())
    return packed, float(result.loss.double().sum())


def dense(packed: Exl2Tensors, out_features: int) -> Tensor:
    """What the loader will compute with, in the nn.Linear layout: f32 `(out_features, K)`, padding dropped."""
    return packed.reconstruct()[:, :out_features].T.float().contiguous()
