"""The gated MLP half of a decoder layer: x += down(act(gate(norm(x))) * up(norm(x)))."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from exl2nb import ops


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """Weights of one layer's MLP: norm f32 `(H,)`; gate_up: blob of [gate; up]; biases f32 or None."""

    norm: Tensor
    eps: float
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    activation: str

    def __call__(self, x: Tensor) -> None:
        """Add this half to x f32 `(T, H)` in place."""
        inner = ops.norm_gate_up(x, self.norm, self.eps, self.gate_up, self.gate_up_bias, activation=self.activation)
        ops.linear_residual(x, inner, self.down, self.down_bias)

    def record(self, program: ops.Program) -> None:
        """Write the same down in a program."""
        program.norm_gate_up(self.norm, self.eps, self.gate_up, self.gate_up_bias, activation=self.activation)
        program.linear_residual(self.down, self.down_bias)
