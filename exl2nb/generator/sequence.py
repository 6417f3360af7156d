"""One request while it runs: ids, pages, sampler state and the answer so far. Belongs to the engine thread alone, its channel excepted."""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exl2nb.core.errors import GenerationError
from exl2nb.generator.handle import Channel
from exl2nb.generator.output import Output
from exl2nb.generator.request import Completion, Request, Rewind, Timings
from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.draw import Sampled, highest_logit, report
from exl2nb.sampling.sampler_state import SamplerState
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2nb.generator.beams import BeamGroup
    from exl2nb.generator.speculation import DeviceDrafts, Proposer

DEVICE_TOP = 20  # alternatives that a device reports


class RunningRequest:
    """Ids, pages and state.

    Attributes:
        ids: prompt, new tokens and, between `propose` and `advance`, draft tokens. computed: how many of them have K and V in the cache
        (written, or about to be by a launched step). pages: of the cache. top: alternatives to report. limit: new tokens at most, the
        request's max_tokens or the room left in the context. prompt_tokens: how many of the ids are prompt (one less than were given, where
        the last is healed).
        Kept by scheduler and pager: rank (the smaller runs first), keys (of the full pages of ids), published (full pages made known),
        room and room_changes (see `Pager.reserve`), reused_tokens, preemptions, salt (what besides tokens changes the pages; own_salt: of
        it the request's part), long (rotated as sequences beyond the scheduler's switch).
        adapter: its row of `Model.adapters`, -1 for none. pictures: of its prompt, or None; pictured: tokens up to the last one of a
        picture. Kept by the engine: in_flight (launched tokens whose results are not read yet), drawn (the executor draws), on_device (and
        the next step needs no result of the last), ended, deadline. group: None, or what it runs in step with; its members end together.

    Args:
        context: tokens of prompt and answer together, at most.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, *, context: int) -> None:
        self.request, self.channel, self.tokenizer = request, Channel(), tokenizer
        healed = heal_prompt(request.prompt_ids, tokenizer) if request.token_healing else None
        prompt = request.prompt_ids if healed is None else healed.ids
        self.ids, self.prompt_tokens = list(prompt), len(prompt)
        self.computed = 0
        self.pages: list[int] = []
        self.rank: tuple[int, int, int] = (0, 0, 0)
        self.keys: list[bytes] = []
        self.published = self.reused_tokens = self.preemptions = self.in_flight = 0
        self.room, self.writable_changes = (0, 0), -1
        self.adapter, self.own_salt = (-1, "") if request.lora is None else (request.lora.row, f"lora {request.lora.key}")
        self.salt, self.long = self.own_salt, True
        self.pictures = request.pictures
        self.pictured = 0 if request.pictures is None else request.pictures.end
        self.drawn = self.on_device = self.ended = False
        self.limit = min(request.max_tokens, context - len(prompt))
        self.ends = request.stop_ids | (frozenset() if request.ignore_eos else tokenizer.eos_ids)
        self.sampler = SamplerState(
            request.sampling,
            prompt,
            tokenizer=tokenizer,
            end_ids=sorted(self.ends),
            constraint=request.structure.start() if request.structure is not None else None,
        )
        self.output = Output(tokenizer, prompt, request.stop_texts, request.banned_strings, skip=healed.skip if healed else 0)
        self.group: BeamGroup | None = None
        self.proposer: Proposer | None = None
        self.drafted = 0  # ids at the end that are draft tokens
        self.device_drafts: DeviceDrafts | None = None  # where they are, while only the GPU knows them and the ids are 0
        self.rewinds: list[Rewind] = []
        self._healed = None if healed is None else healed.allowed
        self._banned_at: dict[int, set[int]] = {}  # position -> tokens that led to a banned text there
        self._rows: list[np.ndarray] = []  # raw logits of each new token, if asked for
        self._stopped_by: str | int | None = None
        self._handed = 0
        self.top = request.top_logprobs
        self._armed_at, self._structured = request.sampling.min_tokens, self.sampler.constraint is not None
        self._submitted = time.perf_counter()
        self.deadline = self._submitted + request.timeout_s if request.timeout_s is not None else float("inf")
        self._started = self._first = self._last = 0.0

    # ---- for the scheduler

    @property
    def number(self) -> int:
        """Of the request, as its handle says it."""
        return self.channel.number

    @property
    def pending(self) -> int:
        """Tokens the model has not seen: a prompt's rest, or the new token and draft tokens. 0: parked until its group has stepped."""
        return len(self.ids) - self.computed

    @property
    def page_ids(self) -> list[int]:
        """What the content of its pages depends on: its ids, those of pictures replaced by numbers of what they show."""
        return self.ids if self.pictures is None else [*self.pictures.page_ids, *self.ids[self.prompt_tokens :]]

    @property
    def rows(self) -> int:
        """How many of the last pending tokens need logits."""
        return 1 + self.drafted

    @property
    def new_tokens(self) -> int:
        """Tokens generated so far, a final end-of-text token included."""
        return len(self.ids) - self.drafted - self.prompt_tokens

    @property
    def most_tokens(self) -> int:
        """Tokens the cache must hold for it at the end; the last new one is never run."""
        return self.prompt_tokens + self.limit - 1

    @property
    def members(self) -> list[RunningRequest]:
        """The sequences that begin and end with this one, itself included."""
        return [self] if self.group is None else self.group.members

    @property
    def host_only(self) -> bool:
        """True where a token cannot be drawn without the host."""
        request = self.request
        special = (
            self.top > DEVICE_TOP
            or request.banned_strings
            or request.return_logits
            or self._healed is not None
            or self.sampler.constraint is not None
        )
        return bool(special) or self.group is not None

    def ready(self) -> bool:
        """Whether it may be admitted."""
        return self.group is None or self.group.ready(self)

    def start(self) -> None:
        """It takes part from the next step on."""
        self._started = self._started or time.perf_counter()
        self.channel.report_progress(self.computed, len(self.request.prompt_ids))

    # ---- a step

    def propose(self, drafted: list[int] | DeviceDrafts) -> None:
        """Append draft tokens to the ids; the next `advance` verifies them."""
        assert not self.drafted, "draft tokens are verified before new ones are proposed"
        room = max(0, self.limit - self.new_tokens - 1)
        if isinstance(drafted, list):
            drafted = drafted[:room]
            self.ids += drafted
            self.drafted = len(drafted)
        elif room:
            self.drafted, self.device_drafts = min(drafted.most, room), drafted
            self.ids += [0] * self.drafted

    def settle(self) -> None:
        """Put draft tokens that the GPU made into the ids; waits for them."""
        if self.device_drafts is not None:
            start = len(self.ids) - self.drafted
            self.ids[start:] = self.device_drafts.tokens()[: self.drafted]
            self.device_drafts = None

    def withdraw(self) -> None:
        """Take back draft tokens that were not verified: it is preempted, or ends."""
        self.device_drafts = None
        if self.drafted:
            del self.ids[len(self.ids) - self.drafted :]
            self.drafted = 0

    def advance(self, rows: Seq[np.ndarray | Sampled]) -> str | None:
        """Take what the model says after the last tokens; the finish reason once the answer is complete.

        `computed` counts all ids, draft tokens included, when this is called. Afterwards the ids end in one token that the model has not
        seen, and `computed` is never past what stayed.

        Args:
            rows: one for each of `rows`: its logits f32 `(V,)`, raw, or the token that was drawn of them.
        """
        if self.group is not None:
            row = rows[-1]
            assert not isinstance(row, Sampled), "a group draws for itself"
            return self.group.receive(self, row)
        return self.take_rows(rows)

    def take_rows(self, rows: Seq[np.ndarray | Sampled]) -> str | None:
        """`advance` for a sequence by itself."""
        self.settle()
        count, self.drafted = self.drafted, 0
        start = len(self.ids) - count
        drafted = self.ids[start:]
        del self.ids[start:]
        accepted, reason = 0, None
        for i, row in enumerate(rows):
            place = len(self.ids)
            logits = None
            if isinstance(row, Sampled):
                sampled, source = row, "target"
                self.sampler.push(sampled.id)
            else:
                (sampled, source), logits = self._choose(row), row
            right = i < count and sampled.id == drafted[i]
            if right and source != "forced" and self.proposer is not None:
                source = self.proposer.name
            reason = self._take(sampled, logits, source)
            accepted += right
            if reason is not None or not right or len(self.ids) <= place:
                break
        self.computed = min(self.computed, len(self.ids) - 1)
        if self.proposer is not None:
            self.proposer.verified(drafted, accepted, at=start - self.prompt_tokens, kept=min(start + accepted, len(self.ids) - 1))
        if self.request.stream:
            self.hand_over()
        return reason

    def append(self, sampled: Sampled, now: float | None = None) -> str | None:
        """Take one token that was drawn elsewhere, at `now`; the finish reason once the answer is complete."""
        self.sampler.push(sampled[0])
        reason = self._take(sampled, None, "target", now)
        if self.proposer is not None:
            self.proposer.pace.plain_steps += 1
        if self.request.stream:  # `hand_over`, without a call per token
            tokens, handed = self.output.tokens, self._handed
            if len(tokens) > handed:
                self._handed = len(tokens)
                self.channel.put(tokens[handed:])
        return reason

    def _choose(self, row: np.ndarray) -> tuple[Sampled, str]:
        banned = self._banned_at.get(len(self.ids), ()) if self._banned_at else ()
        self.sampler.retry = len(banned)  # another random number: the same one would favour the neighbours of what was banned
        allowed = self._healed if self.new_tokens == 0 else None
        sampled, forced = draw_token(row, self.sampler, top=self.request.top_logprobs, banned=banned, allowed=allowed)
        return sampled, "forced" if forced else "rewound" if banned else "target"

    def _take(self, sampled: Sampled, row: np.ndarray | None, source: str, now: float | None = None) -> str | None:
        token_id, ids, output = sampled[0], self.ids, self.output
        self._last = time.perf_counter() if now is None else now
        if not self._first:
            self._first = self._last
        ids.append(token_id)
        new_tokens = len(ids) - self.prompt_tokens  # the draft tokens were taken off
        if row is not None and self.request.return_logits:
            self._rows.append(row.copy())
        reason = None
        if token_id in self.ends:
            reason = "stop" if token_id in self.request.stop_ids else "eos"
            self._stopped_by = token_id
        elif output.push(sampled, source=source, armed=new_tokens >= self._armed_at):
            return self._stopped()
        elif output.bans and output.must_rewind:
            self._rewind()
        elif self._structured and self.sampler.finished:
            reason = "stop"
        elif new_tokens >= self.limit:
            reason = "length" if self.limit == self.request.max_tokens else "context"
        if reason is not None and output.finish():
            return self._stopped()
        return reason

    def _stopped(self) -> str:
        self._stopped_by = self.output.stopped_by
        return "stop"

    def _rewind(self) -> None:
        """A banned text is complete: go back to before the token that began it, and never take that one there again."""
        rewind = self.output.rewind()
        count = len(rewind.ids)
        self.rewinds.append(rewind)
        del self.ids[len(self.ids) - count :]
        del self._rows[max(0, len(self._rows) - count) :]
        self.sampler.rewind(count)
        place = len(self.ids)
        self._banned_at = {at: ids for at, ids in self._banned_at.items() if at <= place}
        self._banned_at.setdefault(place, set()).add(rewind.ids[0])

    # ---- what goes out

    def hand_over(self) -> None:
        """Put what is new into the channel."""
        tokens, handed = self.output.tokens, self._handed
        if len(tokens) > handed:
            self._handed = len(tokens)
            self.channel.put(tokens[handed:])

    def complete(self, reason: str) -> Completion:
        """The answer as it stands."""
        group = self.group
        return self.complete_alone(reason) if group is None or group.leader is not self else group.completion(reason)

    def complete_alone(self, reason: str) -> Completion:
        """`complete` without asking the group."""
        self.withdraw()
        self.output.finish()
        self.hand_over()
        timings = self.timings(new_tokens=self.new_tokens, now=time.perf_counter())
        constraint = self.sampler.constraint
        complete = constraint is None or constraint.finished or (reason != "stop" and constraint.accepting)
        return Completion(finish_reason=reason, timings=timings, seed=self.sampler.seed, complete=complete, **self._answer())

    def mark_token(self, now: float | None = None) -> None:
        """The latest token came at `now`, `time.perf_counter()`; None = now."""
        self._last = time.perf_counter() if now is None else now
        self._first = self._first or self._last

    def timings(self, *, new_tokens: int, now: float) -> Timings:
        """Where the time went until `now`, `time.perf_counter()`."""
        first = self._first or now
        return Timings(
            prompt_tokens=self.prompt_tokens,
            new_tokens=new_tokens,
            queue_s=(self._started or now) - self._submitted,
            first_token_s=first - self._submitted,
            prefill_s=first - (self._started or now),
            decode_s=max(0.0, self._last - first),
            reused_tokens=self.reused_tokens,
            preemptions=self.preemptions,
        )

    def _answer(self) -> dict[str, Any]:
        output, rows = self.output, self._rows
        tokens = tuple(output.tokens)
        logits = None
        if self.request.return_logits:
            logits = np.stack(rows[: len(tokens)]) if tokens and rows else np.zeros((0, 0), np.float32)
        return {
            "text": output.text,
            "tokens": tokens,
            "stopped_by": self._stopped_by,
            "withheld": output.withheld,
            "rewinds": tuple(self.rewinds),
            "speculation": None if self.proposer is None else self.proposer.acceptance,
            "logits": logits,
            "structure": self.request.structure,
            "reply_format": self.request.reply,
            "sampling": self.request.reported_sampling,
            "sampling_defaults": self.request.sampling_defaults,
        }


