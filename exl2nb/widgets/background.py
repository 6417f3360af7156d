"""Background work of widgets: one run at a time on a daemon thread, and the base of widgets with a start button."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from exl2nb.core.errors import Exl2Error, GenerationError
from exl2nb.widgets.base import ExlWidget

if TYPE_CHECKING:
    from exl2nb.widgets.protocol import Status


class Background:
    """Runs `work(stop)` for its owner; at the end calls `done(status, problem)` on the same thread, whatever happened.

    Args:
        owner: name of the widget, for messages and the thread.
        busy: the error message when a run is started during another one.
        error: the error type for that, and for errors other than Exl2Error.
    """

    def __init__(self, owner: str, *, busy: str = "a run is in progress", error: type[Exl2Error] = GenerationError) -> None:
        self._owner, self._busy, self._error = owner, busy, error
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Not Thread.join: an interrupt that arrives in it can leave a running thread marked as ended (CPython up to 3.12).
        self._over = threading.Event()
        self._over.set()
        self.stopping = threading.Event()
        self.problem: BaseException | None = None

    @property
    def alive(self) -> bool:
        """True while something runs."""
        return not self._over.is_set()

    def begin(
        self,
        work: Callable[[threading.Event], None],
        done: Callable[[Status, BaseException | None], None],
        *,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Start and return at once; `before` runs here, once it is clear that nothing else does.

        Raises:
            Exl2Error: something runs already.
        """
        with self._lock:
            if self.alive:
                raise self._error(f"{self._owner}: {self._busy}; call .stop() or .wait() first")
            self.stopping, self.problem = threading.Event(), None
            before()
            self._over.clear()
            # The copied context carries the cell that output belongs to; without it ipykernel 7.0 refuses to send from a thread at all.
            run, args = contextvars.copy_context().run, (self._work, work, done, self.stopping)
            self._thread = threading.Thread(target=run, args=args, name=f"exl2nb-{self._owner.lower()}", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads
                self._over.set()
                raise

    def stop(self) -> None:
        """Stop the run; returns at once."""
        self.stopping.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end. An interrupt stops what runs.

        Args:
            timeout: seconds to wait at most; what runs goes on then.

        Raises:
            Exl2Error: it failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self.alive and (deadline is None or time.monotonic() < deadline):
                self._over.wait(0.05)
        except KeyboardInterrupt:
            self.close()
            raise
        if isinstance(self.problem, Exl2Error):
            raise self.problem
        if self.problem is not None:
            raise self._error(f"{self._owner}: {type(self.problem).__name__}: {self.problem}") from self.problem

    def close(self, seconds: float = 5.0) -> None:
        """Stop, and wait a while unless this is the thread itself."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._over.wait(seconds)

    def _work(
        self,
        work: Callable[[threading.Event], None],
        done: Callable[[Status, BaseException | None], None],
        stop: threading.Event,
    ) -> None:
        try:
            try:
                work(stop)
            except BaseException as problem:
                if not (stop.is_set() and isinstance(problem, Exl2Error)):  # a cancelled run may raise
                    self.problem = problem
            done("error" if self.problem else "stopped" if stop.is_set() else "done", self.problem)
        except BaseException as problem:
            self.problem = self.problem or problem
            raise
        finally:
            self._over.set()


_Self = TypeVar("_Self", bound="BackgroundWidget")


class BackgroundWidget(ExlWidget):
    """Base of widgets whose button starts a run. A constructor sets `_background` before anything else: `close` needs it."""

    _background: Background = Background("widget")  # never begun: what `close` finds where the arguments did not fit the constructor

    def stop(self) -> None:
        """Stop the run; the output so far is kept. Returns at once."""
        self._background.stop()

    def wait(self: _Self, timeout: float | None = None) -> _Self:
        """Wait until it is over. An interrupt stops it.

        Raises:
            Exl2Error: it failed.
        """
        try:
            self._background.wait(timeout)
        finally:
            self._refresh_static()
        return self

    def close(self) -> None:
        """Stop and remove the widget from the page; models that were given loaded stay yours."""
        self._background.close()
        super().close()
