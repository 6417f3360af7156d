"""The tensors of the KV cache. `cache.pages` counts the references to its pages."""

from __future__ import annotations

import os
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from exl2nb.cache.spec import PAGE_STORAGES, CacheSpec
from exl2nb.core.errors import OptionError
from exl2nb.core.show import facts
from exl2nb.ops.memory_ops import large_pages
from exl2nb.ops.placement import Placement

LARGE_BYTES = 2 << 20  # caches of at least this size use large pages


class CachePart(NamedTuple):
    """The pools of some layers, all on one device; spec is that of the whole cache."""

    spec: CacheSpec
    k: list[Tensor]
    v: list[Tensor]


class KVCache:
    """One K and one V pool per layer.

    k, v: lists over layers of pools. A plain one is `(num_pages, num_kv_heads, page_size, head_dim)`: slot `page * page_size + offset` is
    `pool[page, :, offset]`. A coded one is `(num_pages, num_kv_heads, bytes)` of uint8 or float8_e4m3fn (FORMAT.md). Either way
    page and head come first: the tokens of one head within a page are contiguous, which is what the attention kernel reads.

    Args:
        spec: the sizes and the mode.
        device: one device for all pools, or the device of each layer.

    Raises:
        OptionError: the cache is larger than the memory of this machine; names both and what to lower.

    Attributes:
        placement: the device of each layer's pools. whole: False where other processes have the rest of its heads.
    """

    whole = True

    def __init__(self, spec: CacheSpec, device: str | Placement = "cpu") -> None:
        self.spec = spec
        self.placement = Placement.on(device, spec.num_layers) if isinstance(device, str) else device
        assert len(self.placement.layers) == spec.num_layers, "a device for each layer"
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        for place, layers in groupby(self.placement.layers):
            k, v = _pools(spec, len([*layers]), place)
            self.k += k
            self.v += v

    def part(self, first: int, last: int) -> CachePart:
        """The pools of layers [first, last)."""
        return CachePart(self.spec, self.k[first:last], self.v[first:last])

    def copy_page(self, source: int, target: int) -> None:
        """Make page `target` what page `source` is, K and V of all layers, byte for byte.

        Raises:
            OptionError: there is no such page.

        Cost: reads and writes `spec.page_bytes`; asynchronous on the current stream of a GPU.
        """
        for page in (source, target):
            if isinstance(page, bool) or not isinstance(page, int) or not 0 <= page < self.spec.num_pages:
                raise OptionError(f"copy_page: page is {page!r}; expected 0 to {self.spec.num_pages - 1}")
        if source != target:
            for pool in (*self.k, *self.v):
                pool[target].copy_(pool[source])

    def close(self) -> None:
        """Drop the pools; the memory is freed at once."""
        self.k, self.v = [], []

    def __repr__(self) -> str:
        spec = self.spec
        return f"KVCache({spec.num_tokens} tokens, {_mode(spec)}, {spec.total_bytes / 2**20:.1f} MiB on {self.placement})"

    def _repr_html_(self) -> str:
        spec = self.spec
        heads = f"{spec.num_layers} layers of {spec.num_kv_heads} heads of {spec.head_dim}"
        rows = {
            "mode": f"{_mode(spec)}: {spec.bits:g} bits a number",
            "tokens": f"{spec.num_tokens} in {spec.num_pages} pages of {spec.page_size}",
            "shape": heads,
            "memory": f"{spec.total_bytes / 2**20:.1f} MiB on {self.placement}; {spec.token_bytes} bytes a token",
            "beside fp16": f"{16 / spec.bits:.2f} times the tokens in the same memory",
        }
        return facts(f"KV cache{'' if self.k else ' (closed)'}", rows)


def _mode(spec: CacheSpec) -> str:
    return spec.mode if spec.k_mode == spec.v_mode else f"{spec.mode} (K {spec.k_mode}, V {spec.v_mode})"


def _pools(spec: CacheSpec, layers: int, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """The pools of so many layers."""
    size = spec.total_bytes * layers // spec.num_layers
    _check_memory(spec, size, device)
    # A step reads from hundreds of places: eight requests are a tenth slower with pages of 4 KiB (demo model, 2 cores, 2026-11).
    memory = large_pages(size) if device == "cpu" and size >= LARGE_BYTES else None
    if memory is None:
        memory = torch.zeros(size, dtype=torch.uint8, device=device)  # one tensor: a GPU gives each its own segments
    pieces = memory.split([spec.pool_bytes(mode) for mode in (spec.k_mode, spec.v_mode) for _ in range(layers)])
    shape = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    k, v = ([PAGE_STORAGES[mode].pool(piece, *shape) for piece in half]
            for mode, half in ((spec.k_mode, pieces[:layers]), (spec.v_mode, pieces[layers:])))  # fmt: skip
    return k, v


def _check_memory(spec: CacheSpec, size: int, device: str) -> None:
    if device.startswith("cuda"):
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise OptionError(
            f"cache: {spec.num_tokens} tokens in mode {spec.mode} need {size / 2**30:.1f} GiB, "
            f"{device} has {memory / 2**30:.1f} GiB; lower the number of cache tokens, or take a mode of fewer bits"
        )
