"""Many requests as one stream of events, tagged by id. The caller's side; knows neither models nor pages."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from exl2nb.core.errors import OptionError
from exl2nb.core.options import shown
from exl2nb.generator.handle import TICK_S, Handle
from exl2nb.generator.request import Completion, Token


class Submit(Protocol):
    """Queues one request; errors of the request itself are raised by the call."""

    def __call__(self, prompt: Any, options: dict[str, Any], *, stream: bool, group: object) -> Handle: ...  # noqa: D102


@runtime_checkable
class JobRunner(Protocol):
    """What a job asks of a loaded model."""

    def submit_for_job(self, prompt: Any, options: dict[str, Any], *, stream: bool, group: object = None) -> Handle:
        """Queue one request."""
        ...


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to one request of a job.

    id: of the request. serial: number of the event in the job. stage: "started" (it has pages), "prefill" (`prefilled` of `prompt_tokens`
    are in the cache), "streaming" (`text` and `tokens` are new), "finished" (`completion` has the whole answer, its timings and its finish
    reason; text and tokens hold what was not handed out before) or "failed" (`error`).
    """

    id: Hashable
    serial: int
    stage: str
    text: str = ""
    tokens: tuple[Token, ...] = ()
    prefilled: int = 0
    prompt_tokens: int = 0
    completion: Completion | None = None
    error: BaseException | None = None

    @property
    def over(self) -> bool:
        """True for the last event of a request."""
        return self.stage in ("finished", "failed")

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; None before."""
        return self.completion.finish_reason if self.completion else None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the new tokens."""
        return tuple(token.id for token in self.tokens)

    @property
    def token_probs(self) -> tuple[float, ...]:
        """Their probabilities under the model, before any filter."""
        return tuple(token.prob for token in self.tokens)

    def __str__(self) -> str:
        return self.text


class Job:
    """Requests that run together; iterate it for `Event`s of all of them, as they come.

    Requests may be added at any time, also inside the loop. The iteration ends when every request is over; a failed one is an event, not
    an exception. Leaving the loop early and dropping the job cancels what still runs, as does `cancel()`. `async for` works too.

    A job shares the model fairly with other callers: its requests have one turn at a time, however many they are.

    Args:
        submit: queues a request. Use `llm.job()` or `llm.batch(prompts)`, or give a loaded model: `Job(llm)`.

    Example:
        >>> import exl2nb as ex
        >>> with ex.demo(progress=None) as llm:
        ...     job = llm.batch(["It was", "She said"], max_tokens=4, temperature=0)
        ...     parts = {0: "", 1: ""}
        ...     for event in job:
        ...         parts[event.id] += event.text
        ...     parts == {id: completion.text for id, completion in job.completions.items()}
        True
    """

    def __init__(self, submit: Submit | JobRunner) -> None:
        self._submit: Submit = submit.submit_for_job if isinstance(submit, JobRunner) else submit
        if not callable(self._submit):
            raise OptionError(f"Job: {str(submit)[:80]!r} runs no requests; expected a loaded model")
        self._open: dict[Hashable, Handle] = {}
        self._stages: dict[Hashable, str] = {}
        self._progress: dict[Hashable, tuple[int, int]] = {}
        self._ready: queue.SimpleQueue[Hashable] = queue.SimpleQueue()
        self._serial, self._next_id = 0, 0
        self.group = object()  # whose turn the requests share
        self.completions: dict[Hashable, Completion] = {}
        self.errors: dict[Hashable, BaseException] = {}

    def add(self, prompt: Any, *, id: Hashable = None, stream: bool = True, **options: Any) -> Hashable:
        """Queue a request.

        Args:
            prompt: text or token ids.
            id: its tag, used once in the job; None = 0, 1, 2, ...
            stream: False: no "streaming" events, the whole answer comes at the end.
            options: those of `LLM.generate`.

        Returns:
            The id.

        Raises:
            OptionError, ContextOverflow: the request cannot run; says why. EngineClosed: closed.
        """
        id = self.reserve(id)
        try:
            handle = self._submit(prompt, options, stream=stream, group=self.group)
        except BaseException:
            del self._stages[id]
            raise
        self.take(id, handle)
        return id

    def reserve(self, id: Hashable) -> Hashable:
        """An id that no other request of the job has or gets; None: the next number. Raises OptionError."""
        while id is None:
            id, self._next_id = (self._next_id if self._next_id not in self._stages else None), self._next_id + 1
        try:
            hash(id)
        except TypeError:
            raise OptionError(f"job: id is {shown(id)}; expected a text, a number or something else that never changes") from None
        if id in self._stages:
            raise OptionError(f"job: id {id!r} is taken by another request of this job; expected a new one")
        self._stages[id] = "queued"
        return id

    def take(self, id: Hashable, handle: Handle) -> None:
        """Report a request that was queued, under an id that was reserved."""
        self._open[id] = handle
        handle.on_event(partial(self._ready.put, id))
        self._ready.put(id)  # what came before

    def cancel(self, id: Hashable = None) -> None:
        """End a request, or all of them; what was generated comes as their last event. Harmless when it is over."""
        handles = list(self._open.values()) if id is None else [h for name, h in self._open.items() if name == id]
        for handle in handles:
            handle.cancel()

    close = cancel

    @property
    def remaining(self) -> int:
        """Requests that are not over."""
        return len(self._open)

    def run(self) -> dict[Hashable, Completion]:
        """Wait for all; the answers by id. Requests that failed are in `errors`."""
        for _ in self:
            pass
        return self.completions

    def __iter__(self) -> Iterator[Event]:
        try:
            while self._open:
                try:
                    name = self._ready.get(timeout=TICK_S)  # in ticks, so that KeyboardInterrupt arrives
                except queue.Empty:
                    continue
                yield from self._events(name)
        except BaseException:
            self.cancel()
            raise

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            while self._open:
                try:
                    name = self._ready.get_nowait()
                except queue.Empty:
                    await asyncio.sleep(TICK_S / 10)
                    continue
                for event in self._events(name):
                    yield event
        except BaseException:
            self.cancel()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        return f"Job({len(self.completions)} finished, {len(self.errors)} failed, {self.remaining} open)"

    def _events(self, name: Hashable) -> Iterator[Event]:
        """What is new of one request."""
        handle = self._open.get(name)
        if handle is None:
            return
        chunk, (done, total) = handle.poll(), handle.progress
        tokens, over = chunk.tokens if chunk is not None else (), handle.over
        if total and not over and (done, total) != self._progress.get(name):
            self._progress[name] = (done, total)
            stage = "started" if self._stages[name] == "queued" else "prefill"
            yield self._event(name, stage, prefilled=done, prompt_tokens=total)
        if tokens and not over:
            yield self._event(name, "streaming", text="".join([t.text for t in tokens]), tokens=tokens)
        if over:
            del self._open[name]
            outcome = handle.outcome
            text = "".join([token.text for token in tokens])
            if isinstance(outcome, Completion):
                self.completions[name] = outcome
                yield self._event(name, "finished", text=text, tokens=tokens, completion=outcome, prompt_tokens=total)
            else:
                self.errors[name] = outcome
                yield self._event(name, "failed", text=text, tokens=tokens, error=outcome, prompt_tokens=total)

    def _event(self, name: Hashable, stage: str, **rest: Any) -> Event:
        self._serial, self._stages[name] = self._serial + 1, stage
        return Event(id=name, serial=self._serial, stage=stage, **rest)
