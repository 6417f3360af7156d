"""Random GPTQ matrices as op arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.ops import reference


@dataclass(frozen=True)
class Case:
    """Arguments of `ops.pack_gptq` and the f32 matrix `(K, N)` they mean."""

    arguments: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
    bits: int
    weight: Tensor

    def pack(self) -> Tensor:
        """The blob."""
        return ops.pack_gptq(*self.arguments, bits=self.bits, in_features=len(self.weight))


def gptq(K: int, N: int, bits: int, size: int, *, act_order: bool = False, zeros: bool = True, wide: bool = False, seed: int = 0) -> Case:
    """Groups of `size` rows, the last one shorter; act_order scatters them; groups that are no whole units are padded."""
    g = torch.Generator().manual_seed(seed)
    groups = -(-K // size)
    group_of = torch.arange(K) // size
    if act_order:
        group_of = group_of[torch.randperm(K, generator=g)]
    qweight = torch.randint(-(2**31), 2**31, (K * bits // 32, N), generator=g, dtype=torch.int64).to(torch.int32)
    scales = (0.5 + torch.rand(groups, N, generator=g)) / 2**bits
    scales = scales if wide else scales.half()
    zero = torch.randint(0, 2**bits + 1, (groups, N), generator=g).short() if zeros else None
    members = [(group_of == i).nonzero()[:, 0] for i in range(groups)]
    padded = [torch.nn.functional.pad(rows, (0, -len(rows) % 32), value=K) for rows in members]
    perm = torch.cat(padded).to(torch.int32)
    sizes = torch.tensor([len(rows) for rows in padded], dtype=torch.int32)
    codes = reference.codes(qweight, torch.tensor([bits, 0], dtype=torch.int16), K)[0].float()
    middle = torch.full((groups, N), 2.0 ** (bits - 1)) if zero is None else zero.float()
    weight = (codes - middle[group_of]) * scales.float()[group_of]
    identity = torch.equal(perm.long(), torch.arange(K))
    return Case((qweight, scales, zero, None if identity else perm, sizes), bits, weight)
