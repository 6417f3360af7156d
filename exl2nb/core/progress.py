"""The one progress protocol: long work emits `Progress` events to a sink. Knows nothing of widgets, or of terminals beyond a stream."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TextIO

from exl2nb.core.errors import OptionError

__all__ = ["Meter", "Progress", "SilentSink", "Sink", "TextSink", "in_notebook", "showing"]

NOTEBOOK_SINK = "exl2nb.widgets.progress:notebook_sink"
"""Where "auto" finds the sink of a notebook: a name, looked up when it is needed, so that this floor imports nothing above it."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One event.

    stage: short name of the work ("load", "measure", "quantize"). done, total: in `unit`s; total 0: unknown. detail: a line of text.
    elapsed_s: since the stage began. eta_s: seconds left in the stage, None while unknown. state: "running", "done", "error", "cancelled".
    data: stage-specific plain values (numbers, strings, lists) for programs.
    """

    stage: str
    done: float = 0
    total: float = 0
    unit: str = ""
    detail: str = ""
    elapsed_s: float = 0.0
    eta_s: float | None = None
    state: str = "running"
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def fraction(self) -> float:
        """Share done, 0..1 (0 while the total is unknown)."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    def line(self) -> str:
        """As plain text: one line, no control characters."""
        count = f"{self.done:g}/{self.total:g}" if self.total else f"{self.done:g}"
        eta = f", {self.eta_s:.0f} s left" if self.eta_s is not None and self.state == "running" else ""
        text = f"{self.stage}: {count} {self.unit}".rstrip()
        return f"{text} ({self.elapsed_s:.1f} s{eta}){'  ' + self.detail if self.detail else ''}"


class Sink(Protocol):
    """Receives events: any function of one argument is a sink."""

    def __call__(self, event: Progress, /) -> None:
        """Take one event; must return soon."""
        ...


class SilentSink:
    """Takes events and does nothing."""

    def __call__(self, event: Progress, /) -> None:
        """Take one event."""


class TextSink:
    """Writes one line that stays put on a terminal; a line at the start and end of each stage elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._live = bool(getattr(self._stream, "isatty", lambda: False)())
        self._stage, self._width, self._last = "", 0, 0.0

    def __call__(self, event: Progress, /) -> None:
        """Write one event."""
        now = time.monotonic()
        new, final = event.stage != self._stage, event.state != "running"
        self._stage = "" if final else event.stage
        if self._live:
            if not (new or final) and now - self._last < 0.1:
                return
            bar = "#" * round(20 * event.fraction)
            text = f"[{bar:<20}] {event.line()}"[:200] if event.total else event.line()
            self._stream.write("\r" + text.ljust(self._width) + ("\n" if final else ""))
            self._width = 0 if final else len(text)
        elif final:
            self._stream.write(event.line() + "\n")
        else:
            return
        self._last = now
        self._stream.flush()


class Meter:
    """Counts work in one stage and emits events with elapsed time and ETA. Use as a context manager.

    Example:
        >>> seen = []
        >>> with Meter("measure", total=2, unit="layers", sink=seen.append) as meter:
        ...     meter.step(detail="layer 0"); meter.step(detail="layer 1")
        >>> [(e.done, e.state) for e in seen]
        [(0, 'running'), (1, 'running'), (2, 'running'), (2, 'done')]
    """

    def __init__(self, stage: str, *, total: float = 0, unit: str = "", sink: Sink | None = None) -> None:
        self._sink: Sink = sink if sink is not None else SilentSink()
        self._event = Progress(stage=stage, total=total, unit=unit)
        self._start = time.monotonic()

    def __enter__(self) -> Meter:
        self._start = time.monotonic()
        self._sink(self._event)
        return self

    def step(self, amount: float = 1, *, detail: str = "", **data: Any) -> None:
        """Add `amount` to done and emit."""
        self.at(self._event.done + amount, detail=detail, **data)

    def at(self, done: float, *, detail: str = "", **data: Any) -> None:
        """Set done and emit."""
        elapsed = time.monotonic() - self._start
        eta = elapsed / done * (self._event.total - done) if done and self._event.total else None
        self._event = replace(self._event, done=done, detail=detail, elapsed_s=elapsed, eta_s=eta, data=data)
        self._sink(self._event)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        state = "done" if kind is None else "cancelled" if kind.__name__ in ("KeyboardInterrupt", "Interrupted") else "error"
        self._sink(replace(self._event, state=state, elapsed_s=time.monotonic() - self._start, eta_s=None))


def in_notebook() -> bool:
    """True inside a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def showing(progress: Sink | Literal["auto"] | None, title: str = "") -> Iterator[Sink]:
    """The sink that a `progress=` argument means, for the time of one piece of work.

    Args:
        progress: a sink is used as it is. None: silent. "auto": where the caller sees it, a widget in a notebook, a line on a
            terminal, nothing elsewhere (a script whose output is read by programs).
        title: of the whole work, for sinks that show one.

    Raises:
        OptionError: none of these.

    Example:
        >>> with showing(None) as sink, Meter("load", sink=sink):
        ...     pass
    """
    if progress is None:
        sink: Any = SilentSink()
    elif callable(progress):
        sink = progress
    elif progress != "auto":
        raise OptionError(f"progress is {progress!r}; expected a function of one event, 'auto' or None")
    elif in_notebook():
        module, _, name = NOTEBOOK_SINK.partition(":")
        sink = getattr(importlib.import_module(module), name)(title)
    else:
        sink = TextSink() if getattr(sys.stderr, "isatty", lambda: False)() else SilentSink()
    with sink if hasattr(sink, "__enter__") else nullcontext():
        yield sink
