"""The step loop: one thread per model takes requests, runs them together and hands out tokens. Nothing else touches the model."""

from __future__ import annotations

import atexit
import contextvars
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from exl2nb.cache.pages import PageTable
from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.core.errors import ContextOverflow, EngineClosed, GenerationError, OptionError
from exl2nb.core.log import logger
from exl2nb.generator.batch import BatchBuilder
from exl2nb.generator.handle import Handle
from exl2nb.generator.request import Completion, Request
from exl2nb.generator.scheduler import MAX_CHUNK, Scheduler
from exl2nb.generator.sequence import Sequence
from exl2nb.model.batch import Batch
from exl2nb.sampling.chain import sample_row
from exl2nb.tokenizer.tokenizer import Tokenizer

IDLE_S = 5.0  # the thread ends after this long without work, and is started again by the next request: an idle model holds no thread
TICK_S = 0.05
EXIT_S = 2.0  # what the end of the interpreter waits for a step: a thread that comes back from C++ after that would abort the process
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # those that have started a thread


class Forward(Protocol):
    """What the engine needs of a model."""

    def forward(self, batch: Batch, cache: KVCache, /) -> Tensor:
        """Logits f32 `(R, V)` of the batch's logit rows."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...


class Engine:
    """Runs requests on a model.

    Args:
        model: anything with `forward` and `close`.
        tokenizer: of the model.
        cache_spec: size of the KV cache; allocated here.
        context: tokens of prompt and answer together, at most; None = what the cache holds.
        vocab_size: ids the model knows; None = do not check prompts.
        max_sequences: that run together.
        device: of model and cache.
    """

    def __init__(
        self,
        model: Forward,
        tokenizer: Tokenizer,
        cache_spec: CacheSpec,
        *,
        context: int | None = None,
        vocab_size: int | None = None,
        max_sequences: int = 16,
        device: str = "cpu",
    ) -> None:
        self.model, self.tokenizer, self.spec = model, tokenizer, cache_spec
        self.context = cache_spec.num_tokens if context is None else context
        self.cache = KVCache(cache_spec, device)
        self.pages = PageTable(cache_spec.num_pages)
        self._vocab_size = vocab_size
        size = cache_spec.page_size
        self._scheduler = Scheduler(self.pages, page_size=size, max_sequences=max_sequences)
        self._builder = BatchBuilder(
            max_tokens=max_sequences + MAX_CHUNK,
            max_sequences=max_sequences,
            max_pages=min(cache_spec.num_pages, -(-self.context // size)),
            page_size=size,
            device=device,
        )
        self._arrived: deque[Sequence] = deque()  # a sequence leaves it after it has entered the scheduler, so that it is always somewhere
        self._wake = threading.Event()
        self._lock, self._model_lock, self._run_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    # ---- callers' side: any thread

    def submit(self, request: Request) -> Handle:
        """Queue a request; returns at once.

        Raises:
            ContextOverflow: the prompt leaves no room in the context, or the request could never fit the cache.
            OptionError: a prompt id the model does not have.
            EngineClosed: `close` was called.
        """
        count = len(request.prompt_ids)
        if count >= self.context:
            raise ContextOverflow(
                f"the prompt has {count} tokens and the context {self.context}, which must also hold at least one new token; "
                f"shorten the prompt by {count - self.context + 1}, or load the model with a larger context"
            )
        if self._vocab_size is not None and not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocab_size:
            raise OptionError(f"the prompt holds ids outside 0 to {self._vocab_size - 1}; was it encoded with another model's tokenizer?")
        sequence = Sequence(request, self.tokenizer, context=self.context)
        self._scheduler.check(sequence)
        handle = Handle(sequence.channel)  # before anything can run: an interrupt from here on drops it, which cancels the request
        with self._lock:
            if self._closed:
                raise EngineClosed("the model was closed; load it again")
            self._arrived.append(sequence)
            self._wake.set()
            if self._thread is None or not self._thread.is_alive():
                run = contextvars.copy_context().run
                _stop_at_exit(self)
                self._thread = threading.Thread(target=run, args=(self._run,), name="exl2nb-engine", daemon=True)
                self._thread.start()
        return handle

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    @property
    def idle(self) -> bool:
        """True while no request waits or runs; all pages are free then."""
        return not self._arrived and not self._scheduler.busy

    def wait_idle(self, timeout_s: float = 60.0) -> bool:
        """Wait until every request is through; False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self.idle:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Have the model to oneself: requests wait at their next step until the `with` block ends."""
        with self._model_lock:
            if self._closed:
                raise EngineClosed("the model was closed; load it again")
            yield

    def close(self) -> None:
        """End every request with EngineClosed, join the thread, give memory back. A second call does nothing."""
        self._stop(float("inf"))
        self._fail_all(EngineClosed("the model was closed while the request ran"))
        with self._model_lock:
            self.cache.close()
            self.model.close()

    def _stop(self, seconds: float) -> None:
        """Ask the thread to end and wait for it, in ticks, so that an interrupt gets through."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._wake.set()
        deadline = time.monotonic() + seconds
        while thread is not None and thread.is_alive() and thread is not threading.current_thread() and time.monotonic() < deadline:
            thread.join(TICK_S)

    # ---- the engine thread

    def _run(self) -> None:
        try:
            # the lock: an interrupt inside Thread.start can leave a thread behind that nobody knows of, beside its successor
            with self._run_lock, torch.inference_mode():
                while self._collect():
                    self.step()
        except BaseException as error:  # a bug outside a step: callers must not wait for ever
            logger.exception("engine thread failed")
            with self._lock:
                self._thread = None
                self._fail_all(error)
            raise

    def _collect(self) -> bool:
        """Take new requests in; wait for one while there is nothing to do. False: the thread is to end."""
        if not self._scheduler.busy:
            self._wake.wait(IDLE_S)
        self._wake.clear()
        while self._arrived:
            self._scheduler.add(self._arrived[0])
            self._arrived.popleft()
        if self._closed:
            self._fail_all(EngineClosed("the model was closed while the request ran"))
            return False
        if self._scheduler.busy:
            return True
        with self._lock:
            if self._arrived:
                return True
            self._thread = None
            return False

    def step(self) -> None:
        """One turn: drop what was cancelled, choose tokens, run the model, sample, hand out."""
        for sequence in [s for s in (*self._scheduler.running, *self._scheduler.waiting) if s.channel.cancelled]:
            self._finish(sequence, "cancelled")
        spans = self._scheduler.schedule()
        if not spans:
            return
        started = time.perf_counter()
        try:
            with self._model_lock:
                logits = self.model.forward(self._builder.build(spans), self.cache).to("cpu", torch.float32).numpy()
        except Exception as error:
            for span in spans:
                self._fail(span.sequence, error)
            return
        rows = iter(logits)
        for span in spans:
            span.sequence.computed += span.length
            if span.last:
                self._advance(span.sequence, next(rows))
        self._scheduler.measured(sum(span.length for span in spans), time.perf_counter() - started)

    def _advance(self, sequence: Sequence, row: np.ndarray) -> None:
        """One new token for one sequence; whatever goes wrong here is that request's alone."""
        try:
            reason = sequence.append(sample_row(row, sequence.sampler, top=sequence.request.top_logprobs))
            if reason is not None:
                self._finish(sequence, reason)
        except Exception as error:
            self._fail(sequence, error)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        try:
            completion = sequence.complete(reason)
        except Exception as error:
            self._fail(sequence, error)
        else:
            self._retire(sequence, completion)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        if not isinstance(error, (GenerationError, EngineClosed)):
            cause = error
            error = GenerationError(f"a step failed with {type(cause).__name__}: {str(cause)[:300]}; the request ended, the engine goes on")
            error.__cause__ = cause
        self._retire(sequence, error)

    def _retire(self, sequence: Sequence, outcome: Completion | BaseException) -> None:
        self._scheduler.remove(sequence)  # pages first: when the caller hears of the end they are free
        sequence.channel.end(outcome)

    def _fail_all(self, error: BaseException) -> None:
        for sequence in (*self._arrived, *self._scheduler.running, *self._scheduler.waiting):
            self._fail(sequence, error)
        self._arrived.clear()


def _stop_at_exit(engine: Engine) -> None:
    if not _engines:
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
    _engines.add(engine)


def _stop_all() -> None:
    for engine in list(_engines):
        engine._stop(EXIT_S)
