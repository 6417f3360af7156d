"""ProgressView: a progress sink that is one line in the page: stage, bar, rate, time left, Stop; and the sink of progress='auto'."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import traitlets as t

from exl2nb.core.errors import Interrupted
from exl2nb.core.progress import Progress
from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.protocol import Finished, ProgressState

UPDATE_S = 1 / 12
"""Least time between two updates of the page: faster numbers cannot be read."""
_STATUS_LABELS = {"done": "done", "cancelled": "stopped", "error": "error"}


class ProgressView(ExlWidget):
    """Shows `Progress` events; give it as `progress=` to anything long.

    It stays on one line, however many stages pass through it, and leaves one finished line behind. Stop makes the next event
    raise `Interrupted` in the work itself, which ends there in an orderly way. As a context manager it covers several stages as one work.

    Args:
        title: of the whole work, shown before the stage.
        cancellable: show the Stop button. Default True.

    Traits to read: stage, done, total, unit, detail, rate (units per second), share (0..1) and eta_s (of the whole work where it is known,
    else of the stage), elapsed_s, finished (stage, elapsed_s, state of each that is over), status.

    Example:
        >>> view = ProgressView("convert")
        >>> view(Progress(stage="measure", done=2, total=2, unit="layers", elapsed_s=1.5, state="done"))
        >>> view
        convert: done in 1.5 s
    """

    _bundle, _state_type = "progress", ProgressState

    title = t.Unicode("").tag(sync=True, option=True)
    cancellable = t.Bool(True).tag(sync=True, option=True)
    stage = t.Unicode("").tag(sync=True)
    done = t.Float(0.0).tag(sync=True)
    total = t.Float(0.0).tag(sync=True)
    unit = t.Unicode("").tag(sync=True)
    detail = t.Unicode("").tag(sync=True)
    rate = t.Float(0.0).tag(sync=True)
    share = t.Float(None, allow_none=True).tag(sync=True)
    elapsed_s = t.Float(0.0).tag(sync=True)
    eta_s = t.Float(None, allow_none=True).tag(sync=True)
    finished = t.List().tag(sync=True)

    def __init__(self, title: str = "", **kwargs: Any) -> None:
        self._lock = threading.RLock()
        self._cancelled = threading.Event()
        self._inside = 0
        self._last = 0.0
        super().__init__(title=title, **kwargs)

    def __call__(self, event: Progress, /) -> None:
        """Take one event.

        Raises:
            Interrupted: the reader pressed Stop, and the work is still running.
        """
        with self._lock:
            over = event.state != "running"
            if over or event.stage != self.stage or self.status != "running" or time.monotonic() - self._last >= UPDATE_S:
                self._show(event, over)
        if self._cancelled.is_set() and not over:
            raise Interrupted(f"{self.title or event.stage}: cancelled; run it again to resume from what was saved")

    def cancel(self) -> None:
        """Make the work stop at its next event. Returns at once."""
        self._cancelled.set()

    def __enter__(self) -> ProgressView:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._cancelled.clear()
                self.finished, self.status = [], "running"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            cancelled = kind is not None and issubclass(kind, (KeyboardInterrupt, Interrupted))
            self.status = "done" if kind is None else "stopped" if cancelled else "error"
            self._cancelled.clear()
        self._refresh_static()

    def _show(self, event: Progress, over: bool) -> None:
        status = _STATUS_LABELS.get(event.state, "running") if over else "running"
        if self._inside and status == "done":
            status = "running"
        with self.hold_sync():
            if not over and self.status != "running":
                self.error = ""
                if self.status in ("stopped", "error"):
                    self.finished = []
            self.stage, self.unit, self.detail = event.stage, event.unit, event.detail
            self.done, self.total = float(event.done), float(event.total)
            known = bool(event.total) or event.work_share is not None
            self.elapsed_s, self.eta_s, self.share = event.elapsed_s, event.left_s, event.fraction if known else None
            even = event.work_share is None  # steps that differ in cost have no rate
            self.rate = event.done / event.elapsed_s if even and event.elapsed_s >= 0.2 and event.done else 0.0
            if over:
                self.finished = [*self.finished, list(Finished(event.stage, round(event.elapsed_s, 3), event.state))]
            self.status = status
        self._last = time.monotonic()
        if over:
            if not self._inside:
                self._cancelled.clear()
            self._refresh_static()

    def _receive_stop(self, _message: Mapping[str, Any]) -> None:
        self.cancel()

    def _summary(self) -> str:
        name = self.title or self.stage or "progress"
        spent = sum(elapsed for _, elapsed, _ in self.finished)
        several = len(self.finished) > 1  # one stage takes what the whole takes
        stages = ", ".join(f"{stage} {elapsed:.1f} s" for stage, elapsed, _ in self.finished) if several else ""
        if self.status == "idle":
            return f"{name}: waiting"
        if self.status == "running":
            current = Progress(
                stage=self.stage, done=self.done, total=self.total, unit=self.unit, elapsed_s=self.elapsed_s, eta_s=self.eta_s
            )
            return f"{name}: {current.line()}" if self.title not in ("", self.stage) else current.line()
        words = {"done": "done in", "stopped": "cancelled after"}.get(self.status, "failed after")
        return f"{name}: {words} {spent:.1f} s" + (f" ({stages})" if stages else "")

    def _caption(self) -> str:
        return ""

    def _static_body(self) -> str:
        mark = {"done": "✓ ", "stopped": "■ ", "error": "✕ "}.get(self.status, "")
        return f"<div>{html.escape(mark + self._summary())}</div>"


APPEAR_AFTER_S = 0.4


class NotebookSink:
    """Shows nothing for short work; from `APPEAR_AFTER_S` on, displays a ProgressView in the cell that called.

    Use as a context manager around the whole work, so that several stages end in one finished line.
    """

    def __init__(self, title: str = "") -> None:
        self.view: ProgressView | None = None
        self._title = title
        self._begun = time.monotonic()
        self._before: list[Progress] = []

    def __call__(self, event: Progress, /) -> None:
        """Take one event."""
        if self.view is None:
            if event.state != "running":
                self._before.append(event)
            if time.monotonic() - self._begun < APPEAR_AFTER_S:
                return
            self._appear(event)
        if self.view is not None:
            self.view(event)

    def __enter__(self) -> NotebookSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.view is not None:
            self.view.__exit__(kind, error, trace)

    def _appear(self, current: Progress) -> None:
        self.view = ProgressView(self._title).__enter__()
        for event in self._before:
            if event is not current:
                self.view(event)
        self.view.show()


def notebook_sink(title: str = "") -> NotebookSink:
    """What `progress="auto"` means inside a notebook kernel."""
    return NotebookSink(title)
