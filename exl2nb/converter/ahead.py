"""Tensors read from files before they are asked for, while something else computes. Knows nothing of models."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exl2nb.core.errors import Exl2Error

_ALIGNED = 64  # bytes


class Ahead:
    """Reads some tensors of a store on a thread, into memory of its own.

    Args:
        store: the files: `info(name).nbytes`, `read(name, into=)`.
        most: bytes; more are not read ahead.
        pinned: memory from which a GPU fetches by itself.
    """

    def __init__(self, store: Any, most: int, *, pinned: bool) -> None:
        self._store, self._most, self._pinned = store, most, pinned
        self._space = torch.empty(0, dtype=torch.uint8)
        self._names: tuple[str, ...] = ()
        self._found: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._enough = False

    def begin(self, names: Sequence[str]) -> None:
        """Read these from now on; what was read before and not taken is forgotten."""
        if tuple(names) == self._names:
            return
        self.close()
        sizes = [-(-self._store.info(name).nbytes // _ALIGNED) * _ALIGNED for name in names]
        if not 0 < sum(sizes) <= self._most:
            return
        if len(self._space) < sum(sizes):
            self._space = torch.empty(0, dtype=torch.uint8)
            self._space = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._pinned)
        self._names, self._enough = tuple(names), False
        places = self._space[: sum(sizes)].split(sizes)
        self._thread = threading.Thread(target=self._read, args=(self._names, places), name="weights ahead", daemon=True)
        self._thread.start()

    def _read(self, names: Sequence[str], places: Sequence[Tensor]) -> None:
        for name, place in zip(names, places):
            if self._enough:
                return
            try:
                self._found[name] = self._store.read(name, into=place)
            except (Exl2Error, OSError):  # whoever asks for it reads it again and says what is wrong
                return

    def take(self, name: str) -> Tensor | None:
        """A tensor that was read ahead, good until the next `begin`; None for any other."""
        if name not in self._names or self._thread is None:
            return None
        self._thread.join()
        return self._found.get(name)

    def close(self) -> None:
        """Stop reading. Harmless when repeated."""
        self._enough = True
        if self._thread is not None:
            self._thread.join()
        self._thread, self._names, self._found = None, (), {}
