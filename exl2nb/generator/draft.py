"""A draft model: a smaller one with the same tokenizer, which proposes draft tokens for the target to verify."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from exl2nb.cache.pages import PageAllocator
from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.core.errors import EngineClosed, GenerationError, TokenizerError
from exl2nb.core.log import logger
from exl2nb.core.progress import Sink
from exl2nb.generator.engine import executor_for
from exl2nb.generator.executor import DrawRequest, Executor, PendingStep, Results, StepInput
from exl2nb.generator.sequence import RunningRequest, draw_token
from exl2nb.generator.speculation import DeviceDrafts, DraftRound, StepTimes
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.sampling.draw import Sampled
from exl2nb.sampling.sampler_state import SamplerState
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2nb.model.runner import StepRunner

MAX_DECODE_TOKENS = 8  # tokens of a sequence that a decode step takes
FIRST_STEP_TOKENS = (
    2  # tokens of a sequence in the first step of a GPU's round: what it lacks after a round whose draft tokens were all accepted
)
MAX_DECODED_LAG_TOKENS = 64  # on a GPU, lag up to which several decode steps are quicker than a prompt's
FUSE_AFTER_ROUNDS = (
    4  # rounds of a length after which the next ones begin behind a step: a GPU captures that as well, which a trial must not wait for
)
CATCH_UP_CHUNK_TOKENS = 256  # a draft that lags by more tokens proposes nothing and computes a chunk per step of the target


@dataclass
class _DraftCache:
    """What the draft's cache holds of one sequence: `computed` tokens in `pages`."""

    pages: list[int] = field(default_factory=list)
    computed: int = 0


class _Turn(NamedTuple):
    """A sequence in a round of draft tokens: its index in what is `wanted`, its cache, the ids it lacks, how many to propose at most."""

    place: int
    sequence: RunningRequest
    known: _DraftCache
    ids: list[int]
    most: int


class DraftSlot(NamedTuple):
    """A sequence in a round on a GPU: its last FIRST tokens, where in the text they begin, its pages, how the next one is drawn."""

    ids: list[int]
    start: int
    pages: list[int]
    draw: DrawRequest


class Rounds(Protocol):
    """Runs whole rounds on a GPU. prepared: kinds of rounds that were captured."""

    prepared: int

    def launch(self, places: Seq[DraftSlot], steps: int, began: float, /) -> DraftRound | None:
        """Begin a round of so many draft tokens, `began` at `time.perf_counter()`; None where it cannot be captured."""
        ...

    def follow(self, launched: DraftRound, drawn: torch.Tensor, sequences: int, /) -> DraftRound | None:
        """Begin the next round behind the step that was launched last, which verifies this one; None where it cannot be captured.

        sequences: of the round. drawn: what that step draws for their rows, on the device.
        """
        ...

    def close(self) -> None:
        """Give memory back."""
        ...


class _Following(NamedTuple):
    """A round of a device, and what it was launched for: sequences in the order of its rows, their lengths then, and its steps."""

    round: DraftRound
    sequences: list[RunningRequest]
    lengths: list[int]
    steps: int


Proposed = list[list[int] | DeviceDrafts]


