"""The progress sink of a notebook: a ProgressView that appears only when the work takes long enough to be worth a line."""

from __future__ import annotations

import time
from types import TracebackType

from exl2nb.core.progress import Progress
from exl2nb.widgets.progress import ProgressView

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
