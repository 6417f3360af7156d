"""Top-k: the k most probable tokens."""

from __future__ import annotations

from torch import Tensor


def top_k(logits: Tensor, k: int) -> Tensor:
    """Remove every token whose logit is below the k-th largest; tokens equal to it stay, so ties may keep more than k.

    Args:
        logits: f32 `(..., V)`.
        k: at least 1; more than V keeps all.

    Returns:
        A copy with -inf where a token is removed.
    """
    assert k >= 1, k
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, float("-inf"))
