"""Memory of tensors on the CPU that is kept for others."""

from __future__ import annotations

import platform
import resource
import threading
from pathlib import Path

import pytest
import torch

from exl2nb.ops.memory_ops import kept_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
SIZE = 96 << 20  # more than glibc ever keeps by itself


def faults() -> int:
    """Page faults of making, writing and dropping a large tensor, after one that is larger."""
    torch.ones(2 * SIZE, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(SIZE, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_is_kept_and_given_back() -> None:
    pages = SIZE // resource.getpagesize()
    whole = faults()
    with kept_memory():
        with kept_memory():
            assert faults() < pages / 100
        assert faults() < pages / 100, "the first user still wants it"
        held = resident()
    assert held - resident() > SIZE / 2
    if whole > pages / 2:  # else the system gives large pages unasked
        assert faults() > pages / 2


def test_the_last_of_several_users_ends_it() -> None:
    first, second = kept_memory(), kept_memory()
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join(10)
    first.__exit__(None, None, None)
    assert faults() < SIZE // resource.getpagesize() / 100
    held = resident()
    second.__exit__(None, None, None)
    assert held - resident() > SIZE / 2
