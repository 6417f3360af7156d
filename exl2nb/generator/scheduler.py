"""Who runs in the next step: first come, first served, as pages allow. Knows no model and no text."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from exl2nb.cache.pages import PageTable
from exl2nb.core.errors import ContextOverflow
from exl2nb.generator.sequence import Sequence

STEP_S = 0.15  # a step with prompt tokens is sized to take about this long, so that cancelling is quick on a slow machine
MIN_CHUNK, MAX_CHUNK = 32, 512  # prompt tokens per step


class Span(NamedTuple):
    """`length` tokens of a sequence that run in this step, from `start` on. last: they reach its end, so their last row gets logits."""

    sequence: Sequence
    start: int
    length: int
    last: bool


class Scheduler:
    """Holds the sequences and their pages.

    A sequence gets all pages it can ever need when it is admitted, in order of arrival, so that nothing that runs can run out of pages.
    Every step decodes one token for each sequence that is past its prompt and gives the rest of the token budget to prompts, oldest first.

    Args:
        pages: the page table, which nobody else uses.
        page_size: tokens per page.
        max_sequences: that run at a time.
    """

    def __init__(self, pages: PageTable, *, page_size: int, max_sequences: int) -> None:
        self.pages, self.page_size, self.max_sequences = pages, page_size, max_sequences
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.chunk = 2 * MIN_CHUNK

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.running or self.waiting)

    def pages_for(self, sequence: Sequence) -> int:
        """Pages the sequence needs in all."""
        return -(-sequence.most_tokens // self.page_size)

    def check(self, sequence: Sequence) -> None:
        """Refuse what could never run.

        Raises:
            ContextOverflow: the sequence needs more pages than the cache has.
        """
        need, have = self.pages_for(sequence), self.pages.num_pages
        if need > have:
            raise ContextOverflow(
                f"the request needs {sequence.most_tokens} tokens in the cache ({len(sequence.request.prompt_ids)} of the prompt and up to "
                f"{sequence.limit} new), {need} pages of {self.page_size}; the cache has {have} pages, {have * self.page_size} tokens: "
                "lower max_tokens, or load the model with a larger cache_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Span]:
        """Admit what fits, then choose the tokens of the next step; decodes come first."""
        while self.waiting and len(self.running) < self.max_sequences and self.pages_for(self.waiting[0]) <= self.pages.num_free:
            sequence = self.waiting.popleft()
            sequence.start(self.pages.allocate(self.pages_for(sequence)))
            self.running.append(sequence)
        spans, budget = [], self.chunk
        for sequence in self.running:
            if sequence.pending == 1:
                spans.append(Span(sequence, sequence.computed, 1, True))
        for sequence in self.running:
            if sequence.pending > 1 and budget > 0:
                count = min(sequence.pending, budget)
                spans.append(Span(sequence, sequence.computed, count, count == sequence.pending))
                budget -= count
        return spans

    def measured(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` took so long: size the next chunk of prompt tokens by it."""
        if tokens >= MIN_CHUNK and seconds > 0:
            fits = int(tokens / seconds * STEP_S) // MIN_CHUNK * MIN_CHUNK
            self.chunk = max(MIN_CHUNK, min(MAX_CHUNK, fits, 2 * self.chunk))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its pages. Harmless when it is out already."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        pages, sequence.pages = sequence.pages, []
        self.pages.free(pages)
