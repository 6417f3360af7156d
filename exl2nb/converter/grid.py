"""What learns in a quantised model: EXL2 matrices as the loader will compute them, and Adam for their codes and scales. Knows no files.

Every code has a latent value of which it is the nearest whole number. The forward pass rounds as the format does; the backward pass takes
rounding for the identity (straight-through) and stops at the ends of the grid. A latent value begins near the middle of its cell, moved by
LATENT_SPREAD towards the dense weight: a code changes only after a quarter of a step or more of consistent gradients. At the weight itself
codes near an edge flip by noise (demo model, 3 bits, 1600 rows once: KL 0.133 before, 0.144 so, 0.115 from the middle); exactly in the
middle all codes with clear gradients flip in the same step, which is too much at once (tiny model of the tests, 3 bits: 0.117 before, 0.087
from the middle, 0.061 with this spread).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exl2nb.quant.exl2 import Exl2Tensors, encode

LATENT_SPREAD = 0.5  # of the cell, in whose middle latent values begin
MAX_STACK_NUMBERS = 1 << 24  # numbers of matrices that learn as one tensor: a few large operations in place of many small ones


class _Reconstruct(torch.autograd.Function):
    """`(..., N, K)` weights of latent codes and of the largest step of each group."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, scale_max: Tensor, table: _Table) -> Tensor:
        step = table.by_row(table.steps(scale_max))
        codes = table.rounded(latent)
        ctx.table = table
        ctx.save_for_backward(latent, step, codes)
        return (codes * step).half().float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (latent, step, codes), table = gradients, ctx.saved_tensors, ctx.table
        to_latent = to_scale = None
        if ctx.needs_input_grad[0]:
            to_latent = gradient * step * ((latent >= table.low - 0.5) & (latent <= table.high + 0.5))
        if ctx.needs_input_grad[1]:  # a product instead of a scattered sum: the same bits every time
            to_scale = (((gradient * codes) @ table.members) * table.squares).sum(-2) / 256
        return to_latent, to_scale, None


class _Table(ABC):
    """What codes and scales of one or more matrices `(..., N, K)` mean, with G groups.

    latent: f32 `(..., N, K)`. scale_max: f32 `(..., G)`. rows: int64, of which group each row is, low and high: f32, the ends of the grid,
    all three such that they broadcast along K. members: f32 `(..., K, G)`, 1 where a row is of a group. squares: f32 `(..., N, G)`. most:
    f32 `(..., G)`, of a scale: the largest weight of its group stays finite.
    """

    latent: Tensor
    scale_max: Tensor
    rows: Tensor
    low: Tensor
    high: Tensor
    members: Tensor
    squares: Tensor
    most: Tensor

    @abstractmethod
    def by_row(self, steps: Tensor) -> Tensor:
        """f32 `(..., N, K)` of `(..., N, G)`."""

    def steps(self, scale_max: Tensor) -> Tensor:
        """f32 `(..., N, G)`, rounded to fp16 where `Exl2Tensors.steps` does."""
        unit = (self.stored(scale_max).float() / 256).half().float()
        return (self.squares * unit[..., None, :]).half().float()

    def stored(self, scale_max: Tensor) -> Tensor:
        """f16, as the file has it."""
        return torch.minimum(scale_max.clamp_min(0), self.most).half()

    def rounded(self, latent: Tensor) -> Tensor:
        """Codes less their zero level, f32 `(..., N, K)`."""
        return torch.minimum(torch.maximum(latent.round(), self.low), self.high)

    def weight(self) -> Tensor:
        """What the loader will compute with, f32 `(..., N, K)`; differentiable."""
        return _Reconstruct.apply(self.latent, self.scale_max, self)  # type: ignore[no-any-return]


