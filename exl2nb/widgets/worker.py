"""A widget that works in the background: start, stop, wait, close. What it works at is its own."""

from __future__ import annotations

from typing import TypeVar

from exl2nb.widgets.background import Background
from exl2nb.widgets.base import ExlWidget

_Self = TypeVar("_Self", bound="WorkingWidget")


class WorkingWidget(ExlWidget):
    """Base of widgets whose button starts a run. Subclasses set `_background` before anything else: `close` needs it."""

    _background: Background

    def stop(self) -> None:
        """Ask what runs to end; what is written stays. Returns at once."""
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
