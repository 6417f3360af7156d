"""Top-p (nucleus): the smallest set of most probable tokens that reaches probability p."""

from __future__ import annotations

from torch import Tensor


def top_p(logits: Tensor, p: float, *, removed: float = 0.0) -> Tensor:
    """Remove the least probable tokens as long as their total stays at or below 1 - p; the token that crosses p is kept.

    Args:
        logits: f32 `(..., V)`.
        p: more than 0, at most 1.
        removed: probability of less probable tokens that `narrow` has left out already; counts as removed.

    Returns:
        A copy with -inf where a token is removed; at least the most probable one stays.

    Example:
        >>> import torch
        >>> top_p(torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), 0.6).isfinite().tolist()
        [True, True, False, False]
    """
    values, order = logits.sort(dim=-1)
    below = values.softmax(dim=-1).mul_(1.0 - removed).cumsum(dim=-1).add_(removed)
    drop = below <= 1.0 - p
    drop[..., -1] = False
    return logits.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
