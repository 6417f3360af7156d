"""Taking out of logits what a bit mask does not allow."""

from __future__ import annotations

import torch
from torch import Tensor

from exl2nb.ops import reference
from exl2nb.ops._library import check, define


def _mask_logits(logits: Tensor, bits: Tensor) -> Tensor:
    check(logits.dtype == torch.float32 and logits.dim() == 1, "mask_logits", "logits", (logits.dtype, tuple(logits.shape)), "f32 (V,)")
    wanted = (-(-logits.shape[0] // 32),)
    fits = bits.dtype == torch.int32 and tuple(bits.shape) == wanted
    check(fits, "mask_logits", "bits", (bits.dtype, tuple(bits.shape)), f"int32 {wanted}")
    return reference.mask_logits(logits, bits)


_mask_logits_op = define(
    "mask_logits(Tensor logits, Tensor bits) -> Tensor",
    fake=lambda logits, bits: torch.empty_like(logits),
    reference=_mask_logits,
)


def mask_logits(logits: Tensor, bits: Tensor) -> Tensor:
    """Logits f32 `(V,)` with -inf for every token whose bit is not set -> f32 `(V,)`.

    Args:
        logits: not changed.
        bits: int32 `(ceil(V / 32),)`: token i is bit i % 32, the lowest first, of word i // 32.

    Example:
        >>> mask_logits(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0b101], dtype=torch.int32)).tolist()
        [1.0, -inf, 3.0]
    """
    return _mask_logits_op(logits, bits)