def draw_token(
    row: np.ndarray, state: SamplerState, *, top: int = 0, banned: Collection[int] = (), allowed: np.ndarray | None = None
) -> tuple[Sampled, bool]:
    """Draw a token and push it to the state.

    Args:
        row: f32 `(V,)`, raw logits; not changed.
        top: alternatives to report.
        banned: ids that must not be drawn here.
        allowed: int64 ids; the only ones that may be drawn. None = all.

    Returns:
        The choice, its log probability and rank under the raw row; and whether the masks or the structure left only this one.

    Raises:
        GenerationError: the masks leave nothing.
    """
    if not banned and allowed is None:
        return sample_row(row, state, top=top), state.forced
    masked = row.copy() if allowed is None else np.full_like(row, -np.inf)
    if allowed is not None:
        masked[allowed] = row[allowed]
    if banned:
        masked[list(banned)] = -np.inf
    left = int(np.isfinite(masked[: state.columns]).sum())
    if not left:
        raise GenerationError(
            f"no token is allowed at one position ({len(banned)} banned by banned_strings or min_tokens); ban fewer texts"
        )
    chosen = sample_row(masked, state)
    return report(row, highest_logit(row), chosen.id, top), left == 1


# ---- Token healing: the last prompt token is drawn again among the tokens that begin with its text. A prompt that ends in the middle of a
# word ends in a token that the model hardly ever saw there ("http" and ":" where it always saw "://").

