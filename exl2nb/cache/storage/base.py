"""The table of cache modes, and the kind that stores plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.core.registry import Registry


@dataclass(frozen=True)
class PlainStorage:
    """One tensor of `dtype` per pool; `bits` per number."""

    dtype: torch.dtype
    bits: int

    def allocate(self, shape: tuple[int, ...], device: str) -> Tensor:
        """A zeroed pool: unread slots hold zeros, never NaN, so a masked product stays finite."""
        return torch.zeros(shape, dtype=self.dtype, device=device)


STORAGES: Registry[PlainStorage] = Registry("cache mode", OptionError)
