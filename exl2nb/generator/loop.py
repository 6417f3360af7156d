"""The step loop: schedule, launch, read the results, end what is complete. Runs on the engine thread."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from exl2nb.core.errors import EngineClosed, GenerationError, OutOfMemory, StructureError
from exl2nb.generator.batch_buffers import BatchBuilder
from exl2nb.generator.executor import Executor, PendingStep, Results
from exl2nb.generator.request import Completion
from exl2nb.generator.scheduler import MIN_CHUNK, Scheduler, TokenSpan
from exl2nb.generator.sequence import RunningRequest
from exl2nb.ops import memory_ops
from exl2nb.sampling.draw import Sampled

if TYPE_CHECKING:
    from exl2nb.generator.speculation import Speculator

PAUSE_S = 0.0005
SWEEP_QUEUE_LENGTH = 64  # a longer waiting queue is searched for cancelled requests in every eighth step only


class InFlight(NamedTuple):
    """A launched step whose results are unread. pending: its results where it ran at once, else how to wait for them."""

    spans: list[TokenSpan]
    pending: PendingStep | Results
    launched: float


class StepLoop:
    """Runs the sequences of the scheduler.

    With an executor of lookahead 1, step n + 1 is launched before the results of step n are read, as long as every running sequence is
    drawn on the device. The at most one token that was computed past the end of an answer is dropped. Pages of an ended sequence may be
    given away while such a step runs: launches are carried out in order.

    Attributes:
        speculator: proposes draft tokens before each step; None: nothing does. steps: launched so far.

    Args:
        scheduler: chooses the sequences. builder: writes the tensors. executor: computes.
    """

    def __init__(self, scheduler: Scheduler, builder: BatchBuilder, executor: Executor) -> None:
        self.scheduler, self.executor = scheduler, executor
        self.speculator: Speculator | None = None
        self.steps = 0
        self._builder, self._page_size = builder, scheduler.pager.page_size
        self.in_flight: deque[InFlight] = deque()

    @property
    def busy(self) -> bool:
        """True while anything waits, runs or is in flight."""
        return self.scheduler.busy or bool(self.in_flight)

    def add(self, sequence: RunningRequest, group: object = None) -> None:
        """Queue a sequence."""
        drafts = sequence.proposer is not None
        sequence.drawn = not sequence.host_only and self.executor.can_draw(sequence.sampler, drafts=drafts)
        sequence.on_device = sequence.drawn and not drafts
        self.scheduler.add(sequence, group)

    def step(self) -> None:
        """One step: end what is cancelled or late, schedule, launch, read."""
        scheduler, in_flight = self.scheduler, self.in_flight
        waiting, running = scheduler.waiting, scheduler.running
        now = time.perf_counter()
        for sequence in (*running, *waiting) if waiting and (len(waiting) <= SWEEP_QUEUE_LENGTH or self.steps % 8 == 0) else (*running,):
            if sequence.channel.cancelled:
                self.finish(sequence, "cancelled")
            elif now > sequence.deadline:
                self.finish(sequence, "timeout")
        if in_flight and not all([sequence.on_device for sequence in running]):
            self.drain()
        if self.speculator is not None and self.speculator.wakes(running):
            self.drain()
            self.speculator.propose(scheduler.running, self.executor.prepared)
        spans = scheduler.schedule()
        if spans:
            self._launch(spans)
            while len(in_flight) > self.executor.lookahead:
                self._read()
        elif in_flight:
            self._read()
        elif scheduler.busy:
            time.sleep(PAUSE_S)  # the queued sequences are not ready yet

    def drain(self) -> None:
        """Read every step in flight."""
        while self.in_flight:
            self._read()

    def abandon(self) -> None:
        """Wait for the steps in flight and forget them."""
        while self.in_flight:
            pending = self.in_flight.popleft().pending
            with suppress(Exception):
                if not isinstance(pending, list):
                    pending.result()

    # ---- launching

    def _launch(self, spans: list[TokenSpan]) -> None:
        now = time.perf_counter()
        try:
            pending = self.executor.launch(self._builder.build(spans, self.scheduler.pager.changes))
        except Exception as error:
            self._launch_failed(spans, error)
            return
        self.steps += 1
        for sequence, _, length, rows, _ in spans:
            sequence.computed += length
            if rows and sequence.on_device:
                sequence.in_flight += 1
        self.in_flight.append(InFlight(spans, pending, now))
        if self.speculator is not None:
            self.speculator.launched(spans, self.executor.drawn)

    def _launch_failed(self, spans: list[TokenSpan], error: Exception) -> None:
        """Find the request that caused it: alone, most of them succeed; a long piece of a prompt is tried again as a short one."""
        self._builder.forget()
        for span in spans:
            span.sequence.settle()
        if self.in_flight:
            self.drain()  # the next step tries again, with nothing in flight
            return
        if len(spans) > 1:
            for span in spans:
                if not span.sequence.ended:
                    self._launch([span])
                    self.drain()
            return
        for span in spans:
            if span.length > MIN_CHUNK and not span.sequence.in_flight and memory_ops.is_out_of_memory(error):
                self.scheduler.chunk = MIN_CHUNK
            else:
                self.fail(span.sequence, error)

    # ---- reading

    def _read(self) -> None:
        """Wait for the oldest step and hand its tokens to the sequences; what goes wrong with one of them ends that request alone."""
        spans, pending, launched = self.in_flight.popleft()
        try:
            results = pending if isinstance(pending, list) else pending.result()
        except Exception as error:
            for span in spans:
                self.fail(span.sequence, error)
            return
        now = time.perf_counter()
        end = tokens = 0
        for span in spans:
            sequence, _, length, rows, _ = span
            at, end, tokens = end, end + rows, tokens + length
            if sequence.ended:
                continue
            reason = None
            try:
                if not rows:  # the prompt goes on
                    sequence.channel.report_progress(sequence.computed, len(sequence.request.prompt_ids))
                elif sequence.on_device:
                    sequence.in_flight -= 1
                    sampled = results[at]
                    # logits instead of a draw: the row has no distribution, and the sequence's own sampler says why
                    reason = sequence.append(sampled, now) if isinstance(sampled, Sampled) else sequence.advance([sampled])
                else:
                    reason = sequence.advance(results[at:end])
                if length > 1 or sequence.computed // self._page_size != sequence.published:
                    self._publish(span)
            except Exception as error:
                self.fail(sequence, error)
            else:
                if reason is not None:
                    self.finish(sequence, reason)
        if tokens >= MIN_CHUNK:
            self.scheduler.measured(tokens, time.perf_counter() - launched)

    def _publish(self, span: TokenSpan) -> None:
        """Make known what a step that was read has written."""
        sequence, pager = span.sequence, self.scheduler.pager
        if not sequence.pages:  # preempted while the step was in flight
            return
        if span.rows and span.length > span.rows:  # the prompt is complete
            pager.publish_tail(sequence)
        elif sequence.computed // pager.page_size != sequence.published:
            pager.publish(sequence)

    # ---- ending

    def finish(self, sequence: RunningRequest, reason: str) -> None:
        """The answer is complete, and with it those of its group."""
        for member in self._members(sequence):
            try:
                completion = member.complete(reason)
            except Exception as error:
                self._end(member, error)
            else:
                self._end(member, completion)

    def fail(self, sequence: RunningRequest, error: BaseException) -> None:
        """The request cannot go on, nor can its group."""
        if not isinstance(error, (GenerationError, EngineClosed, OutOfMemory, StructureError)):
            cause = error
            error = GenerationError(f"a step failed with {type(cause).__name__}: {str(cause)[:300]}; the request ended, the engine goes on")
            error.__cause__ = cause
        for member in self._members(sequence):
            self._end(member, error)

    def fail_all(self, error: BaseException) -> None:
        """End everything."""
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.fail(sequence, error)

    def _members(self, sequence: RunningRequest) -> list[RunningRequest]:
        members = [sequence] if sequence.group is None else list(sequence.group.members)
        return [member for member in members if not member.ended]

    def _end(self, sequence: RunningRequest, outcome: Completion | BaseException) -> None:
        sequence.ended = True
        if sequence.proposer is not None:
            sequence.proposer.ended(sequence)
        self.scheduler.remove(sequence, keep=isinstance(outcome, Completion))  # pages first: when the caller hears of the end they are free
        if not self.scheduler.running:
            self._builder.forget()  # it knows the sequences of the last step
        sequence.channel.end(outcome)
