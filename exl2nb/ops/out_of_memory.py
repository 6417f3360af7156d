"""Memory that is full, by name: what was needed, what is free. Knows nothing about models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exl2nb.core.errors import OutOfMemory

_HOST = "DefaultCPUAllocator"  # in torch's message; torch has no error class for it


def is_full(error: BaseException) -> bool:
    """Whether a call failed for lack of memory: torch's own errors, or the plain one of an op of the compiled library on the GPU."""
    import torch

    if isinstance(error, OutOfMemory):
        return False
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _HOST in str(error)):
        return True
    if not torch.cuda.is_available():
        return False
    words = ("aten::new_empty", "aten::new_zeros", "out of memory")
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


def named(error: BaseException, what: str, todo: str, *, needed: str = "") -> OutOfMemory:
    """The error of a full memory by name: "what: needed, free of total; todo". GPU memory that torch keeps for later goes back first.

    Args:
        error: for which `is_full`. what: was not possible. todo: what to do. needed: "" = what torch's message says it asked for last.
    """
    import torch

    if isinstance(error, MemoryError) or _HOST in str(error):
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        needed = needed or (f"{int(asked[1]) / 2**30:.2f} GiB more" if asked else "more")
        return OutOfMemory(f"{what} the machine's memory: {needed} needed, {_host()}; {todo}")
    asked = re.search(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)", str(error))
    needed = needed or (f"{asked[1]} more" if asked else "more")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return OutOfMemory(f"{what} the GPU: {needed} needed, {free / 2**30:.2f} of {total / 2**30:.1f} GiB are free; {todo}, or device='cpu'")


def _host() -> str:
    """What is free, where the system says it."""
    try:
        found = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
        free, total = (int(found[name]) / 2**20 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError):
        return "less is free"
    return f"{free:.2f} of {total:.1f} GiB are free"


@contextmanager
def naming(what: str, todo: str, *, needed: str = "") -> Iterator[None]:
    """Raises `named` in the place of an error for which `is_full`."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise named(error, what, todo, needed=needed) from error
