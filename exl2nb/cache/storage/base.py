"""The table of storages, and the two kinds there are: plain numbers, and codes with scales. FORMAT.md says which byte means what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.core.registry import Registry
from exl2nb.ops import kv_codes


class Storage(Protocol):
    """How the numbers of one pool, K or V of one layer, are stored."""

    def problem(self, page_size: int, head_dim: int) -> str:
        """Why it cannot store heads of this size, as "needs ..."; empty when it can."""
        ...

    def row_bytes(self, page_size: int, head_dim: int) -> int:
        """Bytes of one head of one page."""
        ...

    def pool(self, memory: Tensor, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> Tensor:
        """Memory, uint8 `(num_pages * num_kv_heads * row_bytes,)`, seen as a pool. Zeros at first: what masks a slot must not meet NaN."""
        ...


@dataclass(frozen=True)
class PlainStorage:
    """One number of `dtype` each: `(num_pages, Hkv, P, D)`."""

    dtype: torch.dtype

    def problem(self, page_size: int, head_dim: int) -> str:
        """Nothing: it stores every size."""
        return ""

    def row_bytes(self, page_size: int, head_dim: int) -> int:
        """See `Storage`."""
        return page_size * head_dim * self.dtype.itemsize

    def pool(self, memory: Tensor, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> Tensor:
        """See `Storage`."""
        return memory.view(self.dtype).view(num_pages, num_kv_heads, page_size, head_dim)


@dataclass(frozen=True)
class CodedStorage:
    """Codes of `bits` bits with an fp16 scale per group: `(num_pages, Hkv, row_bytes)` of `dtype`, which says what a code means."""

    dtype: torch.dtype
    bits: int

    def problem(self, page_size: int, head_dim: int) -> str:
        """See `Storage`."""
        if head_dim % 8:
            return f"needs a head_dim that is a multiple of 8, found {head_dim}"
        return f"needs pages of {kv_codes.PAGE} tokens, found {page_size}" if page_size != kv_codes.PAGE else ""

    def row_bytes(self, page_size: int, head_dim: int) -> int:
        """See `Storage`."""
        return kv_codes.row_bytes(head_dim, self.bits, page_size)

    def pool(self, memory: Tensor, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> Tensor:
        """See `Storage`."""
        return memory.view(num_pages, num_kv_heads, self.row_bytes(page_size, head_dim)).view(self.dtype)


STORAGES: Registry[Storage] = Registry("cache storage", OptionError)
