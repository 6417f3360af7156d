"""The engine: one thread per model runs the step loop. Requests and calls reach it through queues; nothing else touches the model.

`submit` queues a request. `call` runs a function on the engine thread between two steps, so that it has the model, the pages and the
cache to itself. There is no lock to hold and none to leave behind: a KeyboardInterrupt ends the caller's wait at any instruction, a call
that has not started is dropped, and one that has started ends on the engine thread by itself. Callers wait in ticks on queues written in
C: an interrupt inside `threading.Event` or `Condition` can leave their lock locked.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.core.errors import ContextOverflow, EngineClosed, GenerationError, OptionError
from exl2nb.core.log import logger
from exl2nb.core.progress import Sink
from exl2nb.generator.batch_buffers import MAX_ROWS, BatchBuilder
from exl2nb.generator.executor import Executor, HostExecutor
from exl2nb.generator.handle import TICK_S, Handle
from exl2nb.generator.loop import StepLoop
from exl2nb.generator.pager import Pager
from exl2nb.generator.request import Request
from exl2nb.generator.scheduler import Scheduler
from exl2nb.generator.sequence import RunningRequest
from exl2nb.generator.speculation import Drafter, Speculator, StepTimes, proposer_for
from exl2nb.model.batch import Batch
from exl2nb.model.model import Model
from exl2nb.model.runner import StepRunner
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2nb.model.points import Point
    from exl2nb.model.traced_forward import Borrowed

IDLE_S = 5.0  # the thread ends after this long without work, and is started again by the next request: an idle model holds no thread
EXIT_S = 2.0  # what the end of the interpreter waits for a step: a thread that comes back from C++ after that would abort the process
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # those that have started a thread
_exiting: list[bool] = []  # not empty: the interpreter ends


T = TypeVar("T")


class Call(Generic[T]):
    """A function to run on the engine thread, and what became of it.

    The first to take `claim` decides: the engine, which then runs the function, or the caller, who gives it up.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.claim = threading.Lock()
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.value: T | None = None
        self.error: BaseException | None = None
        self._function, self._context = function, contextvars.copy_context()
        self._inference = torch.is_inference_mode_enabled()

    def run(self) -> None:
        """Engine: run the function with the caller's context variables and inference mode, unless the caller has given it up."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            with torch.inference_mode(self._inference):
                self.value = self._context.run(self._function)
        except BaseException as error:
            self.error = error
        self.ended.put(None)

    def fail(self, error: BaseException) -> None:
        """Engine: it will not run."""
        if self.claim.acquire(blocking=False):
            self.error = error
            self.ended.put(None)

    def wait(self, timeout_s: float | None) -> T:
        """Caller: the function's value; raises its error, or TimeoutError if it has not started within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                self.ended.get(timeout=TICK_S if deadline is None else max(0.0, min(TICK_S, deadline - time.monotonic())))
                break
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    if self.claim.acquire(blocking=False):
                        raise TimeoutError(f"the model was in use for {timeout_s} s") from None
                    deadline = None
        if self.error is not None:
            raise self.error
        return self.value  # pyright: ignore[reportReturnType]


