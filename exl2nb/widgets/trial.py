"""Trial: a number that the page and Python count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import traitlets as t

from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.protocol import Status


class TrialState(TypedDict):
    """Synced traits of Trial."""

    status: Status
    error: str
    height: str
    count: int
    _protocol: int
    _static: bool


class CountUp(TypedDict):
    """The reader pressed the button."""

    type: Literal["count_up"]
    by: int


class Trial(ExlWidget):
    """A number with a button that raises it.

    Traits, also keywords (synced with the page both ways):
        count: the number. Default 0.

    Example:
        >>> Trial(count=3)
        Trial(3)
    """

    _bundle, _state_type = "trial", TrialState

    count = t.Int(0).tag(sync=True, option=True)

    def _receive_count_up(self, message: Mapping[str, Any]) -> None:
        self.count += int(message["by"])

    def _summary(self) -> str:
        return f"Trial({self.count})"
