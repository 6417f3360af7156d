"""One buffer per thread for the weights of a row: half a megabyte that is new for every token costs more in page faults than in sums."""

from __future__ import annotations

import threading

import numpy as np

_own = threading.local()


def weights_of(logits: np.ndarray, highest: np.floating | float, scale: float = 1.0) -> np.ndarray:
    """`exp((logits - highest) * scale)`, f32 `(n,)`. The next call on this thread overwrites it: to be used up at once, never kept."""
    size = logits.shape[0]
    buffer = getattr(_own, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _own.buffer = np.empty(size, np.float32)
    out = buffer[:size]
    np.subtract(logits, np.float32(highest), out=out)
    if scale != 1.0:
        np.multiply(out, np.float32(scale), out=out)
    return np.exp(out, out=out)
