"""The tensors of the KV cache. Which page belongs to whom is `cache.pages`' business."""

from __future__ import annotations

import os

import torch

from exl2nb.cache.spec import CacheSpec
from exl2nb.cache.storage import STORAGES
from exl2nb.core.errors import OptionError


class KVCache:
    """One K and one V pool per layer.

    k, v: lists over layers of `(num_pages, num_kv_heads, page_size, head_dim)`: the tokens of one head within a page are contiguous, which
    is what the attention kernel reads. Slot `page * page_size + offset` is `pool[page, :, offset]`.

    Args:
        spec: the sizes.
        device: where the pools live.

    Raises:
        OptionError: the cache is larger than the memory of this machine; names both and what to lower.
    """

    def __init__(self, spec: CacheSpec, device: str = "cpu") -> None:
        self.spec, self.device = spec, device
        _check_memory(spec, device)
        shape = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
        storage = STORAGES[spec.mode]
        self.k = [storage.allocate(shape, device) for _ in range(spec.num_layers)]
        self.v = [storage.allocate(shape, device) for _ in range(spec.num_layers)]

    def close(self) -> None:
        """Drop the pools; the memory returns at once."""
        self.k, self.v = [], []

    def __repr__(self) -> str:
        spec = self.spec
        return f"KVCache({spec.num_tokens} tokens, {spec.mode}, {spec.total_bytes / 2**20:.1f} MiB on {self.device})"


def _check_memory(spec: CacheSpec, device: str) -> None:
    if device.startswith("cuda"):
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if spec.total_bytes > memory:
        raise OptionError(
            f"cache: {spec.num_tokens} tokens in mode {spec.mode} need {spec.total_bytes / 2**30:.1f} GiB, "
            f"{device} has {memory / 2**30:.1f} GiB; lower the number of cache tokens"
        )
