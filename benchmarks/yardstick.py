"""What the memory gives: sequential read of 1 GiB, the measure that weight streaming is held against, taken in the same run."""

from __future__ import annotations

import time

import torch


def read_bandwidth(repeats: int = 7) -> float:
    """Bytes per second of summing 1 GiB of float32 with torch's current threads; the best of `repeats`."""
    data = torch.ones(2**28, dtype=torch.float32)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


if __name__ == "__main__":
    print(f"{read_bandwidth() / 1e9:.1f} GB/s read with {torch.get_num_threads()} threads")
