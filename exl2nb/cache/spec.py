"""How a KV cache stores its numbers, and its size, as plain, checked data: storages, modes, `CacheSpec`. Allocates nothing.

FORMAT.md says which byte means what.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
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
        return f"needs pages of {kv_codes.PAGE_TOKENS} tokens, found {page_size}" if page_size != kv_codes.PAGE_TOKENS else ""

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


# To add one: a row here, its bytes in FORMAT.md, its name in `CACHE_MODES`, the encoding in `ops/kv_codes.py` and the kernels.
PAGE_STORAGES: dict[str, Storage] = {
    "fp32": Storage(torch.float32),
    "fp16": Storage(torch.float16),  # the default
    "fp8": Storage(torch.float8_e4m3fn, 8),  # e4m3 with a scale per 32, not rotated: the bytes of q8, less precision
    "q8": Storage(torch.uint8, 8),  # rotated groups of 32, 256 levels: 8.5 bits a number
    "q4": Storage(torch.uint8, 4),  # rotated groups of 32, 16 levels, the scale of least squared error: 4.5 bits a number
}

CACHE_MODES: dict[str, tuple[str, str]] = {
    "fp32": ("fp32", "fp32"),
    "fp16": ("fp16", "fp16"),
    "fp8": ("fp8", "fp8"),
    "q8": ("q8", "q8"),
    "q6": ("q8", "q4"),
    "q4": ("q4", "q4"),
}
"""Mode -> (storage of K, storage of V). q6 is no 6-bit code: keys lose more accuracy at few bits than values, so K has 8 bits and V 4."""

_MODE_OF_BITS = {"4": "q4", "8": "q8", "16": "fp16"}


def parse_mode(mode: object, *, where: str = "cache") -> str:
    """The name of a mode as `CACHE_MODES` has it, or as "k8v4" where it has none.

    Args:
        mode: a name in `CACHE_MODES`, or "k<bits>v<bits>" with 4, 8 or 16 bits each, in any case.
        where: the public call, named in the message.

    Raises:
        OptionError: anything else.

    Example:
        >>> parse_mode("k8v4"), parse_mode("K16V8")
        ('q6', 'k16v8')
    """
    name = mode.lower() if isinstance(mode, str) else ""
    if name in CACHE_MODES:
        return name
    widths = re.fullmatch(r"k(4|8|16)v(4|8|16)", name)
    if not widths:
        known = f"{', '.join(CACHE_MODES)}, or bits of K and V apart as in k8v4 (4, 8 or 16 each)"
        raise OptionError(f"{where}: unknown cache mode {mode!r}; known: {known}")
    pair = (_MODE_OF_BITS[widths[1]], _MODE_OF_BITS[widths[2]])
    return next((known for known, stored in CACHE_MODES.items() if stored == pair), name)


def storages_of(mode: str) -> tuple[str, str]:
    """Storage of K and of V for any name that `parse_mode` takes."""
    name = parse_mode(mode)
    if name in CACHE_MODES:
        return CACHE_MODES[name]
    k, v = name[1:].split("v")
    return _MODE_OF_BITS[k], _MODE_OF_BITS[v]


PAGE_SIZE = 256  # tokens; the attention kernels walk whole pages


@dataclass(frozen=True)
class CacheSpec:
    """Shape of the cache: `num_pages` pages of `page_size` tokens for `num_layers` layers of `num_kv_heads` heads of `head_dim`.

    mode: how the numbers are stored, a name that `parse_mode` takes: fp32, fp16, fp8, q8, q6 (K in 8 bits, V in 4), q4, or bits
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
            problem = PAGE_STORAGES[kind].problem(self.page_size, self.head_dim)
            if problem:
                raise OptionError(f"cache: mode {self.mode} {problem}; use fp16")

    @property
    def k_mode(self) -> str:
        """How K is stored, a key of `PAGE_STORAGES`."""
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
        return self.num_pages * self.num_kv_heads * PAGE_STORAGES[mode].row_bytes(self.page_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: K and V of all layers."""
        return self.page_bytes // self.page_size

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_pages * self.page_bytes
