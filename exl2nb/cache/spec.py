"""The size of a KV cache as plain, checked data. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass

from exl2nb.cache.storage import STORAGES
from exl2nb.core.errors import OptionError

PAGE_SIZE = 256  # tokens; the attention kernels walk whole pages


@dataclass(frozen=True)
class CacheSpec:
    """Shape of the cache: `num_pages` pages of `page_size` tokens for `num_layers` layers of `num_kv_heads` heads of `head_dim`.

    mode: how a number is stored, one of `cache/storage/`.

    Raises:
        OptionError: an unknown mode, or a number that is not a positive integer in range.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    mode: str = "fp16"
    page_size: int = PAGE_SIZE

    def __post_init__(self) -> None:
        limits = {"num_layers": 1024, "num_kv_heads": 1024, "head_dim": 256, "num_pages": 1 << 23, "page_size": PAGE_SIZE}
        for name, high in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise OptionError(f"cache: {name} is {value!r}; expected an integer from 1 to {high}")
        STORAGES[self.mode]  # an unknown mode is refused here, before anything is allocated

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_pages * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V of all layers."""
        numbers = 2 * self.num_layers * self.num_kv_heads * self.page_size * self.head_dim
        return numbers * STORAGES[self.mode].bits // 8

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_pages * self.page_bytes
