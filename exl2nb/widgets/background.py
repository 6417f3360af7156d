"""One piece of work at a time on a daemon thread, for widgets: begin, stop, wait. Knows nothing of pages."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from exl2nb.core.errors import Exl2Error, GenerationError

if TYPE_CHECKING:
    from exl2nb.widgets.protocol import Status


class Background:
    """Runs `work(stop)` for its owner; at the end calls `done(status, problem)` on the same thread, whatever happened.

    Args:
        owner: name of the widget, for messages and the thread.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.stopping = threading.Event()
        self.problem: BaseException | None = None

    @property
    def alive(self) -> bool:
        """True while something runs."""
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self,
        work: Callable[[threading.Event], None],
        done: Callable[[Status, BaseException | None], None],
        *,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Start and return at once; `before` runs here, once it is clear that nothing else does.

        Raises:
            GenerationError: something runs already.
        """
        with self._lock:
            if self.alive:
                raise GenerationError(f"{self._owner}: a run is going on; call .stop() or .wait() first")
            self.stopping, self.problem = threading.Event(), None
            before()
            # The copied context carries the cell that output belongs to; without it ipykernel 7.0 refuses to send from a thread at all.
            run, args = contextvars.copy_context().run, (self._work, work, done, self.stopping)
            self._thread = threading.Thread(target=run, args=args, name=f"exl2nb-{self._owner.lower()}", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ask what runs to end; returns at once."""
        self.stopping.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end. An interrupt stops what runs.

        Args:
            timeout: seconds to wait at most; what runs goes on then.

        Raises:
            Exl2Error: it failed.
        """
        thread, deadline = self._thread, None if timeout is None else time.monotonic() + timeout
        try:
            while thread is not None and thread.is_alive() and (deadline is None or time.monotonic() < deadline):
                thread.join(0.05)
        except KeyboardInterrupt:
            self.stop()
            if thread is not None:
                thread.join(5)
            raise
        if isinstance(self.problem, Exl2Error):
            raise self.problem
        if self.problem is not None:
            raise GenerationError(f"{self._owner}: {type(self.problem).__name__}: {self.problem}") from self.problem

    def close(self, seconds: float = 5.0) -> None:
        """Stop, and wait a while unless this is the thread itself."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _work(
        self,
        work: Callable[[threading.Event], None],
        done: Callable[[Status, BaseException | None], None],
        stop: threading.Event,
    ) -> None:
        try:
            work(stop)
        except BaseException as problem:
            if not (stop.is_set() and isinstance(problem, Exl2Error)):  # what was cancelled may say so by raising
                self.problem = problem
        try:
            done("error" if self.problem else "stopped" if stop.is_set() else "done", self.problem)
        except BaseException as problem:
            self.problem = self.problem or problem
            raise
