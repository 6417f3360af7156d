"""A GPU that is full, by name: what was needed, what is free. Knows nothing about models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from exl2nb.core.errors import OutOfMemory


def is_full(error: BaseException) -> bool:
    """Whether a call failed for lack of memory on the GPU: torch's own error, or the plain one of an op of the compiled library."""
    import torch

    if not torch.cuda.is_available() or isinstance(error, OutOfMemory):
        return False
    words = ("aten::new_empty", "aten::new_zeros", "out of memory")
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


def named(error: BaseException, what: str, todo: str, *, needed: str = "") -> OutOfMemory:
    """The error of a GPU that is full by name: "what: needed, free of total; todo". Memory that torch keeps for later goes back first.

    Args:
        error: for which `is_full`. what: was not possible. todo: what to do. needed: "" = what torch's message says it asked for last.
    """
    import torch

    asked = re.search(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)", str(error))
    needed = needed or (f"{asked[1]} more" if asked else "more")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return OutOfMemory(f"{what}: {needed} needed, {free / 2**30:.2f} of {total / 2**30:.1f} GiB are free; {todo}")


@contextmanager
def naming(what: str, todo: str, *, needed: str = "") -> Iterator[None]:
    """Raises `named` in the place of an error for which `is_full`."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise named(error, what, todo, needed=needed) from error
