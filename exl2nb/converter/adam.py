"""Adam for what learns in a quantised model: each tensor goes a given distance at most. Knows nothing of models or losses.

Adam divides a gradient by its own size, so a number that hardly matters goes as far on noise as one that matters. For millions of codes,
each with little evidence, that is too much: numbers that are pooled share a floor. With second moment v and its mean m over all pooled
numbers, their gradient is divided by (v + m) / 2 sqrt(m) instead of sqrt(v): the same where v = m, and never more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FIRST, SECOND = 0.9, 0.99  # decay of the moments
WARM_UP = 0.05  # of the way
TINY = 1e-20


class Adam:
    """Tensors that learn, and their moments.

    Args:
        learning: tensors, and how far the numbers of each go if every gradient points the same way and all shares add up to 1: a number,
            or a tensor that broadcasts to them. They require gradients from now on.
        pooled: how many of them, from the first on, are pooled.
    """

    def __init__(self, learning: Sequence[tuple[Tensor, Tensor | float]], pooled: int = 0) -> None:
        self._pooled = pooled
        self.learning = [tensor.requires_grad_(True) for tensor, _ in learning]
        self._travel = [far for _, far in learning]
        self.first, self.second = ([torch.zeros_like(one) for one in self.learning] for _ in range(2))
        place = self.learning[0].device if self.learning else None
        self._first_rate, self._second_rate = torch.ones(2, device=place)  # on the device: a step can be recorded

    def pace(self, step: int, share: float) -> None:
        """Say which step comes next, counted from 0, and how much of the way it is."""
        self._first_rate.fill_(share / (1 - FIRST ** (step + 1)))
        self._second_rate.fill_(1 / (1 - SECOND ** (step + 1)))

    def move(self, gradients: Sequence[Tensor]) -> None:
        """One step."""
        for at, gradient in enumerate(gradients):
            self.first[at].lerp_(gradient, 1 - FIRST)
            self.second[at].mul_(SECOND).addcmul_(gradient, gradient, value=1 - SECOND)
        mean = self._mean()
        for at, learning in enumerate(self.learning):
            size = self.second[at] * self._second_rate
            size = size.add_(mean).div_(2 * mean.sqrt() + TINY) if at < self._pooled else size.sqrt_()
            learning.sub_(self.first[at] / size.add_(TINY) * (self._first_rate * self._travel[at]))

    def _mean(self) -> Tensor:
        """Of the second moments of what is pooled; 0 where nothing is."""
        pooled = self.second[: self._pooled]
        total = sum((moment.sum() for moment in pooled), torch.zeros_like(self._second_rate))
        return total / max(1, sum(moment.numel() for moment in pooled)) * self._second_rate


def shares(steps: int) -> list[float]:
    """How much of the way each step goes: a short warm-up, then a cosine to zero; they add up to 1."""
    raw = [min(1.0, (at + 1) / (1 + WARM_UP * steps)) * (1 + math.cos(math.pi * at / steps)) for at in range(steps)]
    return [value / sum(raw) for value in raw]