class SharedModel:
    """The part of `Model` that reads texts, for code on other threads than the engine's.

    Steps run on the engine's thread, between those of running requests.
    """

    def __init__(self, engine: Engine, model: Model) -> None:
        self._call, self._model = engine.call, model
        self.config, self.context, self.device, self.rope_switch = model.config, model.context, model.device, model.rope_switch
        self.cache_spec, self.new_cache = model.cache_spec, model.new_cache

    @property
    def points(self) -> dict[str, Point]:
        """As `Model.points`."""
        return self._model.points

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """As `Model.forward`."""
        return self._call(partial(self._model.forward, batch, cache))

    def forward_by_ops(self, *arguments: Any) -> Tensor:
        """As `Model.forward_by_ops`."""
        return self._call(partial(self._model.forward_by_ops, *arguments))

    def trace(self, *arguments: Any, **options: Any) -> Tensor:
        """As `Model.trace`."""
        return self._call(partial(self._model.trace, *arguments, **options))

    def unembed(self, x: Tensor) -> Tensor:
        """As `Model.unembed`."""
        return self._call(partial(self._model.unembed, x))

    def matrix(self, layer: int, part: str) -> Tensor | None:
        """As `Model.matrix`."""
        return self._call(partial(self._model.matrix, layer, part))

    def layer(self, index: int, tokens: int) -> Borrowed:
        """As `Model.layer`."""
        return self._call(partial(self._model.layer, index, tokens))


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        steps: launched steps.
        preemptions: sequences that gave their pages back before they ended.
        captured: kinds of steps, and of rounds of a draft model, that were captured on a GPU.
        drafting_steps: steps before which draft tokens were looked for.
    """

    steps: int
    preemptions: int
    captured: int
    drafting_steps: int


class Engine:
    """Runs requests on a model.

    Attributes:
        cache: the pools. pages: their page table. pager: what the pages hold. loop: the steps. executor: what computes them. drafter: the
        draft model, or None.

    Args:
        model: runs the steps.
        cache_spec: size of the KV cache.
        context: tokens of prompt and answer together, at most; None = what the cache holds.
        vocab_size: ids the model knows; None = do not check prompts.
        max_sequences: that run together.
        executor: makes what computes the steps; None = what the model's capabilities ask for.
        block_tokens: of the largest picture whose tokens run in one step.
        idle_s: the engine's thread ends after this long without work.
    """

    def __init__(
        self,
        model: StepRunner,
        tokenizer: Tokenizer,
        cache_spec: CacheSpec,
        *,
        context: int | None = None,
        vocab_size: int | None = None,
        max_sequences: int = 16,
        executor: Callable[[Any, KVCache], Executor] | None = None,
        block_tokens: int = 0,
        idle_s: float = IDLE_S,
    ) -> None:
        self.model, self.tokenizer, self.spec = model, tokenizer, cache_spec
        self.context = cache_spec.num_tokens if context is None else context
        self.cache = model.new_cache(cache_spec)
        self._last_device = self.cache.placement.devices[-1]
        self.executor: Executor = (executor or executor_for)(model, self.cache)
        size = cache_spec.page_size
        self.pager = Pager(cache_spec.num_pages, page_size=size, copy=self.executor.copy, salt=cache_spec.mode)
        self.pages = self.pager.table
        self.vocab_size = vocab_size
        self.drafter: Drafter | None = None
        self._speculator = Speculator()
        chunks, switch = model.capabilities.chunks, model.capabilities.rope_switch
        builder = BatchBuilder(
            switches=switch is not None,
            max_tokens=max_sequences * MAX_ROWS + chunks.max_tokens + block_tokens,
            max_sequences=max_sequences,
            max_pages=min(cache_spec.num_pages, -(-(self.context + MAX_ROWS) // size)),
            page_size=size,
        )
        scheduler = Scheduler(self.pager, max_sequences=max_sequences, chunks=chunks, switch=switch)
        self.loop = StepLoop(scheduler, builder, self.executor)
        self._arrived: deque[tuple[RunningRequest, object]] = deque()  # one leaves it after it has entered the scheduler
        self._calls: deque[Call[Any]] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # an item for each arrival, so that an idle thread can wait
        self._lock, self._run_lock, self._close_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed, self._process, self._idle_s = False, os.getpid(), idle_s

    # ---- callers' side: any thread

    def submit(self, request: Request, *, group: object = None) -> Handle:
        """Queue a request; returns at once.

        Args:
            group: requests of one group share the turn of one caller; None = this one is its own.

        Raises:
            ContextOverflow: the prompt leaves no room in the context, or the request could never fit the cache.
            OptionError: a prompt id the model does not have.
            EngineClosed: `close` was called. GenerationError: called by a hook.
        """
        return self.submit_many([request], group=group)[0]

    def submit_many(self, requests: Seq[Request], *, group: object = None) -> list[Handle]:
        """Queue several requests, all or none; errors as in `submit`. Equal prompts among them are computed once."""
        for request in requests:
            self.check(request)
        made = [make_requests(request, self.tokenizer, context=self.context) for request in requests]
        for members in made:
            self._attach(members)
        handles = self.submit_all([member for members in made for member in members], group=group)
        leaders, at = [], 0
        for request, members in zip(requests, made):
            leaders.append(handles[at])
            handles[at].reply_format = request.reply
            handles[at].companions = handles[at + 1 : at + len(members)]
            at += len(members)
        return leaders

    def _attach(self, members: Seq[RunningRequest]) -> None:
        """Give sequences what they need of this engine."""
        leader = members[0]
        if leader.group is not None:
            leader.group.fork = self.loop.scheduler.fork
            return
        kind = leader.request.speculation.kind
        drafter = self.drafter if leader.pictures is None else None  # a draft model does not see
        if kind == "off" or (kind == "auto" and drafter is None):
            return
        leader.proposer = proposer_for(leader.request, drafter, self._speculator.times, self._speculator.earlier)
        if leader.proposer is not None and self.loop.speculator is None:
            self.loop.speculator = self._speculator

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
        if request.pictures is not None and request.pictures.highest >= self.context - 1:
            raise ContextOverflow(
                f"the prompt's video reaches position {request.pictures.highest} and the context is {self.context}; give fewer frames, "
                "or frames that are closer in time"
            )
        size = self.vocab_size
        if size is None:
            return
        for what, ids in (("prompt", request.prompt_ids), ("negative prompt", request.negative_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < size:
                raise OptionError(f"the {what} holds ids outside 0 to {size - 1}; was it encoded with another model's tokenizer?")
        if request.stop_ids and max(request.stop_ids) >= size:
            raise OptionError(f"stop is {max(request.stop_ids)}; expected a text or a token id from 0 to {size - 1}")

    def submit_all(self, sequences: Seq[RunningRequest], *, group: object = None) -> list[Handle]:
        """Queue several sequences, all or none; errors as in `submit`.

        Those whose `group` is the same object and says `lockstep` must fit the cache together.
        """
        self._check_caller()
        together: dict[int, list[RunningRequest]] = {}
        for sequence in sequences:
            shared = sequence.group if sequence.group is not None and sequence.group.lockstep else sequence
            together.setdefault(id(shared), []).append(sequence)
        for some in together.values():
            self.loop.scheduler.check(*some)
        handles = [Handle(s.channel) for s in sequences]  # before anything can run: an interrupt from here on drops them, which cancels
        with self._lock:
            self._check_open()
            self._arrived.extend([(sequence, group) for sequence in sequences])
            self._wake_thread()
        return handles

    def call(self, function: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Run a function on the engine thread between two steps, with nothing in flight; requests wait until it returns.

        Args:
            function: takes no arguments. It must be short, since running requests are paused, and must not call the engine.
            timeout_s: to wait for its start; None = as long as it takes.

        Returns:
            What the function returns.

        Raises:
            What the function raises. EngineClosed: `close` was called. TimeoutError: not started in time; it will not run.
            GenerationError: called by a hook. KeyboardInterrupt: at once; what has started ends on the engine thread.
        """
        self._check_caller()
        call = Call(function)
        try:
            with self._lock:
                self._check_open()
                self._calls.append(call)
                self._wake_thread()
            return call.wait(timeout_s)
        except BaseException:
            call.claim.acquire(blocking=False)  # it will not start any more
            raise

    @property
    def shared_model(self) -> Any:
        """The model for code on other threads: its forward passes go through `call`."""
        assert isinstance(self.model, Model), "a model with weights"
        return SharedModel(self, self.model)

    @property
    def step_times(self) -> StepTimes:
        """Times of steps by rows, as speculation measures them."""
        return self._speculator.times

    @property
    def prepared(self) -> int:
        """Kinds of steps, and of rounds of a draft model, that were captured on a GPU so far."""
        return self.executor.prepared + (self.drafter.prepared if self.drafter is not None else 0)

    def stats(self) -> EngineStats:
        """Counts since the engine was made."""
        return EngineStats(
            steps=self.loop.steps,
            preemptions=self.loop.scheduler.preemptions,
            captured=self.prepared,
            drafting_steps=self._speculator.drafting_steps,
        )

    @property
    def has_thread(self) -> bool:
        """True while the engine's thread runs, or waits for work."""
        return self._thread is not None

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    @property
    def idle(self) -> bool:
        """True while no request is queued or running; all pages are free then."""
        return not self._arrived and not self._calls and not self.loop.busy

    def wait_idle(self, timeout_s: float = 60.0) -> bool:
        """Wait until every request is through; False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        while not self.idle:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def prepare(self, progress: Sink | None) -> None:
        """Do beforehand what the first request would wait for, such as compiling kernels."""
        self.executor.prepare(progress)

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
        with self._close_lock:
            self._fail_all(EngineClosed("the model was closed while the request ran"))
            self.loop.abandon()
            if self.drafter is not None:
                self.drafter.close()
            self.executor.close()
            self.cache.close()
            self.model.close()

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

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the model was closed; load it again")

    def _wake_thread(self) -> None:
        """Wake the engine thread; start it if there is none. The caller has the lock."""
        self._wake.put(None)
        if self._thread is None or not self._thread.is_alive():
            run = contextvars.copy_context().run
            _stop_at_exit(self)
            self._thread = threading.Thread(target=run, args=(self._run,), name="exl2nb-engine", daemon=True)
            self._thread.start()

    def _stop(self, seconds: float) -> None:
        """Ask the thread to end and wait for it, in ticks, so that an interrupt gets through."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._wake.put(None)
        deadline = time.monotonic() + seconds
        while thread is not None and thread.is_alive() and thread is not threading.current_thread() and time.monotonic() < deadline:
            thread.join(TICK_S)

    # ---- the engine thread

    def _run(self) -> None:
        loop, scheduler = self.loop, self.loop.scheduler
        try:
            # an interrupt inside Thread.start can leave a thread behind, unknown to the engine, beside its successor: only one may run
            last = self._last_device  # where tokens are drawn; this thread begins on the first GPU
            place = torch.cuda.device(last) if last.startswith("cuda:") else nullcontext()
            with self._run_lock, torch.inference_mode(), place:
                while True:
                    idle = not (scheduler.running or scheduler.waiting or loop.in_flight)
                    if (idle or self._arrived or self._calls or self._closed) and not self._collect(idle):
                        return
                    if scheduler.running or scheduler.waiting or loop.in_flight:
                        loop.step()
        except BaseException as error:  # a bug outside a step: callers must not wait for ever
            logger.exception("engine thread failed")
            with self._lock:
                self._thread = None
                self._fail_all(error)
            raise

    def _collect(self, idle: bool) -> bool:
        """Take new requests in and run calls; wait for something while there is nothing to do. False: the thread is to end."""
        woken = False
        try:
            if idle:
                self._wake.get(timeout=self._idle_s)
            woken = True
            while True:
                self._wake.get_nowait()
        except queue.Empty:
            pass
        while self._arrived:
            self.loop.add(*self._arrived[0])
            self._arrived.popleft()
        if self._calls and not self._closed:
            self.loop.drain()
            for _ in range(len(self._calls)):  # those that come meanwhile wait for a step, so that a loop of calls does not stop requests
                self._calls[0].run()
                self._calls.popleft()
        if self._closed:
            self._fail_all(EngineClosed("the model was closed while the request ran"))
            self.loop.abandon()  # the end of the interpreter does not wait for threads of the kernels
            return False
        if self.loop.busy:
            return True
        with self._lock:
            if self._arrived or self._calls or woken:
                return True
            self._thread = None
            return False

    def _fail_all(self, error: BaseException) -> None:
        for sequence, _ in self._arrived:
            self.loop.fail(sequence, error)
        self._arrived.clear()
        while self._calls:
            self._calls.popleft().fail(error)
        self.loop.fail_all(error)


def executor_for(model: StepRunner, cache: KVCache) -> Executor:
    """The executor that a model's capabilities ask for."""
    if not model.capabilities.captures:
        return HostExecutor(model, cache)
    from exl2nb.generator.gpu_executor import GpuExecutor

    assert isinstance(model, Model), "models on GPUs"
    return GpuExecutor(model, cache)


def make_requests(request: Request, tokenizer: Tokenizer, *, context: int) -> list[RunningRequest]:
    """The sequences of a request; the first one has the channel that the caller listens to."""
    if request.beams > 1 or request.guided:
        from exl2nb.generator.beams import Beams, Guided

        return (Beams if request.beams > 1 else Guided).of(request, tokenizer, context=context).members
    return [RunningRequest(request, tokenizer, context=context)]


def _stop_at_exit(engine: Engine) -> None:
    if not _engines:
        atexit.unregister(_stop_all_engines)
        atexit.register(_stop_all_engines)
    _engines.add(engine)


def _stop_all_engines() -> None:
    _exiting.append(True)
    for engine in list(_engines):
        engine._stop(EXIT_S)
