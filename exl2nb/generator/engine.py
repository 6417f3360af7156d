"""Threads and callers: one thread per model runs the step loop; everybody else talks to it through here. Nothing else touches the model."""

from __future__ import annotations

import atexit
import contextvars
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.core.errors import ContextOverflow, EngineClosed, GenerationError, OptionError
from exl2nb.core.flag import Flag
from exl2nb.core.log import logger
from exl2nb.generator.batch import MAX_ROWS, BatchBuilder
from exl2nb.generator.guesses import Drafter, GuessingSpeculator, guesses_for
from exl2nb.generator.handle import Handle
from exl2nb.generator.loop import Speculator, StepLoop
from exl2nb.generator.members import sequences_for
from exl2nb.generator.pager import Pager
from exl2nb.generator.request import Request
from exl2nb.generator.scheduler import MAX_CHUNK, Scheduler
from exl2nb.generator.sequence import Sequence
from exl2nb.generator.stepper import HostStepper, Stepper
from exl2nb.generator.turnstile import TICK_S, Turnstile
from exl2nb.model.batch import Batch
from exl2nb.tokenizer.tokenizer import Tokenizer

IDLE_S = 5.0  # the thread ends after this long without work, and is started again by the next request: an idle model holds no thread
EXIT_S = 2.0  # what the end of the interpreter waits for a step: a thread that comes back from C++ after that would abort the process
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # those that have started a thread
_exiting: list[bool] = []  # not empty: the interpreter ends


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

    Attributes:
        cache: the pools. pages: who holds which page. pager: what the pages hold. loop: the steps. drafter: the draft model that guesses
        tokens, or None.

    Args:
        model: anything with `forward` and `close`.
        tokenizer: of the model.
        cache_spec: size of the KV cache; allocated here.
        context: tokens of prompt and answer together, at most; None = what the cache holds.
        vocab_size: ids the model knows; None = do not check prompts.
        max_sequences: that run together.
        max_chunk: prompt tokens per step, at most.
        device: of model and cache.
        stepper: makes what computes the steps; None = the host's.
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
        max_chunk: int = MAX_CHUNK,
        device: str = "cpu",
        stepper: Callable[[Forward, KVCache], Stepper] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.spec = model, tokenizer, cache_spec
        self.context = cache_spec.num_tokens if context is None else context
        self.cache = KVCache(cache_spec, device)
        self._stepper = (stepper or HostStepper)(model, self.cache)
        size = cache_spec.page_size
        self.pager = Pager(cache_spec.num_pages, page_size=size, copy=self._stepper.copy, salt=cache_spec.mode)
        self.pages = self.pager.table
        self.vocab_size = vocab_size
        self.drafter: Drafter | None = None
        self._guessing = GuessingSpeculator()
        switch = getattr(model, "rope_switch", None)
        builder = BatchBuilder(
            switches=switch is not None,
            max_tokens=max_sequences * MAX_ROWS + max_chunk,
            max_sequences=max_sequences,
            max_pages=min(cache_spec.num_pages, -(-(self.context + MAX_ROWS) // size)),
            page_size=size,
        )
        self.loop = StepLoop(Scheduler(self.pager, max_sequences=max_sequences, max_chunk=max_chunk, switch=switch), builder, self._stepper)
        self._arrived: deque[tuple[Sequence, object]] = (
            deque()
        )  # one leaves it after it has entered the scheduler, so it is always somewhere
        self._wake, self._turnstile = Flag(), Turnstile()
        self._lock, self._run_lock = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed, self._process = False, os.getpid()

    # ---- callers' side: any thread

    def submit(self, request: Request, *, group: object = None) -> Handle:
        """Queue a request; returns at once.

        Args:
            request: what is asked for.
            group: requests of one group take turns with everybody else's; None = this one is its own.

        Raises:
            ContextOverflow: the prompt leaves no room in the context, or the request could never fit the cache.
            OptionError: a prompt id the model does not have.
            EngineClosed: `close` was called. GenerationError: called by a hook.
        """
        return self.submit_many([request], group=group)[0]

    def submit_many(self, requests: Several[Request], *, group: object = None) -> list[Handle]:
        """Queue several requests, all or none; errors as in `submit`. Equal prompts among them are computed once."""
        for request in requests:
            self.check(request)
        made = [sequences_for(request, self.tokenizer, context=self.context) for request in requests]
        for members in made:
            self._attach(members)
        handles = self.submit_all([member for members in made for member in members], group=group)
        leaders, at = [], 0
        for members in made:
            leaders.append(handles[at])
            handles[at].companions = handles[at + 1 : at + len(members)]
            at += len(members)
        return leaders

    def _attach(self, members: Several[Sequence]) -> None:
        """Give sequences what they need of this engine."""
        leader = members[0]
        if leader.group is not None:
            leader.group.fork = self.loop.scheduler.fork
            return
        leader.guesses = guesses_for(leader.request, self.drafter, self._guessing.times)
        if leader.guesses is not None and self.loop.speculator is None:
            self.loop.speculator = self._guessing

    def check(self, request: Request) -> None:
        """Refuse a prompt that cannot run; errors as in `submit`."""
        count = len(request.prompt_ids)
        if count >= self.context:
            raise ContextOverflow(
                f"the prompt has {count} tokens and the context {self.context}, which must also hold at least one new token; "
                f"shorten the prompt by {count - self.context + 1}, or load the model with a larger context"
            )
        if len(request.negative_ids) >= self.context:
            raise ContextOverflow(f"the negative prompt has {len(request.negative_ids)} tokens and the context {self.context}; shorten it")
        size = self.vocab_size
        if size is None:
            return
        for what, ids in (("prompt", request.prompt_ids), ("negative prompt", request.negative_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < size:
                raise OptionError(f"the {what} holds ids outside 0 to {size - 1}; was it encoded with another model's tokenizer?")
        if request.stop_ids and max(request.stop_ids) >= size:
            raise OptionError(f"stop is {max(request.stop_ids)}; expected a text or a token id from 0 to {size - 1}")

    def submit_all(self, sequences: Several[Sequence], *, group: object = None) -> list[Handle]:
        """Queue several sequences, all or none; errors as in `submit`.

        Those whose `group` is the same object and says `lockstep` must fit the cache together.
        """
        self._check_caller()
        together: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            shared = sequence.group if sequence.group is not None and sequence.group.lockstep else sequence
            together.setdefault(id(shared), []).append(sequence)
        for some in together.values():
            self.loop.scheduler.check(*some)
        handles = [Handle(s.channel) for s in sequences]  # before anything can run: an interrupt from here on drops them, which cancels
        with self._lock:
            if self._closed:
                raise EngineClosed("the model was closed; load it again")
            self._arrived.extend([(sequence, group) for sequence in sequences])
            self._wake.set()
            if self._thread is None or not self._thread.is_alive():
                run = contextvars.copy_context().run
                _stop_at_exit(self)
                self._thread = threading.Thread(target=run, args=(self._run,), name="exl2nb-engine", daemon=True)
                self._thread.start()
        return handles

    @property
    def speculator(self) -> Speculator | None:
        """Who guesses tokens before each step; None = nobody."""
        return self.loop.speculator

    @speculator.setter
    def speculator(self, speculator: Speculator | None) -> None:
        self.loop.speculator = speculator

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    @property
    def idle(self) -> bool:
        """True while no request waits or runs; all pages are free then."""
        return not self._arrived and not self.loop.busy

    def wait_idle(self, timeout_s: float = 60.0) -> bool:
        """Wait until every request is through; False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self.idle:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    @contextmanager
    def exclusive(self, timeout_s: float | None = None) -> Iterator[None]:
        """Have the model to oneself: requests wait at their next step until the `with` block ends; nothing is in flight.

        Raises:
            EngineClosed: `close` was called. TimeoutError: somebody else has had it for `timeout_s`. GenerationError: called by a hook.
        """
        self._check_caller()
        with self._turnstile.visit(sys._getframe(), quiet=self._quiet, timeout_s=timeout_s):
            if self._closed:
                raise EngineClosed("the model was closed; load it again")
            yield

    def close(self) -> None:
        """End every request with EngineClosed, join the thread, give memory back. A second call does nothing.

        Inside a step (a hook, or garbage collected there) it only begins: the step has to end first.
        """
        if threading.current_thread() is self._thread:
            self._closed = True
            threading.Thread(target=self.close, name="exl2nb-close", daemon=True).start()
            return
        if _exiting and threading.current_thread() is not threading.main_thread():
            return  # a thread that comes back from C++ after the interpreter has ended would abort the process
        self._stop(float("inf"))
        with self._turnstile.visit(sys._getframe(), quiet=lambda: True):
            self._fail_all(EngineClosed("the model was closed while the request ran"))
            self.loop.abandon()
            if self.drafter is not None:
                self.drafter.close()
            self._stepper.close()
            self.cache.close()
            self.model.close()

    def _quiet(self) -> bool:
        return self._closed or self._thread is None or not self.loop.flying

    def _check_caller(self) -> None:
        if os.getpid() != self._process:  # its threads and those of the kernels were not forked with it
            raise GenerationError(
                f"the model was loaded by process {self._process}, of which this one is a fork; load it here, or use threads"
            )
        if threading.current_thread() is self._thread:
            raise GenerationError(
                "a function that runs inside a step (post_sampling) called its own model, which would wait for itself; "
                "note what you need there and call the model outside"
            )

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
        if not self.loop.busy:
            self._wake.wait(IDLE_S)
        self._wake.clear()
        while self._arrived:
            self.loop.add(*self._arrived[0])
            self._arrived.popleft()
        if self._closed:
            self._fail_all(EngineClosed("the model was closed while the request ran"))
            self.loop.abandon()  # the end of the interpreter does not wait for threads of the kernels
            return False
        if self.loop.busy:
            return True
        with self._lock:
            if self._arrived:
                return True
            self._thread = None
            return False

    def step(self) -> None:
        """One turn of the loop; callers who wait for the model already come first."""
        with self._turnstile.step(lambda: self._closed) as mine:
            if not mine:
                return
            self.loop.step()
            if self._turnstile.wanted:
                self.loop.drain()

    def _fail_all(self, error: BaseException) -> None:
        for sequence, _ in self._arrived:
            self.loop.fail(sequence, error)
        self._arrived.clear()
        self.loop.fail_all(error)


def _stop_at_exit(engine: Engine) -> None:
    if not _engines:
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
    _engines.add(engine)


def _stop_all() -> None:
    _exiting.append(True)
    for engine in list(_engines):
        engine._stop(EXIT_S)
