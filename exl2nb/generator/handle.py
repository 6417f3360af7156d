"""A caller's handle of a running request: chunks come from the engine thread, cancellation goes to it. Knows neither models nor pages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import overload

from exl2nb.core.log import logger
from exl2nb.core.options import check_range
from exl2nb.generator.request import PLAIN_REPLY, Chunk, Completion, Token
from exl2nb.tokenizer.reply import ReplyDelta, ReplyFormat

_numbers = itertools.count(1)
WAKE_AT_END, WAKE_AT_TOKENS, WAKE_ALWAYS = 0, 1, 2


class Channel:
    """Shared by one sequence of the engine and one handle of a caller.

    The engine puts lists of tokens and at last a completion or an error; nothing follows that. The caller sets `cancelled`, which the
    engine reads at every step. Either side may be dropped: the other then ends its part.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)  # of the request, in this process
        self.items: queue.SimpleQueue[list[Token] | None] = queue.SimpleQueue()
        self.cancelled = False
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self.ended = False
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes `wait_end`
        self.waker: Callable[[], None] | None = None  # called after every item, for callers that cannot block on the queue
        self.wakes = WAKE_ALWAYS  # what `waker` is called for: the end, tokens too, progress too
        self.progress = (0, 0)  # prompt tokens in the cache, of how many; (0, 0) while the request waits

    def put(self, tokens: list[Token]) -> None:
        """Engine: hand tokens over."""
        self.items.put(tokens)
        if self.wakes and self.waker is not None:
            self._wake()

    def report_progress(self, done: int, total: int) -> None:
        """Engine: `done` of `total` prompt tokens are in the cache."""
        self.progress = (done, total)
        if self.wakes == WAKE_ALWAYS:
            self._wake()

    def end(self, outcome: Completion | BaseException) -> None:
        """Engine: the request is over. Only the first call counts."""
        if self.ended:
            return
        if isinstance(outcome, Completion):
            self.completion = outcome
        else:
            self.error = outcome
        self.ended = True
        self._end.put(None)
        self.items.put(None)
        self._wake()

    def wait_end(self, timeout_s: float) -> bool:
        """Caller: whether the request is over, after waiting at most `timeout_s`."""
        if not self.ended:
            try:
                self._end.get(timeout=timeout_s)
                self._end.put(None)  # for other waiters
            except queue.Empty:
                pass
        return self.ended

    def _wake(self) -> None:
        if self.waker is not None:
            try:
                self.waker()
            except RuntimeError:  # the caller's event loop is closed, so nothing reads this any more
                self.waker, self.cancelled = None, True
            except Exception:  # whatever the caller's function raises must not end the engine's thread
                self.waker = None
                logger.exception("on_event of a request failed; it is not called any more")


# ---- The caller's end of a request: iterate it, wait for it, cancel it. Dropping it cancels it.

TICK_S = 0.05  # a wait is never longer than this without Python code running, so that KeyboardInterrupt arrives
LOOP_TICK_S = 1.0  # in an event loop the waker ends the wait; hundreds of requests in a queue must not wake the loop


