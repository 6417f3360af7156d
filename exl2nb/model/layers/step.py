"""What every layer of one forward step shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.model.batch import Batch


class Step(NamedTuple):
    """The batch, the cache it reads and writes, and per kind of RoPE its tables (cos, sin), f32 `(positions, rotary_dim/2)`."""

    batch: Batch
    cache: KVCache
    ropes: Mapping[str, tuple[Tensor, Tensor]]
