"""Chooses the sequences and tokens of each step: admission, preemption, chunks of prompts. Knows no model and no text."""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from exl2nb.core.errors import ContextOverflow
from exl2nb.generator.pager import Pager
from exl2nb.generator.sequence import RunningRequest
from exl2nb.model.runner import HOST_CHUNKS, ChunkPolicy

STEP_S = 0.15  # a step of prompt tokens alone is sized to take about this long on a CPU, so that cancelling is quick on a slow machine
BESIDE_S = 0.05  # and one with decodes, so that their text keeps flowing
MIN_CHUNK = 32  # prompt tokens per step, at least
SHORT_ROPE_SALT = "short"  # salt of the pages of sequences up to the switch


class TokenSpan(NamedTuple):
    """`length` tokens of a sequence that run in this step, from `start` on.

    rows: the last `rows` of them need logits; 0 in the middle of a prompt. in_flight: only the device knows the token so far.
    """

    sequence: RunningRequest
    start: int
    length: int
    rows: int
    in_flight: bool = False


class Scheduler:
    """Holds the sequences: those that run, best rank first, and those that are queued, in the order in which they will be admitted.

    Rank: higher priority, then round-robin turn, then arrival. Turns are counted per `group`, so a caller with a thousand requests has one
    turn at a time, like every other caller.

    A sequence is admitted when fewer than `max_sequences` run and its tokens fit the free pages; it takes more as it grows. When none is
    free, the sequence of the worst rank is preempted: it gives its pages back and keeps its turn in the queue; its tokens are computed
    again later, or found in the prefix cache. The best ranked sequence is never preempted, so every request ends. A queued sequence
    preempts a running one of lower priority.

    Every step decodes for each sequence past its prompt and shares the rest of the token budget among the prompts. A prompt does not
    compute a page that another one is computing: a few steps later it takes that page over.

    Args:
        pager: the pages; nothing else may use it.
        max_sequences: that run at a time.
        chunks: how prompts are cut into steps.
        switch: longer sequences use other RoPE factors (`Model.rope_switch`); one that grows past it is computed again. None: no switch.
    """

    def __init__(self, pager: Pager, *, max_sequences: int, chunks: ChunkPolicy = HOST_CHUNKS, switch: int | None = None) -> None:
        self.switch = switch
        self.pager, self.max_sequences, self.chunks = pager, max_sequences, chunks
        self.waiting: list[RunningRequest] = []
        self.running: list[RunningRequest] = []
        self.chunk = chunks.first_tokens
        self.preemptions = 0
        self._speed = 0.0  # tokens per second of a step with prompt tokens
        self._arrivals = self._turn = 0
        self._turns: dict[object, int] = {}

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.running or self.waiting)

    def check(self, *sequences: RunningRequest) -> None:
        """Refuse what could never run. Several sequences: they must fit together.

        Raises:
            ContextOverflow: more pages are needed than the cache has.
        """
        have, size, shared = self.pager.table.num_pages, self.pager.page_size, 0
        if sequences[0].group is not None and sequences[0].group.shares_prompt:
            shared = (len(sequences) - 1) * (sequences[0].prompt_tokens // size)  # pages
        need = sum(self.pager.pages_for(s.most_tokens) for s in sequences) - shared
        if need > have:
            tokens = sum(s.most_tokens for s in sequences) - shared * size
            prompts, new = sum(len(s.request.prompt_ids) for s in sequences) - shared * size, sum(s.limit for s in sequences)
            rows = f" of {len(sequences)} texts in step" if len(sequences) > 1 else ""
            raise ContextOverflow(
                f"the request needs {tokens} tokens in the cache ({prompts} of the prompt and up to {new} new{rows}), "
                f"{need} pages of {size}; the cache has {have} pages, {have * size} tokens: "
                f"lower max_tokens{' or beams' if shared or rows else ''}, or load the model with a larger cache_tokens"
            )

    def add(self, sequence: RunningRequest, group: object = None) -> None:
        """Queue a sequence. group: shares one turn with the others of it; None = a turn of its own."""
        turn = self._turn + 1
        if group is not None:
            turn = self._turns[group] = max(turn, self._turns.get(group, 0) + 1)
        sequence.rank = (-sequence.request.priority, turn, self._arrivals)
        self._arrivals += 1
        if self.switch is not None and len(sequence.ids) <= self.switch:
            sequence.long, sequence.salt = False, sequence.own_salt + SHORT_ROPE_SALT
        insort(self.waiting, sequence, key=_priority_of)

    def schedule(self) -> list[TokenSpan]:
        """Admit what fits, then choose the tokens of the next step; decodes come first. Every token of it has a page to go to."""
        if self.waiting:
            self._admit()
        spans = self._spans()
        for _ in range(len(self.running) + 1):
            if spans or not self.waiting or any(s.in_flight for s in (*self.running, *self.waiting)):
                break
            if not self._strip_waiting() and self.running:
                self.preempt(self.running[-1])  # all that run are blocked by a sequence that has no pages
            self._admit()
            spans = self._spans()
        return spans

    def measured(self, tokens: int, seconds: float) -> None:
        """Size the next chunk of prompt tokens by the time of a step of `tokens`, as the `ChunkPolicy` says.

        Where chunks are not timed, only chunks beside decodes follow the speed: what is cut alike has the same bits.
        """
        if tokens >= MIN_CHUNK and seconds > 0:
            self._speed = tokens / seconds
            if not self.chunks.timed:  # whole chunks, also some time after one that did not fit the memory
                self.chunk = min(self.chunks.max_tokens, 2 * self.chunk)
                return
            fitting = max(self._fitting(STEP_S), self.chunk // 2)  # a first step also loads kernels: once is no reason to halve it twice
            if seconds < STEP_S:
                fitting = max(fitting, self.chunk)  # a short prompt that was quick says nothing against long ones
            largest = min(self.chunks.max_tokens, fitting // MIN_CHUNK * MIN_CHUNK, 2 * self.chunk)
            self.chunk = max(self.chunks.share_tokens, largest)

    def preempt(self, sequence: RunningRequest) -> None:
        """Send a running sequence back to the queue; what it has computed stays known until its pages are needed."""
        self.running.remove(sequence)
        sequence.withdraw()
        self.pager.release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, sequence, key=_priority_of)

    def fork(self, source: RunningRequest, target: RunningRequest) -> None:
        """Give `target` the cache of `source` by reference; a shared page is copied before it is written."""
        target.long, target.salt = source.long, source.salt
        self.pager.fork(source, target)

    def remove(self, sequence: RunningRequest, *, keep: bool = True) -> None:
        """Take a sequence out, wherever it is, and free its pages. Harmless when it is out already.

        Args:
            keep: what it computed may serve others.
        """
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pager.release(sequence, keep=keep)
        if not self.busy:
            self._turns.clear()

    # ---- admission

    def _admit(self) -> None:
        while sequence := next((s for s in self.waiting if not s.in_flight and s.ready()), None):
            while not self._fits(sequence):
                victim = self.running[-1] if self.running else None
                if victim is None or victim.rank[0] <= sequence.rank[0]:
                    return
                self.preempt(victim)
            self.waiting.remove(sequence)
            found = self.pager.admit(sequence) if not sequence.pages else 0
            if not sequence.preemptions:
                sequence.reused_tokens = found
            self._turn = max(self._turn, sequence.rank[1])
            sequence.start()
            insort(self.running, sequence, key=_priority_of)

    def _fits(self, sequence: RunningRequest) -> bool:
        """Whether it may run: `max_sequences` is not reached, and its tokens fit the pages that the running ones do not need."""
        if len(self.running) >= self.max_sequences:
            return False
        table, need = self.pager.table, self._need(sequence)
        if need <= table.num_free - sum(self._need(s) for s in self.running):
            return True
        shared = sum(table.count(page) > 0 for page in self.pager.find(sequence).pages)
        return need - shared <= table.num_free - sum(self._need(s) for s in self.running)

    def _need(self, sequence: RunningRequest) -> int:
        tokens = min(len(sequence.ids) + 1, max(sequence.most_tokens, len(sequence.ids)))
        return max(0, self.pager.pages_for(tokens) - len(sequence.pages))

    # ---- the tokens of a step

    def _spans(self) -> list[TokenSpan]:
        spans: list[TokenSpan] = []
        prompts: list[RunningRequest] = []
        preempted = self.preemptions
        pager = self.pager
        for sequence in self.running.copy():
            if not sequence.long and not self._lengthen(sequence):
                continue
            in_flight, start = sequence.in_flight, sequence.computed
            end = len(sequence.ids) + in_flight
            length = end - start
            if length <= 0 or (self.preemptions != preempted and sequence not in self.running):
                continue
            if length == 1 and sequence.on_device and sequence.writable_changes == pager.changes:  # one token more; it is never rewound
                low, high = sequence.room
                if low <= start and end <= high and end - sequence.prompt_tokens < sequence.limit:
                    spans.append(_span(TokenSpan, (sequence, start, 1, 1, in_flight > 0)))
                    continue
            if in_flight or length <= sequence.rows:
                if (not in_flight or sequence.new_tokens + in_flight < sequence.limit) and self._claim(
                    sequence, sequence.computed + length
                ):
                    spans.append(TokenSpan(sequence, sequence.computed, length, length, in_flight > 0))
            else:
                prompts.append(sequence)
        if prompts:
            spans += self._chunks(prompts, self.budget(decoding=bool(spans)))
        if preempted != self.preemptions:  # a sequence was preempted after its span was chosen
            running = set(map(id, self.running))
            spans = [span for span in spans if id(span.sequence) in running]
        return spans

    def _lengthen(self, sequence: RunningRequest) -> bool:
        """Where a sequence has grown past the switch, begin it again as a long one. False: what is in flight must come back first."""
        assert self.switch is not None, "only a model that switches has short sequences"
        if len(sequence.ids) - sequence.drafted <= self.switch < len(sequence.ids):
            sequence.withdraw()  # draft tokens are verified on their own side of the switch
        if len(sequence.ids) + sequence.in_flight <= self.switch:
            return True
        if sequence.in_flight:
            return False
        self.pager.release(sequence)
        sequence.long, sequence.salt, sequence.keys = True, sequence.own_salt, []
        return True

    def _chunks(self, prompts: list[RunningRequest], budget: int) -> list[TokenSpan]:
        """Share the budget; what one prompt leaves of its share goes to the next."""
        spans: list[TokenSpan] = []
        claimed: set[bytes] = set()
        prompts = [s for s in prompts if self._is_first(s, claimed)]
        for i, sequence in enumerate(prompts):
            if budget <= 0 or sequence not in self.running:
                continue
            start, pending = sequence.computed, len(sequence.ids) - sequence.computed
            count = min(pending, budget, max(self.chunks.share_tokens, budget // (len(prompts) - i)))
            if count < pending < count + sequence.rows and pending > sequence.rows:
                count = pending - sequence.rows  # rows that belong together come together
            if sequence.pictures is not None:  # and so does a picture whose tokens see each other
                count = min(pending, sequence.pictures.block_end(start + count) - start)
            if self._claim(sequence, start + count):
                spans.append(TokenSpan(sequence, start, count, max(0, count - (pending - sequence.rows))))
                budget -= count
        return spans

    def _is_first(self, sequence: RunningRequest, claimed: set[bytes]) -> bool:
        """Take over what is known by now; False: a better ranked prompt of this step is about to compute the next page."""
        pager, size = self.pager, self.pager.page_size
        if not pager.reuse:
            return True
        found = pager.extend(sequence)
        sequence.reused_tokens += 0 if sequence.preemptions else found
        mine = pager.claims(sequence)
        if sequence.computed % size == 0 and mine and mine[0] in claimed:
            return False
        claimed.update(mine)
        return True

    def _claim(self, sequence: RunningRequest, end: int) -> bool:
        """Get pages up to `end`, from sequences of worse rank where none is free. False: it was preempted itself."""
        while not self.pager.reserve(sequence, end):
            if self._strip_waiting():
                continue
            victim = self.running[-1]
            assert len(self.running) > 1, f"a sequence of {end} tokens alone in the cache, and no page is free"
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _strip_waiting(self) -> bool:
        """Take back pages that were given to waiting sequences by `fork`; False: there were none."""
        held = [s for s in self.waiting if s.pages]
        for sequence in held:
            self.pager.release(sequence)
        return bool(held)

    def budget(self, *, decoding: bool) -> int:
        """Prompt tokens of the next step, at most. decoding: other sequences decode in the same step."""
        if not decoding or not self._speed:
            return self.chunk
        return min(self.chunk, max(self.chunks.share_tokens, self._fitting(BESIDE_S)))

    def _fitting(self, seconds: float) -> int:
        share = self.chunks.share_tokens
        return int(self._speed * seconds) // share * share


_span = tuple.__new__  # half the time of `TokenSpan(...)`


def _priority_of(sequence: RunningRequest) -> tuple[int, int, int]:
    return sequence.rank
