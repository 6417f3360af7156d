"""Memory: large pages, reading as fast as possible (the benchmarks' yardstick), and sizes of what the CUDA engine keeps on a GPU."""

from __future__ import annotations

import mmap
from typing import NoReturn

import torch
from torch import Tensor

from exl2nb.core.errors import DeviceError
from exl2nb.ops._library import define

_PAGE = 2 << 20


def large_pages(size: int) -> Tensor | None:
    """Zeros, uint8 `(size,)`, in large pages where the system has them; None where it does not.

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


def _unknown(*_: object) -> NoReturn:
    raise DeviceError("sizes on a GPU are known to the compiled library alone, which is not in use; build it with `make build`")


packed_bytes = define(
    "packed_bytes(int in_features, str[] formats, int[] out_features, Tensor[] groups) -> int", fake=lambda *_: 0, reference=_unknown
)
"""Bytes of a weight blob on the GPU: matrices of `in_features` rows side by side, each with a permutation of its own unless all are dense.

formats: "exl2", "gptq", or any other for a dense one. groups: int64 `(G, 2)` of each, bits and rows.
"""

partial_sums_bytes = define(
    "partial_sums_bytes(Tensor like, int tokens, int multiprocessors, int hidden_size, int router_outputs) -> int",
    fake=lambda *_: 0,
    reference=_unknown,
)
"""Bytes of partial sums in the workspace of a step on a GPU: of a router with so many outputs, or of stream-K GEMMs where it is 0."""
