"""What every layer of one forward step shares."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.model.batch import Batch


class Step(NamedTuple):
    """The batch, the cache it reads and writes, and the RoPE tables f32 `(positions, rotary_dim/2)`."""

    batch: Batch
    cache: KVCache
    cos: Tensor
    sin: Tensor
