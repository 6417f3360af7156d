"""Memory: large pages, reading as fast as possible (the benchmarks' yardstick), and sizes of what the CUDA engine keeps on a GPU."""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from exl2nb.core.errors import DeviceError
from exl2nb.ops._library import define

_PAGE = 2 << 20
_MALLOPT = {"trim": (-1, 128 << 10), "threshold": (-3, 32 << 20), "maps": (-4, 65536)}  # of glibc: number, and what ends `kept_memory`
_keeping, _keepers = threading.Lock(), [0]


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


@contextmanager
def kept_memory() -> Iterator[None]:
    """Memory that tensors on the CPU give back is used again for others, and goes back to the system at the end.

    glibc returns large tensors at once, and the next one then costs a page fault for every 4 KiB: a tenth of a training step's time.
    Several users at once share it, and the last one ends it. Does nothing with other C libraries.
    """
    libc: Any = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    if libc is None:
        yield
        return
    with _keeping:
        _keepers[0] += 1
        if _keepers[0] == 1:
            libc.mallopt(_MALLOPT["maps"][0], 0)
            libc.mallopt(_MALLOPT["trim"][0], (1 << 31) - 1)
    try:
        yield
    finally:
        with _keeping:
            _keepers[0] -= 1
            if not _keepers[0]:
                for number, value in _MALLOPT.values():
                    libc.mallopt(number, value)
                libc.malloc_trim(0)


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
