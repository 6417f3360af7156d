"""Classifier-free guidance: a second, negative prompt runs in step, and what it says is taken away from what the first one says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from exl2nb.generator.group import Group
from exl2nb.generator.request import Request
from exl2nb.generator.sequence import Sequence
from exl2nb.tokenizer.tokenizer import Tokenizer


def guided(positive: np.ndarray, negative: np.ndarray, scale: float) -> np.ndarray:
    """Mix two rows of logits: `n + scale * (p - n)` of their log probabilities p and n.

    Args:
        positive, negative: f32 `(V,)`, raw logits.
        scale: 1 leaves the positive one, more moves away from the negative one.

    Source: Sanchez et al., "Stay on topic with Classifier-Free Guidance", 2023; as in Transformers.
    """
    p, n = _log_softmax(positive), _log_softmax(negative)
    return (n + np.float32(scale) * (p - n)).astype(np.float32)


class Guided(Group):
    """The positive sequence draws, the negative one follows with the same tokens."""

    def __init__(self, positive: Sequence, negative: Sequence) -> None:
        super().__init__([positive, negative])

    @classmethod
    def of(cls, request: Request, tokenizer: Tokenizer, *, context: int) -> Sequence:
        """The two sequences of a request; returns the leader.

        The longer prompt decides how much room the context leaves.
        """
        positive = Sequence(request, tokenizer, context=context)
        plain = {"negative_ids": (), "cfg_scale": 1.0, "token_healing": False, "structure": None}
        negative = Sequence(replace(request, prompt_ids=request.negative_ids, **plain), tokenizer, context=context)
        positive.limit = negative.limit = min(positive.limit, negative.limit)
        cls(positive, negative)
        return positive

    def step(self, rows: list[np.ndarray]) -> str | None:
        """Draw one token from the mix; both go on with it."""
        positive, negative = self.members
        reason = positive.take_rows([guided(rows[0], rows[1], positive.request.cfg_scale)])
        new = positive.ids[positive.prompt_tokens :]
        kept = negative.prompt_tokens + len(new) - 1
        del negative.ids[max(negative.prompt_tokens, kept) :]
        negative.ids += new[len(negative.ids) - negative.prompt_tokens :]
        negative.computed = min(negative.computed, len(negative.ids) - 1)
        return reason


def _log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float64))
