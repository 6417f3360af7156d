"""The routed MLP: norm, router, the chosen experts, residual, in one op; weights of experts that no row chose are not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check, define
from exl2nb.ops.reference import ACTIVATIONS
from exl2nb.ops.weights import dense


def _routed_mlp(
    x: Tensor, norm: Tensor | None, eps: float, router: Tensor, up: list[Tensor], down: list[Tensor], top_k: int, renormalize: float,
    activation: int, *rest: Any,
) -> Tensor:  # fmt: skip
    check(len(up) == len(down) > 0, "routed_mlp", "number of up and down matrices", (len(up), len(down)), "one of each per expert")
    check(0 < top_k <= len(up), "routed_mlp", "top_k", top_k, f"1 to {len(up)} (the experts)")
    norms, shared, post = rest[:2], [None if blob is None else dense(blob) for blob in rest[2:5]], rest[5:]
    return reference.routed_mlp(
        x, norm, eps, dense(router), lambda i: (dense(up[i]), dense(down[i])), top_k, renormalize, ACTIVATIONS[activation],
        *norms, *shared, *post,
    )  # fmt: skip


_routed_mlp_op = define(
    "routed_mlp(Tensor(a!) x, Tensor? norm, float eps, Tensor router, Tensor[] up, Tensor[] down, int top_k, float renormalize, "
    "int activation, Tensor? norm_bias=None, bool layer_norm=False, Tensor? shared_up=None, Tensor? shared_down=None, "
    "Tensor? shared_gate=None, Tensor? post_norm=None, float post_eps=0.0, float scale=1.0) -> Tensor",
    fake=lambda x, norm, eps, router, up, down, top_k, *_, **__: x.new_empty(x.shape[0], top_k, dtype=torch.int32),
    reference=_routed_mlp,
)


def routed_mlp(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    router: Tensor,
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    *,
    top_k: int,
    renormalize: float = 0.0,
    activation: str = "silu",
    norm_bias: Tensor | None = None,
    layer_norm: bool = False,
    shared_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_gate: Tensor | None = None,
    post_norm: Tensor | None = None,
    post_eps: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Add the MLP of the chosen experts to x f32 `(T, H)`, in place.

    With h = norm(x) and p = softmax(h @ router): the `top_k` largest p choose experts and weigh them, divided by their norm of order
    `renormalize`. Each row gets x += scale * post_norm(sum of p_e * down_e(act(gate_e(h)) * up_e(h)) + shared). A row's experts are added
    in the order of their numbers, whatever rows stand beside it.

    Args:
        x: the residual stream.
        norm, eps, norm_bias, layer_norm: as in `norm_qkv_rope`.
        router: blob, E outputs.
        up, down: per expert the blobs of [gate; up] (2 * I outputs) and of down.
        top_k: experts per row.
        renormalize: order of the norm that the chosen weights are divided by (1: they sum to 1); 0 leaves them.
        activation: one of `reference.ACTIVATIONS`.
        shared_up, shared_down: an expert for every row, or None. shared_gate: blob with one output; its sigmoid weighs that expert.
        post_norm: f32 `(H,)`, RMS norm of the sum; None: none. scale: factor on what is added.

    Returns:
        int32 `(T, top_k)`: the chosen experts by falling weight; of equal weights the first.
    """
    check(activation in ACTIVATIONS, "routed_mlp", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
    return _routed_mlp_op(
        x, norm, eps, router, list(up), list(down), top_k, renormalize, ACTIVATIONS.index(activation), norm_bias, layer_norm,
        shared_up, shared_down, shared_gate, post_norm, post_eps, scale,
    )  # fmt: skip