class DraftModel:
    """Proposes tokens by running a smaller model.

    It has a cache of its own and proposes nothing for a sequence that finds no free page in it. The draft token is the one that the
    request's own sampler, with the request's own random number for that place, would draw from the draft's logits: where both models agree
    on the distribution, they agree on the token, also when it is drawn. An executor draws the tokens of requests that it can draw for; on a
    GPU all steps of a round are one launch.

    Args:
        model: of the draft.
        spec: of its cache.
        context: longest sequence it runs, in tokens; longer ones go on without draft tokens.
        vocab_size: of the target.
        run: runs a function while nothing else runs the model; a TimeoutError means that it is in use, and nothing is proposed this time.
        drawn: whether the draft's tokens are ids of the target as they are: the vocabularies are of one size.
        executor: makes what computes the steps; None = what the model's capabilities ask for.
        rounds: makes what runs all steps of a round at once on a GPU; None = every step is launched alone.
        on_device: whether the target's steps read the draft tokens where they are made: both models run on the same GPU, in the same
            stream.
        on_close: called at the end, to give the model back.

    Attributes:
        rounds: runs whole rounds on a GPU, or None.
        dropped: whether the last `propose` discarded a round that was launched behind a step, or a sequence of it had ended.
    """

    def __init__(
        self,
        model: StepRunner,
        spec: CacheSpec,
        *,
        context: int,
        vocab_size: int,
        run: Callable[[Callable[[], Proposed]], Proposed] | None = None,
        drawn: bool = True,
        executor: Callable[[Any, KVCache], Executor] | None = None,
        rounds: Callable[[Any, KVCache], Rounds] | None = None,
        on_device: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._model, self._run, self._on_close = model, run, on_close
        self._times = StepTimes()
        self._size, self._context, self._vocab_size = spec.page_size, context, vocab_size
        self._cache, self._table = model.new_cache(spec), PageAllocator(spec.num_pages)
        self._executor, self._drawn = (executor or executor_for)(model, self._cache), drawn
        self.rounds = None if rounds is None else rounds(model, self._cache)
        self._on_device = on_device
        self._measured: tuple[DraftRound, int] | None = None  # the last round, and its steps, if its time says something
        self._known: dict[int, _DraftCache] = {}
        self._last: _Following | None = None  # the round whose draft tokens are verified by the step that is launched next
        self._ahead: _Following | None = None  # the one that was launched behind that step
        self._begun = Counter[int]()  # rounds by length
        self._unread: list[PendingStep | Results] = []  # catch-up steps, whose results are read only because executors expect it
        self.dropped = self._discarded = self._gone = False

    @property
    def pages(self) -> PageAllocator:
        """The page table of the draft's cache."""
        return self._table

    @property
    def prepared(self) -> int:
        """Kinds of steps and rounds that were captured on a GPU so far."""
        return self._executor.prepared + (self.rounds.prepared if self.rounds is not None else 0)

    def seconds(self, count: int) -> float:
        """What a round of so many draft tokens takes, whose sequences lag by a few tokens; 0: none was measured."""
        return self._times.seconds(count) if self._times.known else 0.0

    def prepare(self, progress: Sink | None) -> None:
        """Do beforehand what the first draft tokens would wait for, such as compiling kernels."""
        self._executor.prepare(progress)

    def propose(self, wanted: Seq[tuple[RunningRequest, int]], /) -> Proposed:
        """At most the wanted number of draft tokens for each sequence; all sequences together, one step of the draft per token."""
        if self._gone:
            return [[] for _ in wanted]
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

    def follow(self, drawn: torch.Tensor, sequences: Seq[RunningRequest], /) -> bool:
        """Begin the next round of the same length, before it is known which draft tokens are accepted, if a step verifies all of the last.

        Args:
            drawn: what the step that was launched last draws, on the device. sequences: of that step.

        Returns:
            Whether something was made ready meanwhile, as `Rounds.prepared` counts it.
        """
        last, self._last = self._last, None
        if last is None or self.rounds is None or self._gone or len(last.sequences) != len(sequences):
            return False
        prepared = self.rounds.prepared
        try:
            self._follow(self.rounds, last, drawn, sequences)
        except Exception:  # as in `propose`
            logger.exception("the draft model failed; generation goes on without speculation")
            self._gone = True
        return self.rounds.prepared != prepared

    def release(self, sequence: RunningRequest, /) -> None:
        """A sequence has ended: free its pages, discard the rounds that it is part of. What runs ends before the pages are used again."""
        known = self._known.pop(id(sequence), None)
        if known is not None:
            self._table.free(known.pages)
        if self._last is not None and sequence in self._last.sequences:
            self._last = None
        if self._ahead is not None and sequence in self._ahead.sequences:
            self._ahead, self._discarded = None, True

    def close(self) -> None:
        """Give memory back."""
        self._gone = True
        self._last = self._ahead = None
        self._known.clear()
        self._executor.close()
        if self.rounds is not None:
            self.rounds.close()
        self._cache.close()
        if self._on_close is not None:
            self._on_close()

    # ---- inside

    def _propose(self, wanted: Seq[tuple[RunningRequest, int]]) -> Proposed:
        began = time.perf_counter()
        self._read_behind()
        if self._measured is not None:
            launched, steps = self._measured
            self._times.record(steps, launched.seconds())
            self._measured = None
        ahead, self._ahead, self._last = self._ahead, None, None
        goes_on = ahead is not None and _wants_another_round(ahead, wanted)
        self.dropped, self._discarded = self._discarded or (ahead is not None and not goes_on), False
        if ahead is not None and goes_on:
            return self._take(ahead, wanted, began)
        found: Proposed = [[] for _ in wanted]
        drawn: list[_Turn] = []
        chosen: list[_Turn] = []  # what the request's sampler must choose on the host
        most = max((min(count, self._context - len(sequence.ids)) for sequence, count in wanted), default=0)
        for place, (sequence, count) in enumerate(wanted):
            known, room = self._state(sequence), self._context - len(sequence.ids)
            needed = len(sequence.ids) + min(most, room)
            if room <= 0 or not ((self._on_device and self._reserve(known, needed + most + 1)) or self._reserve(known, needed)):
                continue
            if len(sequence.ids) - known.computed > CATCH_UP_CHUNK_TOKENS:
                self._forward([(known, list(islice(sequence.ids, known.computed, known.computed + CATCH_UP_CHUNK_TOKENS)), "none")])
                continue
            turn = _Turn(place, sequence, known, sequence.ids[known.computed :], min(count, room))
            draws = self._drawn and sequence.drawn and room >= most and self._executor.can_draw(sequence.sampler)
            (drawn if draws else chosen).append(turn)
        if drawn and self.rounds is not None:
            drawn = self._launch_round(
                self.rounds, [turn for turn in drawn if len(turn.sequence.ids) >= FIRST_STEP_TOKENS], most, found, began
            )
        if drawn:
            self._draw_batched(drawn, most, found)
        if chosen:
            self._choose_batched(chosen, found)
        return found

    def _follow(self, rounds: Rounds, last: _Following, drawn: torch.Tensor, sequences: Seq[RunningRequest]) -> None:
        steps = last.steps
        for sequence, mine in zip(sequences, last.sequences):
            drafts, known = sequence.device_drafts, self._known.get(id(sequence))
            if sequence is not mine or drafts is None or drafts.round is not last.round or sequence.drafted != steps or known is None:
                return
            longest = len(sequence.ids) + 1 + steps
            if longest > min(self._context, len(known.pages) * self._size) or sequence.limit - sequence.new_tokens <= 1 + steps:
                return  # the last case: it may end with this step
        launched = rounds.follow(last.round, drawn, len(sequences))
        if launched is not None:
            self._ahead = _Following(launched, [*sequences], [len(sequence.ids) - steps for sequence in sequences], steps)

    def _take(self, ahead: _Following, wanted: Seq[tuple[RunningRequest, int]], began: float) -> Proposed:
        """The round that was launched behind the last step."""
        launched, steps = self._measured = ahead.round, ahead.steps
        launched.began = began
        found: Proposed = []
        for row, (sequence, count) in enumerate(wanted):
            self._state(sequence).computed = len(sequence.ids) + steps - 1
            found.append(DeviceDrafts(launched, row, min(count, steps)))
        if max(count for _, count in wanted) == steps:
            self._last = _Following(launched, ahead.sequences, [], steps)
        return found

    def _launch_round(self, rounds: Rounds, turns: list[_Turn], steps: int, found: Proposed, began: float) -> list[_Turn]:
        """Let the GPU draw: so many steps of all sequences in one launch, of which each keeps what it wants; those it cannot run so."""
        lag = max((len(turn.ids) for turn in turns), default=0)
        if lag > MAX_DECODED_LAG_TOKENS:
            self._forward([(turn.known, turn.ids[:-FIRST_STEP_TOKENS], "none") for turn in turns if len(turn.ids) > FIRST_STEP_TOKENS])
        for _ in range(0, 0 if lag > MAX_DECODED_LAG_TOKENS else lag - FIRST_STEP_TOKENS, MAX_DECODE_TOKENS):
            behind = [
                (turn.known, turn.sequence.ids[turn.known.computed : -FIRST_STEP_TOKENS][:MAX_DECODE_TOKENS], "all") for turn in turns
            ]
            batch = self._batch([one for one in behind if one[1]])
            draws = [DrawRequest(turns[0].sequence.sampler, 0, 0)] * len(batch.input_ids)
            self._unread.append(self._executor.launch(StepInput(batch, None, draws, False)))
        places = []
        for _, sequence, known, _, _ in turns:
            known.computed = len(sequence.ids) - FIRST_STEP_TOKENS  # where only one is missing, the one before is computed again
            draw = DrawRequest(sequence.sampler, sequence.sampler.count, 0)
            places.append(DraftSlot(sequence.ids[-FIRST_STEP_TOKENS:], known.computed, known.pages, draw))
        prepared = rounds.prepared
        launched = rounds.launch(places, steps, began) if places else None
        if launched is None:
            self._read_behind()
            return [turn._replace(ids=turn.sequence.ids[-FIRST_STEP_TOKENS:]) for turn in turns]
        for row, (place, _, known, _, count) in enumerate(turns):
            known.computed += FIRST_STEP_TOKENS + steps - 1
            drafts = DeviceDrafts(launched, row, count)
            found[place] = drafts if self._on_device else drafts.tokens()
        self._begun[steps] += 1
        if self._on_device and self._begun[steps] >= FUSE_AFTER_ROUNDS:
            self._last = _Following(launched, [turn.sequence for turn in turns], [], steps)
        if rounds.prepared == prepared and lag <= FIRST_STEP_TOKENS:
            self._measured = launched, steps
        return []

    def _read_behind(self) -> None:
        for one in self._unread:
            _read_results(one)
        self._unread.clear()

    def _draw_batched(self, turns: list[_Turn], steps: int, found: Proposed) -> None:
        """Let the executor draw: so many steps of all sequences, of which each keeps what it wants."""
        began, rows = time.perf_counter(), len(turns)
        drafted: list[list[int]] = [[] for _ in turns]
        batch, tokens = self._batch([(turn.known, turn.ids, "last") for turn in turns]), Results()
        size, table = self._size, batch.block_table.numpy()
        for number in range(steps):
            if number == 1:
                batch = self._batch([(turn.known, [0], "last") for turn in turns])
            if number:
                ids, positions, slots, lens = (
                    t.numpy() for t in (batch.input_ids, batch.positions, batch.slot_mapping, batch.context_lens)
                )
                if number > 1:
                    positions += 1
                    lens += 1
                slots[:] = table[np.arange(rows), positions // size] * size + positions % size
                ids[:] = [token.id if isinstance(token, Sampled) else 0 for token in tokens] or 0
            draws = [DrawRequest(turn.sequence.sampler, turn.sequence.sampler.count + number, 0) for turn in turns]
            tokens = _read_results(self._executor.launch(StepInput(batch, None, draws, False)))
            for turn, mine, token in zip(turns, drafted, tokens):
                if isinstance(token, Sampled) and len(mine) == number < turn.most:
                    mine.append(token.id)
        for turn, mine in zip(turns, drafted):
            turn.known.computed += max(0, steps - 2)
            found[turn.place] = mine
        if all(len(turn.ids) <= MAX_DECODE_TOKENS for turn in turns):
            self._times.record(steps, time.perf_counter() - began)

    def _choose_batched(self, turns: list[_Turn], found: Proposed) -> None:
        """Let the requests' samplers choose from logits on the host."""
        active: list[tuple[int, _DraftCache, SamplerState, list[int], int]] = []  # place, cache, sampler, tokens to run, tokens to propose
        for place, sequence, known, ids, count in turns:
            sampler = sequence.sampler.copy()
            sampler.retry = 0
            active.append((place, known, sampler, ids, count))
        drafted: dict[int, list[int]] = {turn.place: [] for turn in turns}
        began = time.perf_counter()
        while active:
            rows = self._forward([(known, ids, "last") for _, known, _, ids, _ in active])
            going = []
            for (place, known, sampler, _, count), row in zip(active, rows):
                token = self._draw(row, sampler)
                if token is None:
                    continue
                drafted[place].append(token)
                if count > 1 and not sampler.finished:
                    going.append((place, known, sampler, [token], count - 1))
            active = going
        for place, tokens in drafted.items():
            found[place] = tokens
        if all(len(turn.ids) <= MAX_DECODE_TOKENS for turn in turns):
            self._times.record(max(turn.most for turn in turns), time.perf_counter() - began)

    def _draw(self, row: np.ndarray, sampler: SamplerState) -> int | None:
        """What the request would take; None where the draft has no answer (a broken row, or nothing that is allowed)."""
        size = self._vocab_size  # vocabularies may be padded to different sizes
        row = row[:size] if len(row) >= size else np.concatenate([row, np.full(size - len(row), -np.inf, np.float32)])
        try:
            return draw_token(row, sampler)[0].id
        except Exception:  # the sequence then goes on without a draft token; an error of the target's own row is raised there
            return None

    def _forward(self, parts: Seq[tuple[_DraftCache, list[int], str]]) -> np.ndarray:
        return self._model.forward(self._batch(parts), self._cache).to("cpu", torch.float32).numpy()

    def _batch(self, parts: Seq[tuple[_DraftCache, list[int], str]]) -> Batch:
        """The next tokens of some sequences, which are in their caches after the step."""
        spans = [SequenceSlice(ids=ids, start=known.computed, pages=known.pages, logit_rows=rows) for known, ids, rows in parts]
        for known, ids, _ in parts:
            known.computed += len(ids)
        return Batch.build(spans, page_size=self._size)

    def _state(self, sequence: RunningRequest) -> _DraftCache:
        known = self._known.get(id(sequence))
        if known is None:
            known = self._known[id(sequence)] = _DraftCache()
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


def _wants_another_round(ahead: _Following, wanted: Seq[tuple[RunningRequest, int]]) -> bool:
    """Whether draft tokens are wanted for the sequences of a round, no more than it has, and one step was verified since."""
    if len(wanted) != len(ahead.sequences) or max(count for _, count in wanted) > ahead.steps:
        return False
    for (sequence, count), mine, length in zip(wanted, ahead.sequences, ahead.lengths):
        if sequence is not mine or count < 1 or sequence.proposer is None or not sequence.proposer.pace.trail:
            return False
        at, _, accepted = sequence.proposer.pace.trail[-1]
        if at != length - sequence.prompt_tokens or len(sequence.ids) != length + accepted + 1:
            return False
    return True


def _read_results(launched: PendingStep | Results) -> Results:
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
    mine, theirs = _vocabulary_by_id(target), _vocabulary_by_id(draft)
    for i in range(max(len(mine), len(theirs), max(mine, default=0) + 1, max(theirs, default=0) + 1)):
        if mine.get(i) != theirs.get(i):
            raise TokenizerError(
                f"the draft model has another tokenizer: token {i} is {theirs.get(i)!r} there and {mine.get(i)!r} here; "
                "use a smaller model of the same family, or speculation='ngram'"
            )
    if target.eos_ids != draft.eos_ids:
        logger.info("draft and target end texts by other tokens: %s and %s", sorted(draft.eos_ids), sorted(target.eos_ids))
    needed = max((i for i in mine if i < target_size), default=-1) + 1  # ids beyond the target's embedding are in no prompt
    if min(target_size, draft_size) < needed:
        raise TokenizerError(
            f"the draft model's vocabulary has {draft_size} entries and the tokenizer {needed}; it belongs to another model"
        )


def _vocabulary_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: text for text, i in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
