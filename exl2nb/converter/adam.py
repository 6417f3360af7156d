"""Adam for what learns in a quantised model: each tensor goes a given distance at most. Knows nothing of models or losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FIRST, SECOND = 0.9, 0.99  # decay of the moments
WARM_UP = 0.05  # of the way


class Adam:
    """Tensors that learn, and their moments.

    Args:
        learning: tensors, and how far the numbers of each go if every gradient points the same way and all shares add up to 1: a number,
            or a tensor that broadcasts to them. They require gradients from now on.
    """

    def __init__(self, learning: Sequence[tuple[Tensor, Tensor | float]]) -> None:
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
            first = self.first[at].lerp_(gradient, 1 - FIRST)
            second = self.second[at].mul_(SECOND).addcmul_(gradient, gradient, value=1 - SECOND)
            size = (second * self._second_rate).sqrt_().add_(1e-20)
            self.learning[at].sub_(first / size * (self._first_rate * self._travel[at]))


def shares(steps: int) -> list[float]:
    """How much of the way each step goes: a short warm-up, then a cosine to zero; they add up to 1."""
    raw = [min(1.0, (at + 1) / (1 + WARM_UP * steps)) * (1 + math.cos(math.pi * at / steps)) for at in range(steps)]
    return [value / sum(raw) for value in raw]
