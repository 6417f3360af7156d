"""The kernel half of the streaming protocol: numbered deltas at most 30 times a second, snapshots on request. Knows no widgets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from exl2nb.widgets.protocol import Delta, Done, Snapshot, Stats

FLUSH_S = 1 / 30
"""Least time between two deltas. The server drops messages above 1,000/s; 30/s is one per drawn frame or two, 35 ms from token to page."""


class Feed:
    """Collects the items of one run after the other and sends them in numbered deltas.

    A run is opened by `begin`, filled by `add`, closed by `finish`; `snapshot` may come at any time, from any thread. Messages leave under
    the lock, so the browser sees them in the order of their numbers.

    Args:
        send: takes a message. brief, whole: items as a delta and as a snapshot carry them; as they are, where nothing is said.
    """

    def __init__(
        self,
        send: Callable[[Any], None],
        *,
        brief: Callable[[list[Any]], list[Any]] = list,
        whole: Callable[[list[Any]], list[Any]] = list,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._send, self._brief, self._whole, self._clock = send, brief, whole, clock
        self._lock = threading.Lock()
        self._run, self._seq, self._prompt, self._ended = 0, -1, "", True
        self._items: list[Any] = []
        self._sent = 0
        self._recorded: Stats | None = None
        self._last_flush = self._begun = self._first = self._latest = 0.0

    @property
    def items(self) -> list[Any]:
        """Copy of all items of this run."""
        with self._lock:
            return list(self._items)

    def at(self, run: Any, place: Any) -> Any:
        """One item of run `run`; None where there is none."""
        with self._lock:
            known = run == self._run and isinstance(place, int) and not isinstance(place, bool) and 0 <= place < len(self._items)
            return self._items[place] if known else None

    @property
    def stats(self) -> Stats:
        """Count, decode speed and time to the first item of this run."""
        with self._lock:
            return self._stats()

    def begin(self, prompt: str = "") -> None:
        """Open the next run and tell the browser to clear."""
        with self._lock:
            self._run, self._seq, self._prompt, self._ended = self._run + 1, -1, prompt, False
            self._items, self._sent, self._recorded = [], 0, None
            self._begun, self._last_flush, self._first, self._latest = self._clock(), 0.0, 0.0, 0.0
            self._send(self._snapshot())

    def load(self, prompt: str, items: Sequence[Any], stats: Stats) -> None:
        """Take over a finished run from elsewhere (a saved result)."""
        with self._lock:
            self._prompt, self._items, self._sent, self._recorded = prompt, list(items), len(items), stats
            self._send(self._snapshot())

    def add(self, items: Sequence[Any]) -> None:
        """Append items; sends a delta when the last one is 1/30 s old. No timer: a slow source sends each item at once."""
        with self._lock:
            now = self._clock()
            if items and not self._items:
                self._first = now
            self._latest = now
            self._items.extend(items)
            if now - self._last_flush >= FLUSH_S:
                self._flush(now)

    @property
    def rest_s(self) -> float:
        """Seconds until the next delta may leave."""
        return max(0.0, self._last_flush + FLUSH_S - self._clock())

    def finish(self, reason: str, *, speed: tuple[float, float] | None = None) -> Stats:
        """Send the remaining items and `done`; returns the final numbers.

        Args:
            reason: why the run is over.
            speed: tokens per second and seconds to the first one, where the source has measured them itself.
        """
        with self._lock:
            self._flush(self._clock())
            self._ended, self._items = True, self._whole(self._items)
            if speed is not None:
                self._recorded = Stats(n=len(self._items), tps=round(speed[0], 2), ttft_s=round(speed[1], 4))
            stats = self._stats()
            self._send(Done(type="done", run=self._run, seq=self._seq, reason=reason, stats=stats))
            return stats

    def snapshot(self) -> None:
        """Send everything so far; answers `ready` and `resync`."""
        with self._lock:
            self._flush(self._clock())  # so that a sequence number means the same items everywhere, even if this snapshot is lost
            self._send(self._snapshot())

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            type="snapshot", run=self._run, seq=self._seq, prompt=self._prompt, items=self._whole(self._items), stats=self._stats()
        )

    def _flush(self, now: float) -> None:
        fresh = self._items[self._sent :]
        if not fresh:
            return
        self._seq, self._sent, self._last_flush = self._seq + 1, len(self._items), now
        self._send(Delta(type="delta", run=self._run, seq=self._seq, items=self._brief(fresh), stats=self._stats()))

    def _stats(self) -> Stats:
        if self._recorded is not None:
            return self._recorded
        n = len(self._items)
        span = self._latest - self._first
        return Stats(
            n=n, tps=round((n - 1) / span, 2) if n > 1 and span > 0 else 0.0, ttft_s=round(self._first - self._begun, 4) if n else None
        )
