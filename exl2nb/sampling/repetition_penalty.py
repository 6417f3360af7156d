"""Repetition penalty: tokens that were there before become less likely."""

from __future__ import annotations

import torch
from torch import Tensor


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of seen tokens by `penalty`, once per token however often it was seen.

    Args:
        logits: f32 `(..., V)`.
        seen: int64 `(..., n)` token ids of prompt and text so far; repeats do not matter.
        penalty: above 1 discourages, below 1 encourages.
    """
    values = logits.gather(-1, seen)
    return logits.scatter(-1, seen, torch.where(values < 0, values * penalty, values / penalty))