class Grid(_Table):
    """Codes and scales of one matrix, K inputs, N outputs without padding, G groups, as tensors that learn.

    latent: f32 `(N, K)` in original row order, codes less their zero level before rounding. scale_max: f32 `(G,)`. bias: f32 `(N,)`, or
    None. The 4-bit scale indices stay: a change of one moves a whole column of a group by more than a gradient knows of.

    Args:
        packed: the matrix to begin with.
        out_features: N.
        device: where it learns.
        dense: f32 `(N, K)`, what the matrix stands for: a latent value begins on that side of the middle on which the weight is.
    """

    def __init__(self, packed: Exl2Tensors, out_features: int, device: torch.device, dense: Tensor | None = None) -> None:
        self._invperm, self._groups = packed.q_invperm.long(), packed.groups
        self._index = packed.scale_index()[:, :out_features].contiguous()
        half = torch.tensor([1 << (bits - 1) for bits, _ in self._groups], dtype=torch.float32)
        sizes = torch.tensor([rows for _, rows in self._groups])
        group = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[self._invperm]
        self.rows, self.low, self.high = group.to(device), -half[group].to(device), half[group].to(device) - 1
        self.members = torch.nn.functional.one_hot(group, len(sizes)).float().to(device)
        self.squares = (self._index.T.float() + 1).square().to(device)
        self.most = (65000 / half).to(device)
        self.scale_max = packed.q_scale_max.float().to(device)
        self.latent = packed.codes()[self._invperm, :out_features].T.float().to(device) + self.low
        self.bias = None if packed.bias is None else packed.bias[:out_features].float().to(device)
        if dense is not None:
            step = self.by_row(self.steps(self.scale_max))
            apart = torch.where(step > 0, dense.to(device) / step - self.latent, 0)
            self.latent += LATENT_SPREAD * apart.clamp(-0.5, 0.5)

    def by_row(self, steps: Tensor) -> Tensor:
        """f32 `(N, K)` of `(N, G)`."""
        return steps[:, self.rows]

    def keep(self) -> dict[str, Tensor]:
        """What the files will hold of it now, on the CPU: int8 `codes` `(N, K)`, f16 `scale_max` and `bias`."""
        codes, scale_max = self.rounded(self.latent.detach()).to(torch.int8).cpu(), self.stored(self.scale_max.detach()).cpu()
        bias = {} if self.bias is None else {"bias": self.bias.detach().half().cpu()}
        return {"codes": codes, "scale_max": scale_max, **bias}

    def packed(self, kept: Mapping[str, Tensor]) -> Exl2Tensors:
        """The matrix as it is stored, on the CPU, of what `keep` gave."""
        perm = torch.argsort(self._invperm)
        codes = (kept["codes"].float() - self.low.cpu()).to(torch.uint8).T[perm].contiguous()
        return encode(codes, self._index, kept["scale_max"], self._groups, perm, bias=kept.get("bias"))


class Stack(_Table):
    """Matrices of one shape as one tensor that learns, `(M, N, K)`; grids with fewer groups than others have some without rows.

    The grids' own latent values and scales are parts of it from then on.
    """

    def __init__(self, grids: Sequence[Grid]) -> None:
        self.latent, self.squares, self.members, self.scale_max, self.most = (
            _stack_padded([getattr(grid, name) for grid in grids]) for name in ("latent", "squares", "members", "scale_max", "most")
        )
        self.rows, self.low, self.high = (torch.stack([getattr(grid, name) for grid in grids])[:, None] for name in ("rows", "low", "high"))
        for at, grid in enumerate(grids):
            groups = len(grid.scale_max)
            grid.latent, grid.scale_max = self.latent[at], self.scale_max[at, :groups]
            grid.squares, grid.members = self.squares[at, :, :groups], self.members[at, :, :groups]

    def by_row(self, steps: Tensor) -> Tensor:
        """f32 `(M, N, K)` of `(M, N, G)`."""
        return steps.gather(2, self.rows.expand(self.latent.shape))


