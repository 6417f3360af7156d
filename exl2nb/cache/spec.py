"""The size of a KV cache as plain, checked data. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass

from exl2nb.cache.modes import parse_mode, storages_of
from exl2nb.cache.storage import STORAGES
from exl2nb.core.errors import OptionError

PAGE_SIZE = 256  # tokens; the attention kernels walk whole pages


@dataclass(frozen=True)
class CacheSpec:
    """Shape of the cache: `num_pages` pages of `page_size` tokens for `num_layers` layers of `num_kv_heads` heads of `head_dim`.

    mode: how the numbers are stored, a name that `cache.modes.parse_mode` takes: fp32, fp16, fp8, q8, q6 (K in 8 bits, V in 4), q4, or bits
        of K and V apart as "k8v4". Two names of one thing become the same name.

    Raises:
        OptionError: an unknown mode, one that cannot store heads of this size, or a number that is not a positive integer in range.

    Example:
        >>> spec = CacheSpec(32, 8, 128, 16, "k8v4")
        >>> spec.mode, spec.k_mode, spec.v_mode, spec.bits, spec.page_bytes
        ('q6', 'q8', 'q4', 6.5, 13631488)
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
        object.__setattr__(self, "mode", parse_mode(self.mode))
        for kind in (self.k_mode, self.v_mode):
            problem = STORAGES[kind].problem(self.page_size, self.head_dim)
            if problem:
                raise OptionError(f"cache: mode {self.mode} {problem}; use fp16")

    @property
    def k_mode(self) -> str:
        """How K is stored, a key of `storage.STORAGES`."""
        return storages_of(self.mode)[0]

    @property
    def v_mode(self) -> str:
        """How V is stored."""
        return storages_of(self.mode)[1]

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_pages * self.page_size

    @property
    def bits(self) -> float:
        """Bits a number on average, scales included."""
        return 8 * self.page_bytes / (2 * self.num_layers * self.num_kv_heads * self.page_size * self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V of all layers."""
        return self.num_layers * (self.pool_bytes(self.k_mode) + self.pool_bytes(self.v_mode)) // self.num_pages

    def pool_bytes(self, mode: str) -> int:
        """Bytes of one layer's pool of K or of V, kept as `mode`."""
        return self.num_pages * self.num_kv_heads * STORAGES[mode].row_bytes(self.page_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: K and V of all layers."""
        return self.page_bytes // self.page_size

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_pages * self.page_bytes
