"""The MLP half of a decoder layer: x += down(act(gate(norm(x))) * up(norm(x))), or x += down(act(up(norm(x))))."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from exl2nb import ops
from exl2nb.model.layers.norm import Added, Norm


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Weights of one layer's MLP. up: blob of [gate; up] where it is gated, else of up alone; biases f32 or None."""

    norm: Norm
    gated: bool
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    added: Added
    activation: str

    def __call__(self, x: Tensor) -> None:
        """Add the MLP's result to x f32 `(T, H)` in place."""
        self.add(x, self.inner(x))

    def record(self, program: ops.Program) -> None:
        """Write the same down in a program."""
        self.record_inner(program, aside=False)
        self.record_add(program, aside=False)

    def inner(self, x: Tensor) -> Tensor:
        """The activations for x f32 `(T, H)` -> `(T, I)`."""
        return ops.norm_gate_up(
            x, self.norm.weight, self.norm.eps, self.up, self.up_bias, activation=self.activation, gated=self.gated, **self.norm.options
        )

    def add(self, x: Tensor, inner: Tensor) -> None:
        """Project `inner` and add it to x, in place."""
        ops.linear_residual(x, inner, self.down, self.down_bias, norm=self.added.norm, eps=self.added.eps, scale=self.added.scale)

    def record_inner(self, program: ops.Program, *, aside: bool) -> None:
        """Write `inner` down in a program; aside: beside what attention has read out, not in its place."""
        program.norm_gate_up(
            self.norm.weight, self.norm.eps, self.up, self.up_bias,
            activation=self.activation, gated=self.gated, aside=aside, **self.norm.options,
        )  # fmt: skip

    def record_add(self, program: ops.Program, *, aside: bool) -> None:
        """Write `add` down in a program."""
        program.linear_residual(self.down, self.down_bias, norm=self.added.norm, eps=self.added.eps, scale=self.added.scale, aside=aside)
