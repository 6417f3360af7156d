"""The norm in front of a fat op, and the keywords that carry it there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from torch import Tensor


class NormOptions(TypedDict):
    """Keywords of every op that begins with a norm."""

    norm_bias: Tensor | None
    layer_norm: bool


@dataclass(frozen=True, kw_only=True)
class Norm:
    """weight, bias: f32 `(H,)`; no weight, no norm. layer: LayerNorm instead of RMS."""

    weight: Tensor | None
    bias: Tensor | None = None
    eps: float
    layer: bool = False

    @property
    def options(self) -> NormOptions:
        """What the ops take by keyword; weight and eps go by position."""
        return {"norm_bias": self.bias, "layer_norm": self.layer}


@dataclass(frozen=True, kw_only=True)
class Added:
    """How a result is added to the residual stream: times `scale`, after an RMS norm of it where `norm` f32 `(H,)` is given."""

    norm: Tensor | None = None
    eps: float = 0.0
    scale: float = 1.0
