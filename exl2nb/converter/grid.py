"""One EXL2 matrix while it learns: weights as the loader will compute them, gradients to codes and scales. Knows nothing of files.

Every code has a latent value of which it is the nearest whole number. The forward pass rounds as the format does; the backward pass takes
rounding for the identity (straight-through) and stops at the ends of the grid. A latent value begins near the middle of its cell, moved by
SPREAD towards the dense weight: a code changes only after a quarter of a step or more of consistent gradients. At the weight itself codes
near an edge flip by noise (demo model, 3 bits, 1600 rows once: KL 0.133 before, 0.144 so, 0.115 from the middle); exactly in the middle
all codes with clear gradients flip in the same step, which is too much at once (tiny model of the tests, 3 bits: 0.117 before, 0.087 from
the middle, 0.061 with this spread).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exl2nb.quant.exl2 import Exl2Tensors, encode

SPREAD = 0.5  # of the cell, in whose middle latent values begin


class _Reconstruct(torch.autograd.Function):
    """`(N, K)` weights of latent codes and of the largest step of each group."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, scale_max: Tensor, grid: Grid) -> Tensor:
        step = grid.steps(scale_max)[:, grid.rows]
        codes = grid.rounded(latent)
        ctx.grid = grid
        ctx.save_for_backward(latent, step, codes)
        return (codes * step).half().float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (latent, step, codes), grid = gradients, ctx.saved_tensors, ctx.grid
        to_latent = to_scale = None
        if ctx.needs_input_grad[0]:
            to_latent = gradient * step * ((latent >= grid.low - 0.5) & (latent <= grid.high + 0.5))
        if ctx.needs_input_grad[1]:  # a product instead of a scattered sum: the same bits every time
            to_scale = (((gradient * codes) @ grid.members) * grid.squares).sum(0) / 256
        return to_latent, to_scale, None


class Grid:
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
        self._most = (65000 / half).to(device)  # of a scale: the largest weight of its group stays finite
        self.scale_max = packed.q_scale_max.float().to(device)
        self.latent = packed.codes()[self._invperm, :out_features].T.float().to(device) + self.low
        self.bias = None if packed.bias is None else packed.bias[:out_features].float().to(device)
        if dense is not None:
            step = self.steps(self.scale_max)[:, self.rows]
            apart = torch.where(step > 0, dense.to(device) / step - self.latent, 0)
            self.latent += SPREAD * apart.clamp(-0.5, 0.5)

    def steps(self, scale_max: Tensor) -> Tensor:
        """f32 `(N, G)`, rounded to fp16 where `Exl2Tensors.steps` does."""
        unit = (self._stored(scale_max).float() / 256).half().float()
        return (self.squares * unit).half().float()

    def _stored(self, scale_max: Tensor) -> Tensor:
        return torch.minimum(scale_max.clamp_min(0), self._most).half()

    def rounded(self, latent: Tensor) -> Tensor:
        """Codes less their zero level, f32 `(N, K)`."""
        return torch.minimum(torch.maximum(latent.round(), self.low), self.high)

    def weight(self) -> Tensor:
        """What the loader will compute with, f32 `(N, K)`; differentiable."""
        return _Reconstruct.apply(self.latent, self.scale_max, self)  # type: ignore[no-any-return]

    def keep(self) -> dict[str, Tensor]:
        """What the files will hold of it now, on the CPU: int8 `codes` `(N, K)`, f16 `scale_max` and `bias`."""
        codes, scale_max = self.rounded(self.latent.detach()).to(torch.int8).cpu(), self._stored(self.scale_max.detach()).cpu()
        bias = {} if self.bias is None else {"bias": self.bias.detach().half().cpu()}
        return {"codes": codes, "scale_max": scale_max, **bias}

    def packed(self, kept: Mapping[str, Tensor]) -> Exl2Tensors:
        """The matrix as it is stored, on the CPU, of what `keep` gave."""
        perm = torch.argsort(self._invperm)
        codes = (kept["codes"].float() - self.low.cpu()).to(torch.uint8).T[perm].contiguous()
        return encode(codes, self._index, kept["scale_max"], self._groups, perm, bias=kept.get("bias"))


def through_f16(tensor: Tensor) -> Tensor:
    """Rounded to f16, with the gradient of what it was."""
    return tensor + (tensor.detach().half().float() - tensor.detach())


def loaded(grids: Mapping[str, Grid], vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors as the file will hold them, by name, f32; differentiable. grids: by the key of their linear."""
    made = {name: through_f16(tensor) for name, tensor in vectors.items()}
    for key, grid in grids.items():
        made[f"{key}.weight"] = grid.weight()
        if grid.bias is not None:
            made[f"{key}.bias"] = through_f16(grid.bias)
    return made
