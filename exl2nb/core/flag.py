"""An event that an interrupt cannot break.

`threading.Event` is Python code around a lock: a KeyboardInterrupt inside it, in the main thread, can leave that lock locked, and whoever
sets or awaits the event then waits for ever. Here every step is one assignment or one call of a lock.
"""

from __future__ import annotations

import threading


class Flag:
    """As `threading.Event`, for one thread or several that wait in ticks."""

    def __init__(self) -> None:
        self._set, self._gate = False, threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        """From now on it is set."""
        self._set = True
        self._open()

    def clear(self) -> None:
        """No longer."""
        self._set = False
        self._gate.acquire(blocking=False)

    def is_set(self) -> bool:
        """Whether it is."""
        return self._set

    def wait(self, timeout_s: float) -> bool:
        """Until it is set, or so long; whether it is. Now and then earlier: look again."""
        if not self._set and self._gate.acquire(timeout=timeout_s):
            self._open()  # for others who wait
        return self._set

    def _open(self) -> None:
        # a context manager of Python code could be interrupted, too
        try:  # noqa: SIM105
            self._gate.release()
        except RuntimeError:  # it is open
            pass
