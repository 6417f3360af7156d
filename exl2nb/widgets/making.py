"""Convert to a bitrate and read one prompt from the original and the copy at once. Knows nothing of pages; runs on a worker thread."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import Interrupted
from exl2nb.core.progress import Progress

if TYPE_CHECKING:
    from exl2nb.converter.measurement import Measurement

QUICK = {"rows": 8, "length": 128, "report_rows": 4}
"""Calibration of a first look: seconds on the demo model. A model to keep deserves the converter's own defaults."""
UPDATE_S = 1 / 12


@dataclass(frozen=True)
class Made:
    """A finished copy. measured_kl: on held-out rows, nats per token; None where none were kept."""

    label: str
    llm: Any
    measured_kl: float | None


class Maker:
    """Makes copies of one model, each bitrate once, in a temporary folder that goes with it."""

    def __init__(self, llm: Any, measurement: Measurement, *, demo: bool, options: Mapping[str, Any] | None) -> None:
        self._original, self._measurement, self._demo = llm, measurement, demo
        self._options = dict(QUICK if options is None else options)
        self._ours: list[Any] = []
        self._made: dict[float, Made] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def possible(self) -> bool:
        """Whether there is an original to convert."""
        return self._demo or self._original is not None

    def make(self, bpw: float, stop: threading.Event, tell: Callable[[str, float], None]) -> Made:
        """Convert and load.

        Raises:
            Interrupted: `stop` was set.
        """
        if bpw in self._made:
            return self._made[bpw]
        import exl2nb

        sink = _Sink(stop, tell)
        if self._original is None:
            self._original = exl2nb.demo(progress=sink)
            self._ours.append(self._original)
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="exl2nb-explorer-")
        target = Path(self._folder.name) / f"{bpw:g}bpw-{time.monotonic_ns()}"
        done = exl2nb.convert(self._original.path, target, bpw=bpw, measurement=self._measurement, progress=sink, **self._options)
        llm = exl2nb.load(target, context=min(self._original.context, 2048), progress=None)
        self._ours.append(llm)
        self._made[bpw] = Made(f"{bpw:g} bpw, made here", llm, None if done.quality is None else done.quality.kl)
        return self._made[bpw]

    def read(self, made: Made, prompt: str, max_tokens: int, stop: threading.Event, show: Callable[[str, str], None]) -> None:
        """Stream the most likely continuation from both; `show(original, copy)` some times a second and at the end."""
        texts, problems = ["", ""], []

        def run(place: int, llm: Any) -> None:
            try:
                stream = llm.stream(prompt, max_tokens=max_tokens, temperature=0)
                try:
                    for chunk in stream:
                        texts[place] += str(getattr(chunk, "text", chunk))
                        if stop.is_set():
                            break
                finally:
                    getattr(stream, "close", lambda: None)()
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate((self._original, made.llm))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(UPDATE_S / 2)
            threads[1].join(UPDATE_S / 2)
            show(*texts)
        show(*texts)
        if problems and not stop.is_set():
            raise problems[0]

    def close(self) -> None:
        """Free what was loaded and made here."""
        for llm in self._ours:
            llm.close()
        if any(llm is self._original for llm in self._ours):
            self._original = None
        self._ours, self._made = [], {}
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _Sink:
    """Progress events as (stage, share), not more often than can be read; stops the work when asked to."""

    def __init__(self, stop: threading.Event, tell: Callable[[str, float], None]) -> None:
        self._stop, self._tell, self._last, self._stage = stop, tell, 0.0, ""

    def __call__(self, event: Progress, /) -> None:
        now = time.monotonic()
        if event.stage != self._stage or now - self._last >= UPDATE_S:
            self._tell(event.stage, min(1.0, event.done / event.total) if event.total else 0.0)
            self._last, self._stage = now, event.stage
        if self._stop.is_set() and event.state == "running":
            raise Interrupted("BitrateExplorer: stopped")
