"""The routed MLP: norm, router, the chosen experts, residual, in one op; weights of experts that no row chose are not read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import define
from exl2nb.ops.records import RoutedOp
from exl2nb.ops.reference import ACTIVATIONS
from exl2nb.ops.weights import dense


def _routed_mlp(
    x: Tensor, norm: Tensor | None, eps: float, router: Tensor, up: list[Tensor], down: list[Tensor], top_k: int, renormalize: float,
    activation: int, *rest: Any,
) -> Tensor:  # fmt: skip
    norm_bias, layer_norm, shared_up, shared_down, shared_gate, post_norm, post_eps, scale = rest
    experts = RoutedOp(
        norm=norm, eps=eps, blob=router, up=up, down=down, top_k=top_k, renormalize=renormalize, activation=ACTIVATIONS[activation],
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


def routed_mlp(x: Tensor, experts: RoutedOp) -> Tensor:
    """Add the MLP of the chosen experts to x f32 `(T, H)`, in place.

    With h = norm(x) and p = softmax(h @ router): the `top_k` largest p choose experts and weigh them, divided by their norm of order
    `renormalize`. Each row gets x += scale * post_norm(sum of p_e * down_e(act(gate_e(h)) * up_e(h)) + shared). A row's experts are added
    in the order of their numbers, whatever other rows there are.

    Returns:
        int32 `(T, top_k)`: the chosen experts by falling weight; of equal weights the first.
    """
    return _routed_mlp_op(x, *experts.arguments())
