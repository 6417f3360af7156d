"""The MLP half of a sparse decoder layer: every token goes through the experts that its router chooses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from exl2nb import ops
from exl2nb.model.layers.norm import Added, Norm


@dataclass(frozen=True, kw_only=True)
class RoutedMLP:
    """Weights of one layer's experts.

    router: blob, an output per expert. up, down: per expert the blobs of [gate; up] and of down. shared_up, shared_down, shared_gate: the
    expert that every token visits, and its sigmoid's matrix, or None. renormalize: as in `model.moe.MoE`.
    """

    norm: Norm
    router: Tensor
    up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    shared_up: Tensor | None
    shared_down: Tensor | None
    shared_gate: Tensor | None
    top_k: int
    renormalize: float
    activation: str
    added: Added

    def __call__(self, x: Tensor) -> Tensor:
        """Add the experts' results to x f32 `(T, H)` in place; the chosen experts int32 `(T, top_k)`."""
        return ops.routed_mlp(x, self._experts)

    def record(self, program: ops.Program) -> None:
        """Write the same down in a program."""
        program.routed_mlp(self._experts)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the experts that one token does not visit, on average."""
        total = sum(blob.nbytes for blob in (*self.up, *self.down))
        return total - total * self.top_k // len(self.up)

    @property
    def _experts(self) -> ops.Experts:
        return ops.Experts(
            norm=self.norm.weight, eps=self.norm.eps, **self.norm.options, router=self.router, up=self.up, down=self.down, top_k=self.top_k,
            renormalize=self.renormalize, activation=self.activation, shared_up=self.shared_up, shared_down=self.shared_down,
            shared_gate=self.shared_gate, post_norm=self.added.norm, post_eps=self.added.eps, scale=self.added.scale,
        )  # fmt: skip