class Handle:
    """One running request.

    Iterate it for `Chunk`s (if the caller is slower than the model, a chunk has several tokens), or call `result()`. `cancel()`,
    `close()`, an exception inside the loop and garbage collection all end the request; its pages are free after the engine's current step.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._over = False
        self._loop_waker: _LoopWaker | None = None
        self.reply_format: ReplyFormat = PLAIN_REPLY  # of the request; for `deltas`
        self.owner: object = None  # kept alive as long as this handle: the loaded model
        self.companions: list[Handle] = []  # of the other sequences that this request runs on; dropping them would cancel it

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        tokens: list[Token] = []
        try:
            if not self._over:
                self._take(tokens, self._wait())
        except BaseException:
            self.cancel()
            raise
        if not tokens:
            self._raise_error()
            raise StopIteration
        return Chunk("".join([token.text for token in tokens]), tuple(tokens))

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        tokens: list[Token] = []
        try:
            if not self._over:
                self._take(tokens, await self._wait_async())
        except BaseException:
            self.cancel()
            raise
        if not tokens:
            self._raise_error()
            raise StopAsyncIteration
        return Chunk("".join([token.text for token in tokens]), tuple(tokens))

    async def achunks(self, interval_s: float = 0.0) -> AsyncIterator[Chunk]:
        """The chunks for event loops, with less work per token: after a chunk, tokens collect for up to `interval_s`.

        The first chunk comes at once, the last one when the request ends. All handles of an interval collect to the same moments.
        """
        channel, waker = self._channel, _LoopWaker(asyncio.get_running_loop())
        channel.waker, channel.wakes = waker.wake, WAKE_AT_TOKENS
        try:
            while not self._over:
                woken = waker.listen()
                if (chunk := self.poll()) is not None:
                    yield chunk
                    if interval_s and not self._over:
                        await waker.rest(interval_s, [channel])
                elif not self._over:
                    await woken
        except BaseException:
            self.cancel()
            raise
        self._raise_error()

    def deltas(self) -> Iterator[ReplyDelta]:
        """The answer of a chat as it comes, taken apart: reasoning, content, tool calls and their arguments."""
        parser = self.reply_format.parser()
        for chunk in self:
            yield from parser.feed(self.reply_format.text(chunk.tokens))
        yield from parser.finish()

    async def adeltas(self) -> AsyncIterator[ReplyDelta]:
        """`deltas` for event loops."""
        parser = self.reply_format.parser()
        async for chunk in self:
            for delta in parser.feed(self.reply_format.text(chunk.tokens)):
                yield delta
        for delta in parser.finish():
            yield delta

    @property
    def number(self) -> int:
        """Of the request, as `llm.cache.snapshot()` names it."""
        return self._channel.number

    @property
    def progress(self) -> tuple[int, int]:
        """Prompt tokens in the cache, of how many; (0, 0) while the request waits."""
        return self._channel.progress

    @property
    def outcome(self) -> Completion | BaseException:
        """The answer, or the error; only when `done`."""
        outcome = self._channel.error or self._channel.completion
        assert outcome is not None, "the request is not done"
        return outcome

    @property
    def done(self) -> bool:
        """True once the request has ended."""
        return self._channel.ended

    @property
    def completion(self) -> Completion | None:
        """The answer, None while it is not complete."""
        return self._channel.completion

    @property
    def over(self) -> bool:
        """True once everything was read."""
        return self._over

    def poll(self) -> Chunk | None:
        """The tokens that are ready, without waiting; None where there are none, also when the request is over."""
        tokens: list[Token] = []
        if not self._over:
            with contextlib.suppress(queue.Empty):
                self._take(tokens, self._channel.items.get_nowait())
        return Chunk("".join([token.text for token in tokens]), tuple(tokens)) if tokens else None

    def on_event(self, call: Callable[[], None]) -> None:
        """Call `call` on the engine thread after every change: tokens, progress, the end. It must not block."""
        self._channel.waker, self._channel.wakes = call, WAKE_ALWAYS

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the answer.

        Raises:
            GenerationError: the engine failed on it; the cause is chained. TimeoutError: not done in time; the request goes on.
            KeyboardInterrupt: at once; the request is cancelled.
        """
        if timeout_s is not None:
            check_range("timeout_s", timeout_s, 0.0, 1e9, where="result")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._channel.wait_end(TICK_S):
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
        self._raise_error()
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
        if self._loop_waker is None or self._loop_waker.loop is not asyncio.get_running_loop():
            self._loop_waker = _LoopWaker(asyncio.get_running_loop())
            channel.waker, channel.wakes = self._loop_waker.wake, WAKE_AT_TOKENS
        while True:
            woken = self._loop_waker.listen()
            try:
                return channel.items.get_nowait()
            except queue.Empty:
                await asyncio.wait([woken], timeout=LOOP_TICK_S)  # not wait_for: before Python 3.12 that can swallow a cancellation

    def _raise_error(self) -> None:
        if self._over and self._channel.error is not None:
            raise self._channel.error

    def _take(self, tokens: list[Token], item: list[Token] | None) -> None:
        """Add an item and those queued after it; at the end mark the handle as over."""
        while True:
            if item is None:
                self._over = True
                self._channel.items.put(None)  # for another thread that waits on the same handle
                return
            tokens += item
            try:
                item = self._channel.items.get_nowait()
            except queue.Empty:
                return


