"""A draft model: a smaller one with the same tokenizer, which proposes draft tokens for the target to verify."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from exl2nb.cache.pages import PageTable
from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.core.errors import EngineClosed, GenerationError, TokenizerError
from exl2nb.core.log import logger
from exl2nb.core.progress import Sink
from exl2nb.generator.executor import Draw, Executor, HostExecutor, PendingStep, Results, Step
from exl2nb.generator.sequence import Sequence, choose
from exl2nb.generator.speculation import StepTimes
from exl2nb.model.batch import Batch, Span
from exl2nb.sampling.draw import Sampled
from exl2nb.sampling.state import SamplerState
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2nb.generator.engine import Forward

DECODED, SOON = 8, 64  # tokens of a sequence that a decode step takes; lag up to which several such steps are quicker than a prompt's
CHUNK = 256  # a draft that lags by more tokens proposes nothing and computes a chunk per step of the target


@dataclass
class _DraftCache:
    """What the draft's cache holds of one sequence: `computed` tokens in `pages`."""

    sequence: weakref.ref[Sequence]
    pages: list[int] = field(default_factory=list)
    computed: int = 0


class _Turn(NamedTuple):
    """A sequence in a round of draft tokens: its index in what is `wanted`, its cache, the ids it lacks, how many to propose at most."""

    place: int
    sequence: Sequence
    known: _DraftCache
    ids: list[int]
    most: int


