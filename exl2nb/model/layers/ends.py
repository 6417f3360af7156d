"""The two ends of the stack: token embedding, and final norm with the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.model.layers.norm import Norm


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """table: f16, bf16 or f32 `(V, H)`, its rows times `scale`; position_table: learned positions `(max_pos, H)`, or None."""

    table: Tensor
    scale: float = 1.0
    position_table: Tensor | None = None

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Ids and positions int32 `(T,)` -> f32 `(T, H)`."""
        return ops.embed(self.table, ids, scale=self.scale, position_table=self.position_table, positions=positions)

    def record(self, program: ops.Program) -> None:
        """Write the same down in a program."""
        program.embed(self.table, scale=self.scale, position_table=self.position_table)


@dataclass(frozen=True, kw_only=True)
class Head:
    """matrix: blob with V outputs."""

    norm: Norm
    matrix: Tensor

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """Logits f32 `(R, V)` of the rows int32 `(R,)` of x f32 `(T, H)`."""
        return ops.norm_head(torch.index_select(x, 0, rows), self.norm.weight, self.norm.eps, self.matrix, **self.norm.options)

    def record(self, program: ops.Program) -> None:
        """Write the same down in a program."""
        program.norm_head(self.norm.weight, self.norm.eps, self.matrix, **self.norm.options)
