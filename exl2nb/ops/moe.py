"""The routed MLP: norm, router, the chosen experts, residual, in one op; weights of experts that no row chose are not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check, define
from exl2nb.ops.reference import ACTIVATIONS
from exl2nb.ops.weights import dense

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
        """The op's arguments after x, in its order."""
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


def _routed_mlp(
    x: Tensor, norm: Tensor | None, eps: float, router: Tensor, up: list[Tensor], down: list[Tensor], top_k: int, renormalize: float,
    activation: int, *rest: Any,
) -> Tensor:  # fmt: skip
    norm_bias, layer_norm, shared_up, shared_down, shared_gate, post_norm, post_eps, scale = rest
    experts = Experts(
        norm=norm, eps=eps, router=router, up=up, down=down, top_k=top_k, renormalize=renormalize, activation=ACTIVATIONS[activation],
        norm_bias=norm_bias, layer_norm=layer_norm, shared_up=shared_up, shared_down=shared_down, shared_gate=shared_gate,
        post_norm=post_norm, post_eps=post_eps, scale=scale,
    )  # fmt: skip
    return reference.routed_mlp(x, experts, dense)


_routed_mlp_op = define(
    "routed_mlp(Tensor(a!) x, Tensor? norm, float eps, Tensor router, Tensor[] up, Tensor[] down, int top_k, float renormalize, "
    "int activation, Tensor? norm_bias=None, bool layer_norm=False, Tensor? shared_up=None, Tensor? shared_down=None, "
    "Tensor? shared_gate=None, Tensor? post_norm=None, float post_eps=0.0, float scale=1.0) -> Tensor",
    fake=lambda x, norm, eps, router, up, down, top_k, *_, **__: x.new_empty(x.shape[0], top_k, dtype=torch.int32),
    reference=_routed_mlp,
)


def routed_mlp(x: Tensor, experts: Experts) -> Tensor:
    """Add the MLP of the chosen experts to x f32 `(T, H)`, in place.

    With h = norm(x) and p = softmax(h @ router): the `top_k` largest p choose experts and weigh them, divided by their norm of order
    `renormalize`. Each row gets x += scale * post_norm(sum of p_e * down_e(act(gate_e(h)) * up_e(h)) + shared). A row's experts are added
    in the order of their numbers, whatever other rows there are.

    Returns:
        int32 `(T, top_k)`: the chosen experts by falling weight; of equal weights the first.
    """
    return _routed_mlp_op(x, *experts.arguments())
