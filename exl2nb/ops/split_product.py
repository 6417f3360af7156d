"""f32 products on tensor cores: each factor as a sum of two bf16 numbers, three products in one. Knows nothing of models.

x = high + low keeps 16 bits of the mantissa at any magnitude, so x y = high high + high low + low high is right to about 1e-5 of the
largest term, with sums in f32: finer than TF32 by a factor of 50, and no switch of the process is touched. Below SMALLEST multiplications
the plain product is quicker.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SMALLEST = 1 << 32  # multiplications
PIECE = 1 << 25  # numbers of a factor that are split at a time: beside the result a product takes 0.9 GB at most
RESULT = 1 << 24  # numbers of a product that wait to be subtracted


@cache
def capable(index: int | None) -> bool:
    """Whether GPU `index` has tensor cores for bf16."""
    return torch.cuda.get_device_capability(index)[0] >= 8


def pays(x: Tensor, multiplications: int) -> bool:
    """Whether a product of f32 tensors on x's device should come here."""
    return x.is_cuda and x.dtype == torch.float32 and multiplications >= SMALLEST and capable(x.device.index)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 tensors whose sum is x to 16 bits."""
    high = x.bfloat16()
    return high, (x - high).bfloat16()


def product(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` for f32 `(M, K)` and `(K, N)` on a GPU that can (`pays`), PIECE numbers of each at a time."""
    rows, columns = _part(x.shape[0], x.shape[1]), _part(y.shape[1], y.shape[0])
    if rows >= x.shape[0] and columns >= y.shape[1]:
        return _multiply(_left(x), y)
    made = x.new_empty(x.shape[0], y.shape[1])
    for top in range(0, x.shape[0], rows):
        left = _left(x[top : top + rows])
        for first in range(0, y.shape[1], columns):
            made[top : top + rows, first : first + columns] = _multiply(left, y[:, first : first + columns])
    return made


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` for f32 `(M, K)` and `(K, N)`: `product` where that pays."""
    return product(x, y) if pays(x, x.numel() * y.shape[1]) else x @ y


def subtract(w: Tensor, x: Tensor, y: Tensor) -> None:
    """`w -= x @ y` in place, for f32 `(M, N)`, `(M, K)` and `(K, N)`; some columns at a time, so that little is needed beside w."""
    if not pays(x, x.numel() * y.shape[1]):
        w.addmm_(x, y, alpha=-1)
        return
    left, columns = _left(x), max(256, RESULT // len(x) // 256 * 256)
    for first in range(0, y.shape[1], columns):
        w[:, first : first + columns] -= _multiply(left, y[:, first : first + columns])


def _part(count: int, size: int) -> int:
    """How many of `count` rows of `size` numbers are split at a time."""
    return count if count * size <= PIECE else max(256, PIECE // size // 256 * 256)


def _left(x: Tensor) -> Tensor:
    high, low = split(x)
    return torch.cat((high, low, high), 1)


def _multiply(left: Tensor, y: Tensor) -> Tensor:
    high, low = split(y)
    return torch.mm(left, torch.cat((high, high, low), 0), out_dtype=torch.float32)
