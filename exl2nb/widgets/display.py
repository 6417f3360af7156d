"""The progress sink of a notebook: a ProgressView that appears only when the work takes long enough to be worth a line."""

from __future__ import annotations

import time

from exl2nb.core.progress import Progress
from exl2nb.widgets.progress import ProgressView

APPEAR_AFTER_S = 0.4


class NotebookSink:
    """Shows nothing for short work; from `APPEAR_AFTER_S` on, displays a ProgressView in the cell that called."""

    def __init__(self, title: str = "") -> None:
        self.view = ProgressView(title)
        self._begun = time.monotonic()
        self._shown = False

    def __call__(self, event: Progress, /) -> None:
        """Take one event."""
        if not self._shown and time.monotonic() - self._begun >= APPEAR_AFTER_S:
            self._shown = True
            self.view.show()
        self.view(event)


def notebook_sink(title: str = "") -> NotebookSink:
    """What `progress="auto"` means inside a notebook kernel."""
    return NotebookSink(title)
