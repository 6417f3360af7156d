"""A model's large linears on tensor cores, by `ops.split_product`, forwards and backwards. Knows nothing of conversions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from exl2nb.ops.split_product import PIECE, capable, matmul, pays, product

__all__ = ["PIECE", "matmul", "used_by"]

WIDE = 1024  # hidden size from which a model's products are worth looking at


class _Linear(torch.autograd.Function):
    """`F.linear` without a gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return product(x.flatten(0, -2), weight.T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        return product(gradient.flatten(0, -2), weight).view(*gradient.shape[:-1], -1), None


class _Mode(TorchFunctionMode):
    """Sends large `F.linear` there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and pays(args[0], args[0].numel() * args[1].shape[0]):
            out = _Linear.apply(args[0], args[1])
            return out if len(args) < 3 or args[2] is None else out + args[2]
        return func(*args, **(kwargs or {}))


def used_by(device: torch.device, hidden_size: int) -> AbstractContextManager[object]:
    """A context in which the large linears of a model of this size run there; one that does nothing where that cannot pay."""
    worth = device.type == "cuda" and hidden_size >= WIDE and capable(device.index)
    return _Mode() if worth else nullcontext()