class DraftModel:
    """Proposes tokens by running a smaller model.

    It has a cache of its own and proposes nothing for a sequence that finds no free page in it. The draft token is the one that the
    request's own sampler, with the request's own random number for that place, would draw from the draft's logits: where both models agree
    on the distribution, they agree on the token, also when it is drawn. An executor draws the tokens of requests that it can draw for; on a
    GPU all steps of a round are then launched before the first result is read.

    Args:
        model: of the draft. spec: of its cache.
        context: longest sequence it runs, in tokens; longer ones go on without draft tokens.
        vocab_size: of the target. drawn: whether the draft's tokens are ids of the target as they are: the vocabularies are of one size.
        run: runs a function while nothing else runs the model; a TimeoutError means that it is in use, and nothing is proposed this time.
        executor: makes the executor of a GPU; None = on the CPU.
        on_close: called at the end, to give the model back.
    """

    def __init__(
        self,
        model: Forward,
        spec: CacheSpec,
        *,
        context: int,
        vocab_size: int,
        run: Callable[[Callable[[], list[list[int]]]], list[list[int]]] | None = None,
        device: str = "cpu",
        drawn: bool = True,
        executor: Callable[[Any, KVCache], Executor] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._model, self._run, self._on_close = model, run, on_close
        self._times = StepTimes()
        self._size, self._context, self._vocab_size = spec.page_size, context, vocab_size
        made = getattr(model, "new_cache", None)  # where its layers are
        self._cache, self._table = KVCache(spec, device) if made is None else made(spec), PageTable(spec.num_pages)
        self._executor, self._ahead, self._drawn = (executor or HostExecutor)(model, self._cache), executor is not None, drawn
        self._known: dict[int, _DraftCache] = {}
        self._gone = False

    @property
    def pages(self) -> PageTable:
        """The page table of the draft's cache."""
        return self._table

    def seconds(self, count: int) -> float:
        """What a round of so many draft tokens takes, whose sequences lag by a few tokens; 0: none was measured."""
        return self._times.seconds(count) if self._times.known else 0.0

    def prepare(self, progress: Sink | None) -> None:
        """Do beforehand what the first draft tokens would wait for, such as compiling kernels."""
        self._executor.prepare(progress)

    def propose(self, wanted: Seq[tuple[Sequence, int]], /) -> list[list[int]]:
        """At most the wanted number of draft tokens for each sequence; all sequences together, one step of the draft per token."""
        if self._gone:
            return [[] for _ in wanted]
        self._sweep()
        try:
            return self._propose(wanted) if self._run is None else self._run(partial(self._propose, wanted))
        except TimeoutError:
            pass
        except EngineClosed:
            logger.warning("the draft model was closed; generation goes on without speculation")
            self._gone = True
        except Exception:  # the target's text does not depend on the draft
            logger.exception("the draft model failed; generation goes on without speculation")
            self._gone = True
        return [[] for _ in wanted]

    def close(self) -> None:
        """Give memory back."""
        self._gone = True
        self._known.clear()
        self._executor.close()
        self._cache.close()
        if self._on_close is not None:
            self._on_close()

    # ---- inside

    def _propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in wanted]
        drawn: list[_Turn] = []
        chosen: list[_Turn] = []  # what the request's sampler must choose on the host
        most = max((min(count, self._context - len(sequence.ids)) for sequence, count in wanted), default=0)
        for place, (sequence, count) in enumerate(wanted):
            known, room = self._state(sequence), self._context - len(sequence.ids)
            if room <= 0 or not self._reserve(known, len(sequence.ids) + min(most, room)):
                continue
            if len(sequence.ids) - known.computed > CHUNK:
                self._forward([(known, list(islice(sequence.ids, known.computed, known.computed + CHUNK)), "none")])
                continue
            turn = _Turn(place, sequence, known, sequence.ids[known.computed :], min(count, room))
            draws = self._drawn and sequence.drawn and room >= most and self._executor.can_draw(sequence.sampler)
            (drawn if draws else chosen).append(turn)
        if drawn:
            self._draw_together(drawn, most, found)
        if chosen:
            self._choose_together(chosen, found)
        return found

    def _draw_together(self, turns: list[_Turn], steps: int, found: list[list[int]]) -> None:
        """Let the executor draw: so many steps of all sequences, of which each keeps what it wants."""
        executor, ahead = self._executor, self._ahead
        began, prepared, rows, late = time.perf_counter(), executor.prepared, len(turns), False
        while ahead and (lagging := [turn for turn in turns if DECODED < len(turn.ids) <= SOON]):
            late = True
            batch = self._batch([(turn.known, turn.ids[:DECODED], "all") for turn in lagging])
            executor.launch(Step(batch, None, [Draw(turn.sequence.sampler, 0, 0) for turn in lagging for _ in range(DECODED)], False))
            turns = [turn._replace(ids=turn.ids[DECODED:]) if DECODED < len(turn.ids) <= SOON else turn for turn in turns]
        wants = "all" if ahead and all(len(turn.ids) <= DECODED for turn in turns) else "last"  # then the GPU has a captured step for it
        batch = self._batch([(turn.known, turn.ids, wants) for turn in turns])
        last = np.arange(rows, dtype=np.int32) if wants == "last" else batch.cu_seqlens.numpy()[1:] - 1
        draws = [
            Draw(turn.sequence.sampler, turn.sequence.sampler.count, 0) for turn in turns for _ in (turn.ids if wants == "all" else [0])
        ]
        launched = [executor.launch(Step(batch, None, draws, False))]
        results = [] if ahead else [_read(launched[0])]
        size, table = self._size, batch.block_table.numpy()
        if steps > 1:
            batch = self._batch([(turn.known, [0], "last") for turn in turns])
        for number in range(1, steps):
            ids, positions, slots, lens = (t.numpy() for t in (batch.input_ids, batch.positions, batch.slot_mapping, batch.context_lens))
            if number > 1:
                positions += 1
                lens += 1
            slots[:] = table[np.arange(rows), positions // size] * size + positions % size
            feed = (last if number == 1 else np.arange(rows, dtype=np.int32)) if ahead else None
            if not ahead:
                ids[:] = [token.id if isinstance(token, Sampled) else 0 for token in results[-1]]
            draws = [Draw(turn.sequence.sampler, turn.sequence.sampler.count + number, 0) for turn in turns]
            same = ahead and (number > 1 or len(last) == int(last[-1]) + 1)
            launched.append(executor.launch(Step(batch, feed, draws, same)))
            if not ahead:
                results.append(_read(launched[-1]))
        if ahead:
            results = [_read(one) for one in launched]
        for turn in turns:
            turn.known.computed += max(0, steps - 2)
        for step, tokens in enumerate(results):
            for row, turn in enumerate(turns):
                token = tokens[int(last[row]) if step == 0 else row] if tokens else None
                if isinstance(token, Sampled) and step < turn.most and len(found[turn.place]) == step:
                    found[turn.place].append(token.id)
        if executor.prepared == prepared and not late and all(len(turn.ids) <= DECODED for turn in turns):
            self._times.record(steps, time.perf_counter() - began)

    def _choose_together(self, turns: list[_Turn], found: list[list[int]]) -> None:
        """Let the requests' samplers choose from logits on the host."""
        active: list[tuple[int, _DraftCache, SamplerState, list[int], int]] = []  # place, cache, sampler, tokens to run, tokens to propose
        for place, sequence, known, ids, count in turns:
            sampler = sequence.sampler.copy()
            sampler.retry = 0
            active.append((place, known, sampler, ids, count))
        began = time.perf_counter()
        while active:
            rows = self._forward([(known, ids, "last") for _, known, _, ids, _ in active])
            going = []
            for (place, known, sampler, _, count), row in zip(active, rows):
                token = self._draw(row, sampler)
                if token is None:
                    continue
                found[place].append(token)
                if count > 1 and not sampler.finished:
                    going.append((place, known, sampler, [token], count - 1))
            active = going
        if all(len(turn.ids) <= DECODED for turn in turns):
            self._times.record(max(turn.most for turn in turns), time.perf_counter() - began)

    def _draw(self, row: np.ndarray, sampler: SamplerState) -> int | None:
        """What the request would take; None where the draft has no answer (a broken row, or nothing that is allowed)."""
        size = self._vocab_size  # vocabularies may be padded to different sizes
        row = row[:size] if len(row) >= size else np.concatenate([row, np.full(size - len(row), -np.inf, np.float32)])
        try:
            return choose(row, sampler)[0].id
        except Exception:  # the sequence then goes on without a draft token; an error of the target's own row is raised there
            return None

    def _forward(self, parts: Seq[tuple[_DraftCache, list[int], str]]) -> np.ndarray:
        return self._model.forward(self._batch(parts), self._cache).to("cpu", torch.float32).numpy()

    def _batch(self, parts: Seq[tuple[_DraftCache, list[int], str]]) -> Batch:
        """The next tokens of some sequences, which are in their caches after the step."""
        spans = [Span(ids=ids, start=known.computed, pages=known.pages, logit_rows=rows) for known, ids, rows in parts]
        for known, ids, _ in parts:
            known.computed += len(ids)
        return Batch.build(spans, page_size=self._size)

    def _state(self, sequence: Sequence) -> _DraftCache:
        known = self._known.get(id(sequence))
        if known is None:
            known = self._known[id(sequence)] = _DraftCache(weakref.ref(sequence))
        proposer = sequence.proposer
        assert proposer is not None, "a sequence that speculates"
        known.computed, proposer.kept = min(known.computed, proposer.kept, len(sequence.ids) - 1), 1 << 62
        return known

    def _reserve(self, known: _DraftCache, tokens: int) -> bool:
        more = -(-tokens // self._size) - len(known.pages)
        if more > self._table.num_free:
            return False
        if more > 0:
            known.pages += self._table.allocate(more)
        return True

    def _sweep(self) -> None:
        """Take the pages of sequences that have ended."""
        for key, known in list(self._known.items()):
            sequence = known.sequence()
            if sequence is None or sequence.ended:
                self._table.free(known.pages)
                del self._known[key]


def _read(launched: PendingStep | Results) -> Results:
    """The results of a step; none of a step without a distribution, whose error is raised where the target meets it."""
    try:
        return launched if isinstance(launched, list) else launched.result()
    except GenerationError:
        return []


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer, *, target_size: int, draft_size: int) -> None:
    """Refuse a draft model whose ids mean something else.

    Args:
        target, draft: the tokenizers. target_size, draft_size: of the models' vocabularies; the draft's may be padded otherwise.

    Raises:
        TokenizerError: names the first id that differs.
    """
    mine, theirs = _by_id(target), _by_id(draft)
    for i in range(max(len(mine), len(theirs), max(mine, default=0) + 1, max(theirs, default=0) + 1)):
        if mine.get(i) != theirs.get(i):
            raise TokenizerError(
                f"the draft model has another tokenizer: token {i} is {theirs.get(i)!r} there and {mine.get(i)!r} here; "
                "use a smaller model of the same family, or speculation='ngram'"
            )
    if target.eos_ids != draft.eos_ids:
        logger.info("draft and target end texts by other tokens: %s and %s", sorted(draft.eos_ids), sorted(target.eos_ids))
    needed = max(mine, default=-1) + 1
    if min(target_size, draft_size) < needed:
        raise TokenizerError(
            f"the draft model's vocabulary has {draft_size} entries and the tokenizer {needed}; it belongs to another model"
        )


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: text for text, i in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
