"""Adam for what learns in a quantised model: each tensor goes a given distance at most. Knows nothing of models or losses.

Adam divides a gradient by its own size, so a number that hardly matters goes as far on noise as one that matters. For millions of codes,
each with little evidence, that is too much, so the numbers that are pooled are damped together. With second moment v, its mean m over all
pooled numbers and damping d, their gradient is divided by (v + d m) / ((1 + d) sqrt(m)) instead of sqrt(v): the same at v = m and at
v = d^2 m, a shorter step where v is above the larger or below the smaller of them, a longer one in between. With v as the curvature, and
noise in proportion to it, this is the step of a Wiener filter: the more gradients there will be, the lower the best damping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FIRST, SECOND = 0.9, 0.99  # decay of the moments, if not told
WARM_UP = 0.05  # of the way
TINY = 1e-20
_many: Any = torch  # its operations on many tensors at once have no types
SMALL = 1 << 16  # numbers of a tensor that goes together with others: a kernel for all of them


class Adam:
    """Tensors that learn, and their moments.

    Args:
        learning: tensors, and how far the numbers of each go if every gradient points the same way and all shares add up to 1: a number,
            or a tensor that broadcasts to them. They require gradients from now on.
        pooled: how many of them, from the first on, are pooled.
        decay: of the first moment.
        damping: of those pooled, as a share of their mean second moment.
    """

    def __init__(
        self, learning: Sequence[tuple[Tensor, Tensor | float]], pooled: int = 0, decay: float = FIRST, damping: float = 1.0
    ) -> None:
        self._pooled, self._decay, self._damping = pooled, decay, damping
        self.learning = [tensor.requires_grad_(True) for tensor, _ in learning]
        self._travel = [far for _, far in learning]
        self.first, self.second = ([torch.zeros_like(one) for one in self.learning] for _ in range(2))
        place = self.learning[0].device if self.learning else None
        self._first_rate, self._second_rate = torch.ones(2, device=place)  # on the device: a step can be recorded
        small = [at for at in range(pooled, len(learning)) if self.learning[at].numel() <= SMALL]
        self._together = [[at for at in small if isinstance(self._travel[at], Tensor) == own] for own in (False, True)]
        self._alone = [at for at in range(len(learning)) if at not in set(small)]

    def pace(self, step: int, share: float) -> None:
        """Say which step comes next, counted from 0, and how much of the way it is."""
        self._first_rate.fill_(share / (1 - self._decay ** (step + 1)))
        self._second_rate.fill_(1 / (1 - SECOND ** (step + 1)))

    def move(self, gradients: Sequence[Tensor]) -> None:
        """One step."""
        _many._foreach_lerp_(self.first, list(gradients), 1 - self._decay)
        _many._foreach_mul_(self.second, SECOND)
        _many._foreach_addcmul_(self.second, list(gradients), list(gradients), value=1 - SECOND)
        mean, damping = self._mean(), self._damping
        for at in self._alone:
            size = self.second[at] * self._second_rate
            size = size.add_(damping * mean).div_((1 + damping) * mean.sqrt() + TINY) if at < self._pooled else size.sqrt_()
            self.learning[at].sub_((self.first[at] / size.add_(TINY)).mul_(self._first_rate * self._travel[at]))
        for group in filter(None, self._together):
            sizes = _many._foreach_mul([self.second[at] for at in group], self._second_rate)
            _many._foreach_sqrt_(sizes)
            _many._foreach_add_(sizes, TINY)
            moves = _many._foreach_div([self.first[at] for at in group], sizes)
            _many._foreach_mul_(moves, self._first_rate)
            _many._foreach_mul_(moves, [self._travel[at] for at in group])
            _many._foreach_sub_([self.learning[at] for at in group], moves)

    def _mean(self) -> Tensor:
        """Of the second moments of what is pooled; 0 where nothing is."""
        pooled = self.second[: self._pooled]
        total = sum((moment.sum() for moment in pooled), torch.zeros_like(self._second_rate))
        return total / max(1, sum(moment.numel() for moment in pooled)) * self._second_rate


def shares(steps: int, power: float = 1) -> list[float]:
    """How much of the way each step goes: a short warm-up, then a cosine to zero, to that power; they add up to 1."""
    raw = [min(1.0, (at + 1) / (1 + WARM_UP * steps)) * (1 + math.cos(math.pi * at / steps)) ** power for at in range(steps)]
    return [value / sum(raw) for value in raw]
