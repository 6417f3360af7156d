"""How one pool, K or V of one layer, is stored: plain numbers, or codes with scales. FORMAT.md says which byte means what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.ops import kv_codes


@dataclass(frozen=True)
class Storage:
    """One number of `dtype` each, or codes of `bits` bits with an fp16 scale per group; `dtype` then says what a code means."""

    dtype: torch.dtype
    bits: int | None = None

    def problem(self, page_size: int, head_dim: int) -> str:
        """Why heads of this size cannot be stored, as "needs ..."; empty when they can."""
        if self.bits is None:
            return ""
        if head_dim % 8:
            return f"needs a head_dim that is a multiple of 8, found {head_dim}"
        return f"needs pages of {kv_codes.PAGE} tokens, found {page_size}" if page_size != kv_codes.PAGE else ""

    def row_bytes(self, page_size: int, head_dim: int) -> int:
        """Bytes of one head of one page."""
        if self.bits is None:
            return page_size * head_dim * self.dtype.itemsize
        return kv_codes.row_bytes(head_dim, self.bits, page_size)

    def pool(self, memory: Tensor, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int) -> Tensor:
        """View memory, uint8, as a pool: plain `(num_pages, Hkv, P, D)`, coded `(num_pages, Hkv, row_bytes)`.

        The memory must start as zeros: attention masks unwritten slots by multiplying, and NaN would survive that.
        """
        if self.bits is None:
            return memory.view(self.dtype).view(num_pages, num_kv_heads, page_size, head_dim)
        return memory.view(num_pages, num_kv_heads, self.row_bytes(page_size, head_dim)).view(self.dtype)


# To add one: a row here, its bytes in FORMAT.md, its name in `modes.py`, the encoding in `ops/kv_codes.py` and the kernels.
STORAGES: dict[str, Storage] = {
    "fp32": Storage(torch.float32),
    "fp16": Storage(torch.float16),  # the default
    "fp8": Storage(torch.float8_e4m3fn, 8),  # e4m3 with a scale per 32, not rotated: the bytes of q8, less precision
    "q8": Storage(torch.uint8, 8),  # rotated groups of 32, 256 levels: 8.5 bits a number
    "q4": Storage(torch.uint8, 4),  # rotated groups of 32, 16 levels, the scale of least squared error: 4.5 bits a number
}
