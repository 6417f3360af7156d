"""What a sparse layer consists of: the one list of arguments that its op, its reference, the program and the model share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exl2nb.ops._library import check
from exl2nb.ops.reference import ACTIVATIONS

OP = "routed_mlp"


@dataclass(frozen=True, kw_only=True, eq=False)
class Experts:
    """The experts of a layer, its router and how what they give is added.

    norm, eps, norm_bias, layer_norm: of the input, as in `norm_qkv_rope`.
    router: blob, E outputs.
    up, down: per expert the blobs of [gate; up] (2 * I outputs) and of down.
    top_k: experts per row.
    renormalize: order of the norm that the chosen weights are divided by (1: they sum to 1); 0 leaves them.
    activation: one of `reference.ACTIVATIONS`.
    shared_up, shared_down: an expert for every row, or None. shared_gate: blob with one output; its sigmoid weighs that expert.
    post_norm: f32 `(H,)`, RMS norm of the sum, with post_eps; None: none. scale: factor on what is added.

    Raises:
        ValueError: numbers that contradict one another; named.
    """

    norm: Tensor | None
    eps: float
    router: Tensor
    up: Sequence[Tensor]
    down: Sequence[Tensor]
    top_k: int
    renormalize: float = 0.0
    activation: str = "silu"
    norm_bias: Tensor | None = None
    layer_norm: bool = False
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None
    post_norm: Tensor | None = None
    post_eps: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        count = len(self.up)
        check(self.activation in ACTIVATIONS, OP, "activation", repr(self.activation), f"one of {', '.join(ACTIVATIONS)}")
        check(count == len(self.down) > 0, OP, "number of up and down matrices", (count, len(self.down)), "one of each per expert")
        check(0 < self.top_k <= count, OP, "top_k", self.top_k, f"1 to {count} (the experts)")
        check(self.renormalize >= 0, OP, "renormalize", self.renormalize, "0 or more")
        half = (self.shared_up is None) != (self.shared_down is None)
        check(not half, OP, "shared expert", "half there", "shared_up and shared_down")

    def arguments(self) -> tuple[Any, ...]:
        """What the op takes behind x, in its order."""
        return (
            self.norm, self.eps, self.router, list(self.up), list(self.down), self.top_k, self.renormalize,
            ACTIVATIONS.index(self.activation), self.norm_bias, self.layer_norm, self.shared_up, self.shared_down, self.shared_gate,
            self.post_norm, self.post_eps, self.scale,
        )  # fmt: skip

    def shapes(self, hidden: int, inner: int, shared: int) -> Iterator[tuple[Tensor, int, int]]:
        """Every matrix with the rows and columns that it must have; inner, shared: inputs of the second matrices."""
        yield self.router, hidden, len(self.up)
        for up, down in zip(self.up, self.down):
            yield up, hidden, 2 * inner
            yield down, inner, hidden
        if self.shared_up is not None and self.shared_down is not None:
            yield self.shared_up, hidden, 2 * shared
            yield self.shared_down, shared, hidden
        if self.shared_gate is not None:
            yield self.shared_gate, hidden, 1