_pieces: weakref.WeakKeyDictionary[Tokenizer, VocabularyIndex] = weakref.WeakKeyDictionary()


class Healed(NamedTuple):
    """ids: the prompt without its last token. allowed: int64 ids that may stand in its place, ascending. skip: characters of them that the
    prompt shows already.
    """

    ids: tuple[int, ...]
    allowed: np.ndarray
    skip: int


class VocabularyIndex:
    """The texts of a vocabulary in order, to find all that begin alike. Special tokens and parts of characters are not in it.

    Cost: one pass over the vocabulary; 0.2 s for 128 000 of them, once per tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        table = tokenizer.byte_table
        found = []
        for i in set(tokenizer.backend.get_vocab(with_added_tokens=True).values()):
            if i in tokenizer.skipped_ids or i in tokenizer.byte_ids:
                continue
            text = table.get(i, b"") if table is not None else tokenizer.piece(i).encode()
            if text:
                found.append((text, i))
        found.sort()
        self._texts, self._ids = [text for text, _ in found], [i for _, i in found]
        self._of = {i: text for text, i in found}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> VocabularyIndex:
        """Those of a tokenizer; made once."""
        if tokenizer not in _pieces:
            _pieces[tokenizer] = cls(tokenizer)
        return _pieces[tokenizer]

    def text(self, token_id: int) -> bytes | None:
        """UTF-8 of a token, None for special tokens."""
        return self._of.get(token_id)

    def beginning_with(self, prefix: bytes) -> list[int]:
        """Tokens whose text begins with `prefix`."""
        at, found = bisect_left(self._texts, prefix), []
        while at < len(self._texts) and self._texts[at].startswith(prefix):
            found.append(self._ids[at])
            at += 1
        return found


def heal_prompt(ids: Seq[int], tokenizer: Tokenizer) -> Healed | None:
    """Take the last token back.

    Returns:
        None where there is nothing to heal: one token only, a special token or half a character at the end, or no longer token begins so.
    """
    pieces = VocabularyIndex.of(tokenizer)
    text = pieces.text(ids[-1])
    if len(ids) < 2 or text is None:
        return None
    try:
        shown = text.decode()
    except UnicodeDecodeError:
        return None
    allowed = pieces.beginning_with(text)
    if len(allowed) < 2:
        return None
    return Healed(tuple(ids[:-1]), np.array(sorted(allowed), np.int64), len(shown))
