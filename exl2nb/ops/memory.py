"""Memory: large pages for what every step of a small model reads, and reading as fast as possible (the benchmarks' yardstick)."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from exl2nb.ops._library import define

_PAGE = 2 << 20


def large_pages(size: int) -> Tensor | None:
    """Zeros, uint8 `(size,)`, in memory that the system is asked to give in large pages; None where it knows none.

    What is never written takes no memory.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size <= 0:
        return None
    try:
        memory = mmap.mmap(-1, (size // _PAGE + 2) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(advice)
    except OSError:  # a kernel without them, or no memory: the caller allocates elsewhere
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


_read_memory_op = define("read_memory(Tensor data) -> int", fake=lambda data: 0, reference=lambda data: int(data.long().sum()))


def read_memory(data: Tensor) -> int:
    """Read every byte of a uint8 1-D tensor with all threads; returns a checksum without meaning."""
    return _read_memory_op(data)
