"""Min-p: a floor relative to the most probable token."""

from __future__ import annotations

from torch import Tensor


def min_p(logits: Tensor, share: float) -> Tensor:
    """Remove tokens less probable than `share` times the most probable one.

    Args:
        logits: f32 `(..., V)`.
        share: 0 to 1.

    Returns:
        A copy with -inf where a token is removed; the most probable one always stays.
    """
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < share * probs.amax(dim=-1, keepdim=True), float("-inf"))