def _stack_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors that differ at most in their last size, the shorter ones with zeros at the end."""
    most = max(tensor.shape[-1] for tensor in tensors)
    return torch.stack([torch.nn.functional.pad(tensor, (0, most - tensor.shape[-1])) for tensor in tensors])


def stack_grids(grids: Mapping[str, Grid]) -> list[tuple[list[str], Stack]]:
    """All grids, those of one shape together as long as they are small, and their keys."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for key, grid in grids.items():
        alike.setdefault(tuple(grid.latent.shape), []).append(key)
    found = []
    for (rows, columns), keys in alike.items():
        many = max(1, MAX_STACK_NUMBERS // (rows * columns))
        for first in range(0, len(keys), many):
            part = keys[first : first + many]
            found.append((part, Stack([grids[key] for key in part])))
    return found


def round_through_f16(tensor: Tensor) -> Tensor:
    """Rounded to f16, with the gradient of what it was."""
    return tensor + (tensor.detach().half().float() - tensor.detach())


def loaded_tensors(
    grids: Mapping[str, Grid], vectors: Mapping[str, Tensor], stacked: Iterable[tuple[list[str], Stack]] = ()
) -> dict[str, Tensor]:
    """All tensors as the file will hold them, by name, f32; differentiable. grids: by the key of their linear. stacked: of
    `stack_grids`.
    """
    made = {name: round_through_f16(tensor) for name, tensor in vectors.items()}
    weights = {key: weight for keys, stack in stacked for key, weight in zip(keys, stack.weight().unbind())}
    for key, grid in grids.items():
        made[f"{key}.weight"] = weights[key] if key in weights else grid.weight()
        if grid.bias is not None:
            made[f"{key}.bias"] = round_through_f16(grid.bias)
    return made


FIRST_MOMENT_DECAY = 0.9  # where the caller gives none
SECOND_MOMENT_DECAY = 0.99
WARM_UP = 0.05  # of the way
ADAM_EPS = 1e-20
_many: Any = torch  # its operations on many tensors at once have no types
FUSED_TENSOR_NUMBERS = 1 << 16  # numbers of a tensor that goes together with others: a kernel for all of them


class Adam:
    """Adam for what learns in a quantised model: each tensor goes a given distance at most.

    Adam divides a gradient by its own size, so a number that hardly matters goes as far on noise as
    one that matters. For millions of codes, each with little evidence, that is too much, so the
    numbers that are pooled are damped together. With second moment v, its mean m over all pooled
    numbers and damping d, their gradient is divided by (v + d m) / ((1 + d) sqrt(m)) instead of
    sqrt(v): the same at v = m and at v = d^2 m, a shorter step where v is above the larger or below
    the smaller of them, a longer one in between. With v as the curvature, and noise in proportion
    to it, this is the step of a Wiener filter: the more gradients there will be, the lower the best
    damping.

    Args:
        learning: tensors, and how far the numbers of each go if every gradient points the same way and all shares add up to 1: a number,
            or a tensor that broadcasts to them. They require gradients from now on.
        pooled: how many of them, from the first on, are pooled.
        decay: of the first moment.
        damping: of those pooled, as a share of their mean second moment.
    """

    def __init__(
        self, learning: Sequence[tuple[Tensor, Tensor | float]], pooled: int = 0, decay: float = FIRST_MOMENT_DECAY, damping: float = 1.0
    ) -> None:
        self._pooled, self._decay, self._damping = pooled, decay, damping
        self.learning = [tensor.requires_grad_(True) for tensor, _ in learning]
        self._travel = [far for _, far in learning]
        self.first, self.second = ([torch.zeros_like(one) for one in self.learning] for _ in range(2))
        place = self.learning[0].device if self.learning else None
        self._first_rate, self._second_rate = torch.ones(2, device=place)  # on the device: a step can be recorded
        small = [at for at in range(pooled, len(learning)) if self.learning[at].numel() <= FUSED_TENSOR_NUMBERS]
        self._together = [[at for at in small if isinstance(self._travel[at], Tensor) == own] for own in (False, True)]
        self._alone = [at for at in range(len(learning)) if at not in set(small)]

    def pace(self, step: int, share: float) -> None:
        """Say which step comes next, counted from 0, and how much of the way it is."""
        self._first_rate.fill_(share / (1 - self._decay ** (step + 1)))
        self._second_rate.fill_(1 / (1 - SECOND_MOMENT_DECAY ** (step + 1)))

    def move(self, gradients: Sequence[Tensor]) -> None:
        """One step."""
        _many._foreach_lerp_(self.first, list(gradients), 1 - self._decay)
        _many._foreach_mul_(self.second, SECOND_MOMENT_DECAY)
        _many._foreach_addcmul_(self.second, list(gradients), list(gradients), value=1 - SECOND_MOMENT_DECAY)
        mean, damping = self._mean(), self._damping
        for at in self._alone:
            size = self.second[at] * self._second_rate
            size = size.add_(damping * mean).div_((1 + damping) * mean.sqrt() + ADAM_EPS) if at < self._pooled else size.sqrt_()
            self.learning[at].sub_((self.first[at] / size.add_(ADAM_EPS)).mul_(self._first_rate * self._travel[at]))
        for group in filter(None, self._together):
            sizes = _many._foreach_mul([self.second[at] for at in group], self._second_rate)
            _many._foreach_sqrt_(sizes)
            _many._foreach_add_(sizes, ADAM_EPS)
            moves = _many._foreach_div([self.first[at] for at in group], sizes)
            _many._foreach_mul_(moves, self._first_rate)
            _many._foreach_mul_(moves, [self._travel[at] for at in group])
            _many._foreach_sub_([self.learning[at] for at in group], moves)

    def _mean(self) -> Tensor:
        """Of the second moments of what is pooled; 0 where nothing is."""
        pooled = self.second[: self._pooled]
        total = sum((moment.sum() for moment in pooled), torch.zeros_like(self._second_rate))
        return total / max(1, sum(moment.numel() for moment in pooled)) * self._second_rate


def learning_rate_shares(steps: int, power: float = 1) -> list[float]:
    """How much of the way each step goes: a short warm-up, then a cosine to zero, to that power; they add up to 1."""
    raw = [min(1.0, (at + 1) / (1 + WARM_UP * steps)) * (1 + math.cos(math.pi * at / steps)) ** power for at in range(steps)]
    return [value / sum(raw) for value in raw]
