"""Memory of large pages on the CPU, for what every step of a small model reads. Knows no model.

A page of 4 KiB costs a walk through the page tables whenever a processor has forgotten where it lies, and it remembers a few thousand.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

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
    except OSError:  # a kernel without them, or no memory: whoever asks for some elsewhere is told
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]
