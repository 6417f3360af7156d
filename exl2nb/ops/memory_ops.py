"""Memory: large pages, reading as fast as possible (the benchmarks' yardstick), sizes on a GPU, and errors that say what did not fit."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from exl2nb.core.errors import DeviceError, OutOfMemory
from exl2nb.ops._library import define_op

_LARGE_PAGE_BYTES = 2 << 20
_MALLOPT_OPTIONS = {
    "trim": (-1, 128 << 10),
    "threshold": (-3, 32 << 20),
    "maps": (-4, 65536),
}  # of glibc: number, and what ends `kept_memory`
_keeping, _keepers = threading.Lock(), [0]


def large_pages(size: int) -> Tensor | None:
    """Zeros, uint8 `(size,)`, in large pages where the system has them; None where it does not.

    What is never written takes no memory.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size <= 0:
        return None
    try:
        memory = mmap.mmap(-1, (size // _LARGE_PAGE_BYTES + 2) * _LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
            libc.mallopt(_MALLOPT_OPTIONS["maps"][0], 0)
            libc.mallopt(_MALLOPT_OPTIONS["trim"][0], (1 << 31) - 1)
    try:
        yield
    finally:
        with _keeping:
            _keepers[0] -= 1
            if not _keepers[0]:
                for number, value in _MALLOPT_OPTIONS.values():
                    libc.mallopt(number, value)
                libc.malloc_trim(0)


def memory_is_kept() -> bool:
    """Return whether a block of `kept_memory` is open."""
    return _keepers[0] > 0


_read_memory_op = define_op("read_memory(Tensor data) -> int", fake=lambda data: 0, reference=lambda data: int(data.long().sum()))


def read_memory(data: Tensor) -> int:
    """Read every byte of a uint8 1-D tensor with all threads; returns a checksum without meaning."""
    return _read_memory_op(data)


def _raise_unknown_sizes(*_: object) -> NoReturn:
    raise DeviceError("sizes on a GPU are known to the compiled library alone, which is not in use; build it with `make build`")


packed_bytes = define_op(
    "packed_bytes(int in_features, str[] formats, int[] out_features, Tensor[] groups) -> int",
    fake=lambda *_: 0,
    reference=_raise_unknown_sizes,
)
"""Bytes of a weight blob on the GPU: matrices of `in_features` rows side by side, each with a permutation of its own unless all are dense.

formats: "exl2", "gptq", or any other for a dense one. groups: int64 `(G, 2)` of each, bits and rows.
"""

partial_sums_bytes = define_op(
    "partial_sums_bytes(Tensor like, int tokens, int multiprocessors, int hidden_size, int router_outputs) -> int",
    fake=lambda *_: 0,
    reference=_raise_unknown_sizes,
)
"""Bytes of partial sums in the workspace of a step on a GPU: of a router with so many outputs, or of stream-K GEMMs where it is 0."""


_HOST_ALLOCATOR = "DefaultCPUAllocator"  # in torch's message; torch has no error class for it


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a call failed for lack of memory: torch's own errors, or the plain one of an op of the compiled library on the GPU."""
    if isinstance(error, OutOfMemory):
        return False
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _HOST_ALLOCATOR in str(error)):
        return True
    if not torch.cuda.is_available():
        return False
    words = ("aten::new_empty", "aten::new_zeros", "out of memory")
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


def out_of_memory_error(error: BaseException, what: str, todo: str, *, needed: str = "") -> OutOfMemory:
    """The error of a full memory by name: "what: needed, free of total; todo". GPU memory that torch keeps for later goes back first.

    Args:
        error: an error for which `is_out_of_memory` is true.
        what: what was not possible.
        todo: what to do.
        needed: "" takes the size that the message of torch names.
    """
    if isinstance(error, MemoryError) or _HOST_ALLOCATOR in str(error):
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        needed = needed or (f"{int(asked[1]) / 2**30:.2f} GiB more" if asked else "more")
        return OutOfMemory(f"{what} the machine's memory: {needed} needed, {_free_host_memory()}; {todo}")
    asked = re.search(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)", str(error))
    needed = needed or (f"{asked[1]} more" if asked else "more")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return OutOfMemory(f"{what} the GPU: {needed} needed, {free / 2**30:.2f} of {total / 2**30:.1f} GiB are free; {todo}, or device='cpu'")


def _free_host_memory() -> str:
    """What is free, where the system says it."""
    try:
        found = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
        free, total = (int(found[name]) / 2**20 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError):
        return "less is free"
    return f"{free:.2f} of {total:.1f} GiB are free"


@contextmanager
def naming_out_of_memory(what: str, todo: str, *, needed: str = "") -> Iterator[None]:
    """Raise `out_of_memory_error` in place of an error for which `is_out_of_memory` is true."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(error, what, todo, needed=needed) from error
