"""The two ends of the stack: token embedding, and final norm with the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb import ops


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """table: f16, bf16 or f32 `(V, H)`."""

    table: Tensor

    def __call__(self, ids: Tensor) -> Tensor:
        """Ids int32 `(T,)` -> f32 `(T, H)`."""
        return ops.embed(self.table, ids)

    def record(self, program: ops.Program) -> None:
        """Write the same down in a program."""
        program.embed(self.table)


@dataclass(frozen=True, kw_only=True)
class Head:
    """norm: f32 `(H,)`; matrix: blob with V outputs."""

    norm: Tensor
    eps: float
    matrix: Tensor

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """Logits f32 `(R, V)` of the rows int32 `(R,)` of x f32 `(T, H)`."""
        return ops.norm_head(torch.index_select(x, 0, rows), self.norm, self.eps, self.matrix)

    def record(self, program: ops.Program) -> None:
        """Write the same down in a program."""
        program.norm_head(self.norm, self.eps, self.matrix)
