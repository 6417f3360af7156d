"""The one progress protocol: long work emits `Progress` events to a sink. Knows nothing of widgets, or of terminals beyond a stream."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TextIO

from exl2nb.core.errors import OptionError

__all__ = ["Forecast", "Meter", "Phase", "Progress", "SilentSink", "Sink", "TextSink", "in_notebook", "showing"]

NOTEBOOK_SINK = "exl2nb.widgets.progress_view:notebook_sink"
"""Where "auto" finds the sink of a notebook: a name, looked up when it is needed, so that this floor imports nothing above it."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One event.

    stage: short name of the work ("load", "measure", "quantize"). done, total: in `unit`s; total 0: unknown. detail: a line of text.
    elapsed_s: since the stage began. eta_s: seconds left in the stage, None while unknown. state: "running", "done", "error", "cancelled".
    share: of the stage's time, 0..1, where its steps differ in cost. work_share, work_eta_s: of all stages together, where that is known.
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
    share: float | None = None
    work_share: float | None = None
    work_eta_s: float | None = None
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def fraction(self) -> float:
        """Share done, 0..1: of the whole work where that is known, else of the stage (0 while the total is unknown)."""
        if self.work_share is not None:
            return self.work_share
        return self.share if self.share is not None else min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left, of the whole work where that is known, else of the stage."""
        return self.eta_s if self.work_eta_s is None else self.work_eta_s

    def line(self) -> str:
        """As plain text: one line, no control characters."""
        count = f"{self.done:g}/{self.total:g}" if self.total else f"{self.done:g}"
        eta = f", {self.left_s:.0f} s left" if self.left_s is not None and self.state == "running" else ""
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


@dataclass(frozen=True)
class Phase:
    """Steps of a stage that take about equally long. cost: of one step, in a unit that all phases share."""

    stage: str
    steps: float
    cost: float = 1.0
    name: str = ""


class Forecast:
    """Share done and seconds left of work whose steps differ in cost.

    The mean of a phase replaces its cost after its first step. Until then its cost counts, at the seconds per cost of what is done.

    Args:
        phases: in running order. A phase before the one that runs counts as finished, so a stage may be skipped.

    Example:
        >>> forecast = Forecast([Phase("measure", 4, 1, "forward"), Phase("measure", 4, 10, "backward"), Phase("write", 1, 2)])
        >>> forecast.took("measure", 2.0, steps=4, name="forward")
        >>> forecast.left_s("measure"), forecast.left_s(), round(forecast.share(), 2)
        (20.0, 21.0, 0.09)
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self._phases = tuple(phases)
        self._steps, self._seconds = [0.0] * len(self._phases), [0.0] * len(self._phases)
        self._at = 0

    def expect(self, stage: str, steps: float) -> None:
        """Say how many steps the phases of a stage have, once that is known."""
        self._phases = tuple(replace(phase, steps=steps) if phase.stage == stage else phase for phase in self._phases)

    def took(self, stage: str, seconds: float, *, steps: float = 1, name: str = "") -> None:
        """Steps of a phase are over; those of a phase that was not announced are left out."""
        for at, phase in enumerate(self._phases):
            if (phase.stage, phase.name) == (stage, name):
                self._at = max(self._at, at)
                self._steps[at] += steps
                self._seconds[at] += seconds

    def left_s(self, stage: str = "") -> float | None:
        """Seconds left in a stage ("": in all of them); None before the first step."""
        cost = sum(phase.cost * steps for phase, steps in zip(self._phases, self._steps))
        if not cost:
            return None
        rate, left = sum(self._seconds) / cost, 0.0
        for phase, steps, seconds in list(zip(self._phases, self._steps, self._seconds))[self._at :]:
            if stage in ("", phase.stage):
                left += max(0.0, phase.steps - steps) * (seconds / steps if steps else phase.cost * rate)
        return left

    def share(self, stage: str = "") -> float:
        """Share of the time that is over, 0..1."""
        left = self.left_s(stage)
        spent = sum(seconds for phase, seconds in zip(self._phases, self._seconds) if stage in ("", phase.stage))
        return 0.0 if left is None else spent / (spent + left) if spent + left else 1.0


class Meter:
    """Counts work in one stage and emits events with elapsed time and ETA. Use as a context manager.

    Args:
        stage, total, unit: as in `Progress`.
        sink: takes the events.
        forecast: of the whole work that the stage is a part of; its events then say what is left of that, too.

    Example:
        >>> seen = []
        >>> with Meter("measure", total=2, unit="layers", sink=seen.append) as meter:
        ...     meter.step(detail="layer 0"); meter.step(detail="layer 1")
        >>> [(e.done, e.state) for e in seen]
        [(0, 'running'), (1, 'running'), (2, 'running'), (2, 'done')]
    """

    def __init__(self, stage: str, *, total: float = 0, unit: str = "", sink: Sink | None = None, forecast: Forecast | None = None) -> None:
        self._sink: Sink = sink if sink is not None else SilentSink()
        self._event = Progress(stage=stage, total=total, unit=unit)
        self._whole = forecast
        self._forecast = forecast or Forecast([Phase(stage, total)])
        self._start = self._latest = time.monotonic()

    def __enter__(self) -> Meter:
        self._start = self._latest = time.monotonic()
        self._sink(replace(self._event, **self._estimates()))
        return self

    def step(self, amount: float = 1, *, detail: str = "", phase: str = "", **data: Any) -> None:
        """Add `amount` to done and emit. phase: which of the forecast's phases of this stage it belongs to."""
        self.at(self._event.done + amount, detail=detail, phase=phase, **data)

    def at(self, done: float, *, detail: str = "", phase: str = "", **data: Any) -> None:
        """Set done and emit."""
        now, event = time.monotonic(), self._event
        self._forecast.took(event.stage, now - self._latest, steps=done - event.done, name=phase)
        self._latest = now
        self._event = replace(event, done=done, detail=detail, elapsed_s=now - self._start, data=data, **self._estimates())
        self._sink(self._event)

    def _estimates(self) -> dict[str, float | None]:
        stage, whole, shares = self._event.stage, self._whole, dict[str, float | None]()
        if self._event.total:
            shares = {"eta_s": self._forecast.left_s(stage), "share": self._forecast.share(stage)}
        return shares if whole is None else {**shares, "work_eta_s": whole.left_s(), "work_share": whole.share()}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        state = "done" if kind is None else "cancelled" if kind.__name__ in ("KeyboardInterrupt", "Interrupted") else "error"
        self._sink(replace(self._event, state=state, elapsed_s=time.monotonic() - self._start, eta_s=None, work_eta_s=None))


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
