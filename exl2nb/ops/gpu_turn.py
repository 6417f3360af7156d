"""Steps on one GPU one after the other, in whatever streams they are launched."""

from __future__ import annotations

import threading
from functools import cache

import torch


class Turn:
    """Held while a step or a product of many rows is launched: in another stream than the last one, it waits for that first.

    They have kernels whose CTAs wait for one another (persistent and stream-K GEMM), so all of them must get a place on the GPU. Two such
    kernels at the same time could each hold a part of it and wait for ever. Every other kernel ends by itself; and while all models work
    in one stream, as they do unless somebody else chooses, nothing is done here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._last: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if torch.cuda.is_current_stream_capturing():
                return  # nothing runs yet
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None and self._last != stream:
                stream.wait_stream(self._last)
            self._last = stream
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@cache
def _turn(index: int) -> Turn:
    return Turn(torch.device("cuda", index))


def turn(device: torch.device) -> Turn:
    """What all steps on a device are launched with."""
    return _turn(torch.cuda.current_device() if device.index is None else device.index)
