"""The caller's end of a request: iterate it, wait for it, cancel it. Dropping it cancels it."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Iterator

from exl2nb.generator.channel import Channel
from exl2nb.generator.request import Chunk, Completion, Token

TICK_S = 0.05  # a wait is never longer than this without Python code running, so that KeyboardInterrupt arrives


class Handle:
    """One running request.

    Iterate it for `Chunk`s (if the caller is slower than the model, a chunk has several tokens), or call `result()`. `cancel()`,
    `close()`, an exception inside the loop and garbage collection all end the request; its pages are free after the engine's current step.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._over = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._over:
            raise StopIteration
        tokens: list[Token] = []
        try:
            self._take(tokens, self._wait())
        except BaseException:
            self.cancel()
            raise
        if not tokens:
            raise StopIteration
        return Chunk("".join([token.text for token in tokens]), tuple(tokens))

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._over:
            raise StopAsyncIteration
        tokens: list[Token] = []
        try:
            self._take(tokens, await self._wait_async())
        except BaseException:
            self.cancel()
            raise
        if not tokens:
            raise StopAsyncIteration
        return Chunk("".join([token.text for token in tokens]), tuple(tokens))

    @property
    def done(self) -> bool:
        """True once the engine is through with the request."""
        return self._channel.ended.is_set()

    @property
    def completion(self) -> Completion | None:
        """The answer, None while it is not complete."""
        return self._channel.completion

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the answer.

        Raises:
            GenerationError: the engine failed on it; the cause is chained. TimeoutError: not done in time; the request goes on.
            KeyboardInterrupt: at once; the request is cancelled.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._channel.ended.wait(TICK_S):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"no answer after {timeout_s} s; the request goes on, cancel() ends it")
        except TimeoutError:
            raise
        except BaseException:
            self.cancel()
            raise
        return self._outcome()

    async def aresult(self) -> Completion:
        """`result` for event loops; cancelling the task cancels the request."""
        while not self._over:
            try:
                await self.__anext__()
            except StopAsyncIteration:
                break
        return self._outcome()

    def cancel(self) -> None:
        """End the request. What was generated stays in `completion`, with finish_reason "cancelled". Harmless when it is over."""
        self._channel.cancelled = True

    close = cancel

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        channel = getattr(self, "_channel", None)
        if channel is not None:
            channel.cancelled = True

    def __repr__(self) -> str:
        channel = self._channel
        state = "running" if not self.done else repr(channel.error) if channel.error else repr(channel.completion)
        return f"Handle({state})"

    def _outcome(self) -> Completion:
        self._over = True
        if self._channel.error is not None:
            raise self._channel.error
        assert self._channel.completion is not None
        return self._channel.completion

    def _wait(self) -> list[Token] | None:
        get = self._channel.items.get
        while True:
            try:
                return get(timeout=TICK_S)
            except queue.Empty:
                continue

    async def _wait_async(self) -> list[Token] | None:
        channel = self._channel
        if channel.waker is None:
            loop, event = asyncio.get_running_loop(), asyncio.Event()
            self._event = event
            channel.waker = lambda: void(loop.call_soon_threadsafe(event.set))
        while True:
            self._event.clear()
            try:
                return channel.items.get_nowait()
            except queue.Empty:
                pass
            try:
                await asyncio.wait_for(self._event.wait(), TICK_S)
            except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
                continue

    def _take(self, tokens: list[Token], item: list[Token] | None) -> None:
        """Add an item and whatever waits behind it; at the end mark the handle as over, and raise what the engine met."""
        while True:
            if item is None:
                self._over = True
                if self._channel.error is not None:
                    raise self._channel.error
                return
            tokens += item
            try:
                item = self._channel.items.get_nowait()
            except queue.Empty:
                return


def void(_: object) -> None:
    """Drop a value."""
