"""f32 products on tensor cores (bf16x3): each factor as a sum of two bf16 numbers, three bf16 products in one.

x = high + low keeps 16 bits of the mantissa at any magnitude, so x y = high high + high low + low high is right to about 1e-5 of the
largest term, with sums in f32: finer than TF32 by a factor of 50, without changing a process-wide setting. Below MIN_MULTIPLICATIONS
multiplications the plain product is faster.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MIN_MULTIPLICATIONS = 1 << 32  # multiplications
SPLIT_NUMBERS = 1 << 25  # numbers of a factor that are split at a time: besides the result a product takes 0.9 GB at most
RESULT_NUMBERS = 1 << 24  # numbers of a product that are held before they are subtracted


@cache
def has_bf16_cores(index: int | None) -> bool:
    """Whether GPU `index` has tensor cores for bf16."""
    return torch.cuda.get_device_capability(index)[0] >= 8


def is_worthwhile(x: Tensor, multiplications: int) -> bool:
    """Whether a product of f32 tensors on x's device should come here."""
    return x.is_cuda and x.dtype == torch.float32 and multiplications >= MIN_MULTIPLICATIONS and has_bf16_cores(x.device.index)


def split_bf16(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 tensors whose sum is x to 16 bits."""
    high = x.bfloat16()
    return high, (x - high).bfloat16()


def multiply_split(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` for f32 `(M, K)` and `(K, N)` on a GPU that can (`is_worthwhile`), SPLIT_NUMBERS numbers of each at a time."""
    rows, columns = _rows_at_once(x.shape[0], x.shape[1]), _rows_at_once(y.shape[1], y.shape[0])
    if rows >= x.shape[0] and columns >= y.shape[1]:
        return _multiply(_stack_left(x), y)
    made = x.new_empty(x.shape[0], y.shape[1])
    for top in range(0, x.shape[0], rows):
        left = _stack_left(x[top : top + rows])
        for first in range(0, y.shape[1], columns):
            made[top : top + rows, first : first + columns] = _multiply(left, y[:, first : first + columns])
    return made


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` for f32 `(M, K)` and `(K, N)`: `multiply_split` where that pays."""
    return multiply_split(x, y) if is_worthwhile(x, x.numel() * y.shape[1]) else x @ y


def subtract_product(w: Tensor, x: Tensor, y: Tensor) -> None:
    """`w -= x @ y` in place, for f32 `(M, N)`, `(M, K)` and `(K, N)`; some columns at a time, to keep temporary memory small."""
    if not is_worthwhile(x, x.numel() * y.shape[1]):
        w.addmm_(x, y, alpha=-1)
        return
    left, columns = _stack_left(x), max(256, RESULT_NUMBERS // len(x) // 256 * 256)
    for first in range(0, y.shape[1], columns):
        w[:, first : first + columns] -= _multiply(left, y[:, first : first + columns])


def _rows_at_once(count: int, size: int) -> int:
    """How many of `count` rows of `size` numbers are split at a time."""
    return count if count * size <= SPLIT_NUMBERS else max(256, SPLIT_NUMBERS // size // 256 * 256)


def _stack_left(x: Tensor) -> Tensor:
    high, low = split_bf16(x)
    return torch.cat((high, low, high), 1)


def _multiply(left: Tensor, y: Tensor) -> Tensor:
    high, low = split_bf16(y)
    return torch.mm(left, torch.cat((high, high, low), 0), out_dtype=torch.float32)


MIN_HIDDEN_SIZE = 1024  # hidden size from which a model's products are sent there


class _Linear(torch.autograd.Function):
    """`F.linear`; the input is kept only for a weight that learns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x if ctx.needs_input_grad[1] else None)
        return multiply_split(x.flatten(0, -2), weight.T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (weight, x), (gradient,) = ctx.saved_tensors, gradients
        to_x = multiply_split(gradient.flatten(0, -2), weight).view(*gradient.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return to_x, None if x is None else multiply_split(gradient.flatten(0, -2).T, x.flatten(0, -2))


class LargeLinears(TorchFunctionMode):
    """Sends large `F.linear` there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and is_worthwhile(args[0], args[0].numel() * args[1].shape[0]):
            out = _Linear.apply(args[0], args[1])
            return out if len(args) < 3 or args[2] is None else out + args[2]
        return func(*args, **(kwargs or {}))


def bf16x3_linears(device: torch.device, hidden_size: int) -> AbstractContextManager[object]:
    """A context in which the large linears of a model of this size run there; one that does nothing where that cannot pay."""
    worth = device.type == "cuda" and hidden_size >= MIN_HIDDEN_SIZE and has_bf16_cores(device.index)
    return LargeLinears() if worth else nullcontext()