class _LoopWaker:
    """Wakes a coroutine from another thread. Knows nothing of the handle, which must be free to be dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._woken: asyncio.Future[None] = loop.create_future()

    def listen(self) -> asyncio.Future[None]:
        """A future that is done at the next `wake`."""
        if self._woken.done():
            self._woken = self.loop.create_future()
        return self._woken

    def wake(self) -> None:
        """From any thread; RuntimeError when the loop is closed."""
        self.loop.call_soon_threadsafe(self._set)

    async def rest(self, interval_s: float, channels: Sequence[Channel]) -> None:
        """Wait for the next multiple of `interval_s`, or for the end of a request. Tokens of these channels do not wake the loop before."""
        loop, woken = self.loop, self.listen()
        for channel in channels:
            channel.wakes = WAKE_AT_END
        timer = loop.call_at((loop.time() // interval_s + 1) * interval_s, self._set)
        try:
            if not any([channel.ended for channel in channels]):
                await woken
        finally:
            timer.cancel()
            for channel in channels:
                channel.wakes = WAKE_AT_TOKENS

    def _set(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)


# ---- Several requests together: their chunks as they arrive, each with the number of its request. Knows no engine.


class Handles(Sequence[Handle]):
    """The handles of requests that were made together, in order; `handles[i]` is one of them.

    Iterate `chunks()` for (number of the request, `Chunk`) in the order in which they come, or call `results()`. `cancel()`, an exception
    inside the loop and garbage collection end all requests.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     both = llm.stream(["It was", "The old man"], max_tokens=4, temperature=0)
        ...     texts = ["", ""]
        ...     for number, chunk in both.chunks():
        ...         texts[number] += chunk.text
        ...     texts == [completion.text for completion in both.results()]
        True
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = list(handles)
        self._events: queue.SimpleQueue[None] = queue.SimpleQueue()
        for handle in self._handles:
            handle.on_event(partial(self._events.put, None))

    @overload
    def __getitem__(self, index: int) -> Handle: ...
    @overload
    def __getitem__(self, index: slice) -> list[Handle]: ...
    def __getitem__(self, index: int | slice) -> Handle | list[Handle]:
        return self._handles[index]

    def __len__(self) -> int:
        return len(self._handles)

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        """What comes, and from which request; ends when all have ended.

        Raises:
            GenerationError: the engine failed on one of them; all are cancelled.
        """
        open_ = dict(enumerate(self._handles))
        try:
            while open_:
                yield from self._poll(open_)
                if open_:
                    self._wait(TICK_S)  # short, so that a KeyboardInterrupt is handled
        finally:
            if open_:
                self.cancel()

    async def achunks(self, interval_s: float = 0.0) -> AsyncIterator[tuple[int, Chunk]]:
        """`chunks` for event loops; after some have come, tokens collect for up to `interval_s`, see `Handle.achunks`."""
        open_, waker = dict(enumerate(self._handles)), _LoopWaker(asyncio.get_running_loop())
        for handle in self._handles:
            handle._channel.waker, handle._channel.wakes = waker.wake, WAKE_AT_TOKENS
        try:
            while open_:
                woken, came = waker.listen(), False
                for item in self._poll(open_):
                    came = True
                    yield item
                if open_ and came and interval_s:
                    await waker.rest(interval_s, [handle._channel for handle in open_.values()])
                elif open_ and not came:
                    await woken
        finally:
            if open_:
                self.cancel()

    def results(self, timeout_s: float | None = None) -> list[Completion]:
        """Wait for all answers; errors as in `Handle.result`. If waiting is interrupted, all are cancelled."""
        try:
            return [handle.result(timeout_s) for handle in self._handles]
        except TimeoutError:
            raise
        except BaseException:
            self.cancel()
            raise

    async def aresults(self) -> list[Completion]:
        """`results` for event loops."""
        try:
            return [await handle.aresult() for handle in self._handles]
        except BaseException:
            self.cancel()
            raise

    @property
    def done(self) -> bool:
        """True once all of them have ended."""
        return all(handle.done for handle in self._handles)

    def cancel(self) -> None:
        """End all requests."""
        for handle in self._handles:
            handle.cancel()

    close = cancel

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        return f"Handles({len(self)} requests, {sum(handle.done for handle in self._handles)} done)"

    def _wait(self, timeout_s: float) -> bool:
        """Whether an event came since the last call, after waiting at most `timeout_s`."""
        happened = False
        try:
            self._events.get(timeout=timeout_s)
            happened = True
            while True:
                self._events.get_nowait()
        except queue.Empty:
            return happened

    @staticmethod
    def _poll(open_: dict[int, Handle]) -> Iterator[tuple[int, Chunk]]:
        for number, handle in list(open_.items()):
            chunk = handle.poll()
            if chunk is not None:
                yield number, chunk
            if handle.over:
                del open_[number]
                handle.result()  # raises what the engine failed on
