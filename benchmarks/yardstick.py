"""What the memory gives: sequential read of 1 GiB, the measure that weight streaming is held against, taken in the same run."""

from __future__ import annotations

import time

import torch

from exl2nb import ops


def read_bandwidth(repeats: int = 9) -> float:
    """Bytes per second of reading 1 GiB with torch's current threads; the best of `repeats`."""
    data = torch.ones(2**30, dtype=torch.uint8)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        ops.read_memory(data)
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


if __name__ == "__main__":
    print(f"{read_bandwidth() / 1e9:.1f} GB/s read with {torch.get_num_threads()} threads")
