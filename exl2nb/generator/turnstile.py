"""Who runs a model: the engine, step by step, or a caller who wants it to himself. One at a time, in the order in which they came.

An interrupt (KeyboardInterrupt, which comes between any two instructions of the main thread) may hit a caller while he comes or goes. So
there is no lock that could stay locked and no counter that could stay up: a visit begins and ends with one assignment, and whose code is no
longer on the stack of its thread is gone, whatever became of its `finally`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PAUSE_S = 0.001  # between looks; events and conditions would do, did interrupts not break them (core.flag)
TICK_S = 0.05
SURE = 3  # ticks in a row in which a visitor must be missed: a stack may change while it is looked through


class Visit:
    """Somebody's wish to have the model, and whether he still is where he asked for it. ticket: who came earlier has a lower one."""

    def __init__(self, frame: FrameType | None, ticket: int) -> None:
        while frame is not None and frame.f_globals.get("__name__") in ("contextlib", __name__):
            frame = frame.f_back
        self.ticket = ticket
        self._frame, self._thread, self._missed = frame, threading.get_ident(), 0
        self._next = time.monotonic() + TICK_S

    def gone(self) -> bool:
        """Asked by those who wait for him; looks once a tick."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + TICK_S
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        self._missed = self._missed + 1 if frame is None else 0
        return self._missed >= SURE


class Turnstile:
    """See the module."""

    def __init__(self) -> None:
        self._lock, self._tickets = threading.Lock(), itertools.count()
        self._owner: Visit | None = None
        self._visitors: set[Visit] = set()
        self._steps: set[Visit] = set()

    @property
    def wanted(self) -> bool:
        """True while a caller waits or has the model."""
        return bool(self._visitors)

    @contextmanager
    def visit(self, frame: FrameType | None, *, quiet: Callable[[], bool], timeout_s: float | None = None) -> Iterator[None]:
        """Have the model when those who came earlier are through.

        Args:
            frame: whose visit it is: where the `with` stands. quiet: whether nothing is in flight any more; until then the engine has
            another turn. timeout_s: to wait, at most.

        Raises:
            TimeoutError: it was not to be had.
        """
        visit = Visit(frame, next(self._tickets))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._visitors.add(visit)
            while not self._enters(visit, quiet):
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"the model was in use for {timeout_s} s")
                self._pause(visit, deadline)
            yield
        finally:
            self._leave(visit)

    @contextmanager
    def step(self, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """The engine's turn, behind those who wait already and before those who come now; False where it gave up waiting."""
        visit = Visit(sys._getframe(), next(self._tickets))
        try:
            self._steps.add(visit)
            mine = True
            while mine and not self._enters(visit, lambda: True):
                self._pause(visit)
                mine = not give_up()
            yield mine
        finally:
            self._leave(visit)

    def _enters(self, visit: Visit, quiet: Callable[[], bool]) -> bool:
        with self._lock:
            if self._owner is not None or any(other.ticket < visit.ticket for other in (*self._visitors, *self._steps)):
                return False
            if quiet():
                self._owner = visit
                return True
            visit.ticket = next(self._tickets)
            return False

    def _leave(self, visit: Visit) -> None:
        with self._lock:
            if self._owner is visit:
                self._owner = None
            self._visitors.discard(visit)
            self._steps.discard(visit)

    def _pause(self, visit: Visit, deadline: float | None = None) -> None:
        """Wait a moment, and see off who has gone without a word."""
        time.sleep(PAUSE_S if deadline is None else max(0.0, min(PAUSE_S, deadline - time.monotonic())))
        for other in {self._owner, *self._visitors, *self._steps} - {None, visit}:
            if other.gone():
                self._leave(other)
