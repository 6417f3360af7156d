"""The line between the engine thread and one caller: chunks go one way, a cancel flag the other. Knows neither models nor pages."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable

from exl2nb.core.flag import Flag
from exl2nb.core.log import logger
from exl2nb.generator.request import Completion, Token

_numbers = itertools.count(1)


class Channel:
    """Shared by one sequence of the engine and one handle of a caller.

    The engine puts lists of tokens and at last a completion or an error; nothing follows that. The caller sets `cancelled`, which the
    engine reads at every step. Each side may be dropped without the other noticing more than that.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)  # of the request, in this process
        self.items: queue.SimpleQueue[list[Token] | None] = queue.SimpleQueue()
        self.cancelled = False
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self.ended = Flag()
        self.waker: Callable[[], None] | None = None  # told about every item; for those who cannot wait on this queue
        self.progress = (0, 0)  # prompt tokens in the cache, of how many; (0, 0) while the request waits
        self.watched = False  # the waker wants to hear of progress too

    def put(self, tokens: list[Token]) -> None:
        """Engine: hand tokens over."""
        self.items.put(tokens)
        if self.waker is not None:
            self._wake()

    def note(self, done: int, total: int) -> None:
        """Engine: so much of the prompt is in the cache."""
        self.progress = (done, total)
        if self.watched:
            self._wake()

    def end(self, outcome: Completion | BaseException) -> None:
        """Engine: the request is over. Only the first call counts."""
        if self.ended.is_set():
            return
        if isinstance(outcome, Completion):
            self.completion = outcome
        else:
            self.error = outcome
        self.ended.set()
        self.items.put(None)
        self._wake()

    def _wake(self) -> None:
        if self.waker is not None:
            try:
                self.waker()
            except RuntimeError:  # the caller's event loop is gone, so nobody reads this any more
                self.waker, self.cancelled = None, True
            except Exception:
                self.waker = None
                logger.exception("a function that wanted news of a request failed; it is not called any more")
