"""Speculative decoding: settings, draft tokens from the text itself, how many to propose, and the acceptance. Knows no model and no cache.

A draft token is verified by the request's own sampler: the model runs all draft tokens in one step, then every row is sampled in order,
with the request's own random number for that position; while the sampled token equals the draft token, the next row counts too. So the
text is, token for token, the one without speculation, for every sampler, penalty and constraint. Rejection sampling (Leviathan et al.,
2023) would accept a little more often, but draws other random numbers and would need a proof for every filter.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from exl2nb.core.errors import OptionError
from exl2nb.core.log import warn
from exl2nb.core.options import check_flag, check_range, make
from exl2nb.generator.suffixes import EarlierTexts, SuffixAutomaton

if TYPE_CHECKING:
    import torch

    from exl2nb.core.progress import Sink
    from exl2nb.generator.request import Request
    from exl2nb.generator.scheduler import TokenSpan
    from exl2nb.generator.sequence import RunningRequest

SPECULATION_KINDS = ("auto", "draft", "ngram", "off")
MAX_DRAFT_TOKENS = 7  # a step then has at most 8 rows per sequence, which every backend runs as a decode
PROBE_INTERVAL_STEPS = 12  # without draft tokens, after the first failure
MAX_PROBE_INTERVAL_STEPS = 48  # the same after several failures
REST_STEPS = 8  # that are not examined after one for which draft tokens do not pay, doubled each time
MAX_REST_STEPS = 32
TRIAL_DRAFT_TOKENS = (3, 7)  # draft tokens whose step is measured MIN_TIMINGS times
TRIAL_ACCEPTANCE = 0.3  # where all are accepted with this probability
MIN_TIMINGS = 2  # a time that was measured less often may be one that was disturbed
LEARNED_PROMPT_TOKENS = 1 << 15  # of a prompt that are indexed at most
LEARN_CHUNK_TOKENS = 512  # indexed between two steps
RELEARNED_TOKENS = 64  # indexed after the text was cut back
HISTORY_TOKENS = 1024  # tokens at the end of a text that later ones may repeat
MIN_MATCH_TOKENS = 8  # tokens that must agree for a draft token to count as a right one
MAX_FIRST_TIME_RATIO = (
    1.5  # a first time is believed up to so many times what others say of it: one that was disturbed must not end the trying
)
STALE_AFTER_STEPS = 512  # steps after which the measured time of a number of rows, not seen since, is dropped
OBSERVATION_DECAY = 0.9  # weight of earlier observations, per verified step
MIN_SPEEDUP = 1.03  # least estimated speed-up for which draft tokens are proposed
MAX_ACCEPTANCE = 0.995  # highest acceptance probability that is assumed
ROW_COST = 0.1  # of a step, what one more row costs, until it was measured


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How draft tokens are made.

    Where a structure leaves no choice, the forced tokens are verified instead.

    Attributes:
        kind: "draft" (a smaller model with the same tokenizer), "ngram" (what followed the longest earlier occurrence of the last tokens,
            in the text or in earlier requests; good where an answer repeats its prompt, as in edits of code), "auto" (the draft model if
            the model was loaded with one), "off".
        max_tokens: draft tokens verified together, 1 to 7.
        adaptive: fewer where they are rejected.
        min_match: tokens that must agree with an earlier place before "ngram" proposes, 1 to 16.
        earlier: whether "ngram" also looks at requests that ended before, and later ones at this one. No text changes, but the speed of
            an answer tells whether the same was written before.

    Raises:
        OptionError: a value out of range.

    Example:
        >>> Speculation(kind="ngram", max_tokens=4).min_match
        2
    """

    kind: str = "auto"
    max_tokens: int = MAX_DRAFT_TOKENS
    adaptive: bool = True
    min_match: int = 2
    earlier: bool = True
    max_match: InitVar[int | None] = None  # ignored since 0.2; to be removed in 0.3

    def __post_init__(self, max_match: int | None) -> None:
        if max_match is not None:
            warn("Speculation: max_match is ignored, the longest match counts; leave it out", DeprecationWarning)
        if self.kind not in SPECULATION_KINDS:
            raise OptionError(f"speculation is {self.kind!r}; expected one of {', '.join(SPECULATION_KINDS)}, or a Speculation")
        check_flag("Speculation: adaptive", self.adaptive)
        check_flag("Speculation: earlier", self.earlier)
        for name, low, high in (("max_tokens", 1, MAX_DRAFT_TOKENS), ("min_match", 1, 16)):
            value = getattr(self, name)
            check_range(name, value, low, high, where="Speculation")
            if not isinstance(value, int):
                raise OptionError(f"Speculation: {name} is {value!r}; expected an integer from {low} to {high}")

    @classmethod
    def of(cls, value: Any) -> Speculation:
        """From what callers write: a kind, a Speculation, a dict of its fields, None or False for "off", True for "auto"."""
        if isinstance(value, cls):
            return value
        if value is None or isinstance(value, bool):
            return cls(kind="auto" if value else "off")
        if isinstance(value, dict):
            made = make(cls, {name: one for name, one in value.items() if name != "max_match"}, where="speculation")
            return replace(made, max_match=value["max_match"]) if "max_match" in value else made
        return cls(kind=value)


class Verified(NamedTuple):
    """One verifying step. at: index of the first draft token among the new tokens. ids: draft tokens. accepted: the first so many."""

    at: int
    ids: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What speculation did for one request.

    kind: "draft" or "ngram". steps: of the model in which draft tokens were verified. proposed, accepted: draft tokens. lengths: how often
    0, 1, 2, ... draft tokens of a step were accepted. plain_steps: of the model without draft tokens. trail: each of `steps`.
    """

    kind: str
    steps: int
    proposed: int
    accepted: int
    lengths: tuple[int, ...]
    plain_steps: int
    trail: tuple[Verified, ...] = field(default=(), repr=False)

    @property
    def rate(self) -> float:
        """Acceptance rate: accepted of proposed, 0 to 1."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens per step of the model; 1 without speculation."""
        steps = self.steps + self.plain_steps
        return (steps + self.accepted) / steps if steps else 1.0

    def __str__(self) -> str:
        found = f"{self.accepted} of {self.proposed} draft tokens accepted ({self.rate:.0%})"
        return f"{self.kind}: {found}, {self.tokens_per_step:.2f} tokens per step"

    def _repr_html_(self) -> str:
        most = max(self.lengths, default=0) or 1
        bars = "".join(
            f'<tr><td style="text-align:right">{n}</td><td style="text-align:left"><span style="display:inline-block;height:.7em;'
            f'width:{12 * count / most:.1f}em;background:rgba(214,120,40,.6)"></span> {count}</td></tr>'
            for n, count in enumerate(self.lengths)
        )
        return f"<div>{self}</div><table><tr><th>accepted</th><th style='text-align:left'>steps</th></tr>{bars}</table>"


class StepTimes:
    """How long a step takes by its number of rows, measured on steps; recent ones count most.

    A number of rows that was not measured is interpolated linearly, or extrapolated from one row through the
    largest measured. So the number of rows grows step by step: see `reach`.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, int, int]] = {}  # rows -> seconds, when that was seen last, and how often
        self._rows: list[int] = []  # its keys, in order
        self._count = 0

    def record(self, rows: int, seconds: float, steps: int = 1) -> None:
        """Add the time of a step with `rows` rows and no prompt. A time far longer than usual counts little: something disturbed it.

        steps: that took so long on average.
        """
        self._count += steps
        if rows not in self._seen and self._seen:
            seconds = min(seconds, MAX_FIRST_TIME_RATIO * self.seconds(rows))
        times = 0
        if rows in self._seen:
            known, _, times = self._seen[rows]
            seconds = known + (0.2 if seconds > known else 0.5) * (min(seconds, 2.0 * known) - known)
        self._seen[rows] = seconds, self._count, times + 1
        for other in [n for n, (_, last, _) in self._seen.items() if self._count - last > STALE_AFTER_STEPS]:
            del self._seen[other]  # so that it is tried again
        if len(self._seen) != len(self._rows) or not times:
            self._rows = sorted(self._seen)

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._seen)

    @property
    def plain_due(self) -> bool:
        """True where steps were measured, but lately none with one row, with which all others are compared."""
        return bool(self._seen) and 1 not in self._seen

    def knows(self, rows: int, times: int = 1) -> bool:
        """Whether a step with so many rows was measured, so many times at least."""
        return rows in self._seen and self._seen[rows][2] >= times

    @property
    def reach(self) -> int:
        """Rows of a step that may be tried: twice what was seen."""
        return 2 * max(self._seen, default=1)

    def seconds(self, rows: int) -> float:
        """Time of a step with `rows` rows; 1 for one row while nothing is known."""
        seen = self._seen
        if rows in seen:
            return seen[rows][0]
        place = bisect_left(self._rows, rows)
        below = self._rows[place - 1] if place else None
        above = self._rows[place] if place < len(self._rows) else None
        if below is None:
            first = 1.0 if above is None else seen[above][0] / (1.0 + (above - 1) * ROW_COST)
            return first * (1.0 + (rows - 1) * ROW_COST)
        if above is not None:
            part = (rows - below) / (above - below)
            return seen[below][0] * (1.0 - part) + seen[above][0] * part
        if below > 1 and 1 in seen:
            return seen[below][0] + max(0.0, seen[below][0] - seen[1][0]) * (rows - below) / (below - 1)
        return seen[below][0] * (1.0 + (rows - 1) * ROW_COST) / (1.0 + (below - 1) * ROW_COST)


class AdaptiveLength:
    """How many draft tokens to propose next, and the record of their acceptance.

    With probability a that a draft token is accepted, k of them give (1 - a**(k+1)) / (1 - a) tokens on average; the k that gives most
    tokens per second, for the recent a and the measured step times, is chosen if it beats no speculation by `MIN_SPEEDUP`.

    Args:
        times: of the steps in which they are verified.
        watched: `observe` is called for draft tokens that were not proposed; then none is proposed only to measure.
    """

    def __init__(self, settings: Speculation, *, times: StepTimes | None = None, watched: bool = False) -> None:
        self.settings, self._times, self._watched = settings, times or StepTimes(), watched
        self._accepted_weight, self._verified_weight = 1.6, 2.0  # the prior: as if 1.6 of 2 had been accepted
        self._idle, self._patience, self._longest = 0, PROBE_INTERVAL_STEPS, 0
        self._tries = dict.fromkeys(TRIAL_DRAFT_TOKENS, 1 + MIN_TIMINGS)  # the first step of a kind is captured, and not measured
        self.rest, self._next_rest = 0, REST_STEPS  # steps for which the answer of `length` is known to be 0; the next such number
        self.steps = self.proposed = self.accepted = self.plain_steps = 0
        self.lengths = [0] * (settings.max_tokens + 1)
        self.trail: list[Verified] = []

    def length(self, room: int, beside: int = 0, *, draft_s: Callable[[int], float] = lambda count: 0.0) -> int:
        """Draft tokens to propose now.

        Args:
            room: at most this many. beside: rows of other sequences in the step, whose tokens come later if it takes longer. draft_s: what
            making so many draft tokens takes.
        """
        most = min(self.settings.max_tokens, room)
        if most <= 0 or not self.settings.adaptive:
            return max(0, most)
        if self.rest:
            self.skip(1)
            return 0
        if self._times.plain_due and not beside:
            return 0
        likely = min(MAX_ACCEPTANCE, self._accepted_weight / self._verified_weight)
        if self.steps and not beside:  # a step's time has a part that does not grow with rows, which one more row does not show
            for count in TRIAL_DRAFT_TOKENS:
                if count <= most and self._tries[count] and likely**count > TRIAL_ACCEPTANCE and not self._measured(count, draft_s):
                    self._tries[count] -= 1
                    return count
        most = min(most, max(1, self._times.reach - beside - 1, 2 * self._longest + 1))
        best = self._best(likely, most, beside, draft_s)
        if best:
            return best
        self._idle += 1
        if self._watched or self._idle < self._patience or not self._best(MAX_ACCEPTANCE, most, beside, draft_s):
            self.rest, self._next_rest = self._next_rest, min(2 * self._next_rest, MAX_REST_STEPS)
            return 0  # also where not even certain draft tokens would pay
        self._idle, self._patience = 0, min(2 * self._patience, MAX_PROBE_INTERVAL_STEPS)
        return 1

    def _measured(self, count: int, draft_s: Callable[[int], float]) -> bool:
        """Whether the time of a step with so many draft tokens is known: measured MIN_TIMINGS times, or once where all being right is no
        gain.
        """
        times, rows = self._times, 1 + count
        if not times.knows(rows) or times.knows(rows, MIN_TIMINGS):
            return times.knows(rows)
        return times.seconds(rows) + draft_s(count) > rows * times.seconds(1)

    def may_pay(self, beside: int, *, draft_s: Callable[[int], float] = lambda count: 0.0) -> bool:
        """Whether draft tokens would pay if all of them were right, as far as step times are known; arguments as in `length`."""
        most = min(self.settings.max_tokens, max(1, self._times.reach - beside - 1, 2 * self._longest + 1))
        return not self.settings.adaptive or (self._times.plain_due and not beside) or self._best(MAX_ACCEPTANCE, most, beside, draft_s) > 0

    def skip(self, steps: int) -> None:
        """So many steps of `rest` have passed."""
        self.rest -= steps
        self._idle += steps

    def _best(self, likely: float, most: int, beside: int, draft_s: Callable[[int], float]) -> int:
        """The number of draft tokens that gives most tokens per second; 0 where none does clearly."""
        seconds = self._times.seconds
        tokens, chance, best = beside + 1.0, likely, 0
        fastest = MIN_SPEEDUP * tokens / seconds(beside + 1)
        for k in range(1, most + 1):
            tokens += chance
            chance *= likely
            speed = tokens / (seconds(beside + 1 + k) + draft_s(k))
            if speed > fastest:
                fastest, best = speed, k
        return best

    def observe(self, right: bool) -> None:
        """A draft token that was not proposed would have been accepted, or not."""
        if right:
            self.rest, self._next_rest = 0, REST_STEPS
        self._accepted_weight = self._accepted_weight * OBSERVATION_DECAY + right
        self._verified_weight = self._verified_weight * OBSERVATION_DECAY + 1

    def record(self, proposed: int, accepted: int) -> None:
        """A step verified `proposed` draft tokens and accepted `accepted`; (0, 0) is a step without."""
        if not proposed:
            self.plain_steps += 1
            return
        self.steps += 1
        self.proposed += proposed
        self.accepted += accepted
        self.lengths[accepted] += 1
        self._longest = max(self._longest, proposed)
        self._accepted_weight = self._accepted_weight * OBSERVATION_DECAY + accepted
        self._verified_weight = self._verified_weight * OBSERVATION_DECAY + min(accepted + 1, proposed)
        if accepted:
            self._patience, self._next_rest = PROBE_INTERVAL_STEPS, REST_STEPS

    def acceptance(self, kind: str) -> Acceptance:
        """The record."""
        counts = {name: getattr(self, name) for name in ("steps", "proposed", "accepted", "plain_steps")}
        return Acceptance(kind=kind, lengths=tuple(self.lengths), trail=tuple(self.trail), **counts)


# ---- Draft tokens from the text itself: what followed the last tokens when they stood there before (prompt lookup).


class NgramProposer:
    """Finds where the longest end of a text stood before, in the text itself or in earlier ones, and proposes what followed there.

    Args:
        min_match: tokens of the end that must agree at least. earlier: other texts.

    Example:
        >>> NgramProposer(1).propose([5, 6, 7, 8, 5, 6], 3)
        [7, 8, 5]
    """

    def __init__(self, min_match: int, earlier: EarlierTexts | None = None) -> None:
        self.length = 0  # tokens that agreed, of the last proposal
        self.reading = False  # whether the last text is not known to its end
        self._least, self._earlier, self._own = min_match, earlier, SuffixAutomaton()
        self._known = 0  # ids that it has learned
        self._theirs: SuffixAutomaton | None = None  # the automaton of earlier texts, and where this text stands in it
        self._place = 0, 0

    def propose(self, ids: Seq[int], count: int) -> list[int]:
        """At most `count` tokens; a copy that reaches the end goes on with itself."""
        self.reading = not self.read(ids, len(ids))
        if self.reading:
            return []
        source, (self.length, at) = self._own, self._own.repeated()
        state, length = self._place
        if self._theirs is not None and length > self.length:
            source, self.length, at = self._theirs, length, self._theirs.end_of(state)
        return source.after(at, count) if self.length >= self._least else []

    def read(self, ids: Seq[int], count: int) -> bool:
        """Take in the first `count` ids, a long prompt piece by piece; whether all are known."""
        own, known = self._own, self._known
        if known > count or (known and own.text[-1] != ids[known - 1]):  # the text was cut back: what it was remains a text
            own.start()
            known = max(0, count - RELEARNED_TOKENS)
        elif not known:
            known = max(0, count - LEARNED_PROMPT_TOKENS)
        end = min(count, known + LEARN_CHUNK_TOKENS)
        for i in range(known, end):
            own.extend(ids[i])
        self._known = end
        if self._earlier is not None:
            theirs, place = self._earlier.index, self._place
            if self._theirs is not theirs:
                self._theirs, place, known = theirs, (0, 0), 0
            for i in range(max(known, end - RELEARNED_TOKENS), end):
                place = theirs.step(*place, ids[i])
            self._place = place
        return end == count


# ---- The draft tokens of running sequences: source, number, acceptance.

STEP_ROWS = 64  # of logits in one step, which many sequences share


class DraftRound(Protocol):
    """Draft tokens that were launched on a GPU and may not be there yet.

    ids: int32 on the GPU; draft token i of row r is at (1 + i) * rows + r, the token before the first one at r. rows: of a step.
    began: `time.perf_counter()` then.
    """

    ids: torch.Tensor
    rows: int
    began: float

    def tokens(self, row: int) -> list[int]:
        """A row's tokens; waits for them."""
        ...

    def seconds(self) -> float:
        """What the round took, from its beginning on the host; waits for it."""
        ...


class DeviceDrafts(NamedTuple):
    """A sequence's draft tokens that only the device knows: the first `most` of a row of a round."""

    round: DraftRound
    row: int
    most: int

    def tokens(self) -> list[int]:
        """The tokens; waits for them."""
        return self.round.tokens(self.row)[: self.most]


class Drafter(Protocol):
    """A draft model. dropped: whether the last `propose` discarded a round that `follow` began."""

    dropped: bool

    @property
    def prepared(self) -> int:
        """Kinds of steps and rounds that were captured on a GPU so far."""
        ...

    def seconds(self, count: int) -> float:
        """What making so many draft tokens takes, as far as known; 0: nothing is known."""
        ...

    def propose(self, wanted: Seq[tuple[RunningRequest, int]], /) -> Seq[list[int] | DeviceDrafts]:
        """At most the wanted number of draft tokens for each sequence; those on the device all of one round."""
        ...

    def follow(self, drawn: torch.Tensor, sequences: Seq[RunningRequest], /) -> bool:
        """Begin the next draft tokens behind a launched step that verifies draft tokens on the device.

        Args:
            drawn: what that step draws, on the device.
            sequences: of that step.

        Returns:
            Whether the host took time for something that it does once.
        """
        ...

    def release(self, sequence: RunningRequest, /) -> None:
        """A sequence has ended."""
        ...

    def prepare(self, progress: Sink | None) -> None:
        """Do beforehand what the first draft tokens would wait for."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...


class Proposer:
    """The source of one sequence's draft tokens, and their acceptance.

    name: "ngram" or "draft", which accepted tokens are marked with. kept: ids from the beginning that have stood since the draft model ran
    last; its cache is valid up to there.
    """

    def __init__(self, name: str, pace: AdaptiveLength, *, ngram: NgramProposer | None = None, drafter: Drafter | None = None) -> None:
        self.name, self.pace, self.drafter, self._ngram = name, pace, drafter, ngram
        self.kept = 1 << 62
        self._earlier: EarlierTexts | None = None
        self._unproposed: tuple[int, int] | None = None  # position and token of a draft that was found but not proposed

    @classmethod
    def ngram(cls, settings: Speculation, times: StepTimes | None = None, earlier: EarlierTexts | None = None) -> Proposer:
        """From the text itself, and from earlier ones."""
        earlier = earlier if settings.earlier else None
        made = cls("ngram", AdaptiveLength(settings, times=times, watched=True), ngram=NgramProposer(settings.min_match, earlier))
        made._earlier = earlier
        return made

    def propose(self, ids: Seq[int], room: int, beside: int = 0) -> list[int]:
        """At most `room` draft tokens; none from a draft model, which proposes for many sequences together.

        beside: other sequences in the step.
        """
        if self._ngram is None:
            return []
        if self._unproposed is not None and self._unproposed[0] < len(ids):
            self.pace.observe(ids[self._unproposed[0]] == self._unproposed[1])
        self._unproposed = None
        if beside and not self.pace.may_pay(beside):
            return []  # nor is the text read, which takes a few microseconds a token
        count = self.pace.length(room, beside)
        found = self._ngram.propose(ids, min(room, self.pace.settings.max_tokens)) if room > 0 else []
        if found and not count and self._ngram.length >= MIN_MATCH_TOKENS:
            self.pace.observe(True)
            count = self.pace.length(room, beside)
        if found and not count:
            self._unproposed = len(ids), found[0]
        return found[:count]

    def read(self, ids: Seq[int], known: int) -> None:
        """Read the first `known` ids while a step runs."""
        if self._ngram is not None:
            self._ngram.read(ids, known)

    @property
    def reading(self) -> bool:
        """Whether it has not yet read the whole text, and so proposes nothing."""
        return self._ngram is not None and self._ngram.reading

    def verified(self, drafted: Seq[int], accepted: int, *, at: int, kept: int) -> None:
        """These draft tokens, from place `at` of the new tokens on, were verified, `accepted` of them accepted; `kept` ids stay."""
        self.pace.record(len(drafted), accepted)
        if drafted:
            self.pace.trail.append(Verified(at, tuple(drafted), accepted))
        self.kept = min(self.kept, kept)

    def ended(self, sequence: RunningRequest) -> None:
        """The sequence that it proposes for has ended."""
        if self._earlier is not None:
            self._earlier.add(sequence.ids[-HISTORY_TOKENS:])
        if self.drafter is not None:
            self.drafter.release(sequence)

    @property
    def acceptance(self) -> Acceptance:
        """The record so far."""
        return self.pace.acceptance(self.name)


def proposer_for(
    request: Request, drafter: Drafter | None, times: StepTimes | None = None, earlier: EarlierTexts | None = None
) -> Proposer | None:
    """What a request's settings mean on a model with this draft model, after these texts.

    Raises:
        OptionError: a draft model is asked for and there is none.
    """
    settings = request.speculation
    if settings.kind == "ngram":
        return Proposer.ngram(settings, times, earlier)
    if settings.kind == "draft" and drafter is None:
        raise OptionError("speculation is 'draft' and the model has no draft model; load it with draft=, or use speculation='ngram'")
    if settings.kind == "off" or drafter is None or request.sampling.post_sampling:  # hooks must see draws of the target only
        return None
    return Proposer("draft", AdaptiveLength(settings, times=times), drafter=drafter)


class Speculator:
    """Appends draft tokens to the ids of decoding sequences before each step, and measures step times.

    It sleeps for some steps after one without draft tokens, for longer each time; these steps run as without speculation.

    times: of the steps. earlier: texts that ended. drafting_steps: steps before which draft tokens were looked for.
    """

    def __init__(self) -> None:
        self.times, self.earlier = StepTimes(), EarlierTexts()
        self.drafting_steps = 0
        self._began, self._rows = 0.0, 0  # the step that runs: when, and with how many rows; 0: not one to learn from
        self._prepared = 0
        self._round: DraftRound | None = None  # of the step that runs, where its draft tokens were on the device
        self._asleep, self._slept = 0, 0  # steps to sleep, and slept so far
        self._running: tuple[weakref.ref[RunningRequest], ...] = ()  # sequences that ran when it began
        self._barren = 0  # steps without draft tokens since the last one that had some, those asleep not counted

    def wakes(self, running: Seq[RunningRequest]) -> bool:
        """Whether `propose` must be called before this step, with every result read; to be asked once a step."""
        if self._asleep and self._running == tuple(map(weakref.ref, running)):
            if self._asleep <= self._slept < STALE_AFTER_STEPS and not self._may_pay(running):
                self._asleep = self._slept + MAX_REST_STEPS  # to know that, results in flight need not be read
            if self._slept < self._asleep:
                self._slept += 1
                return False
            return True
        if any([one.proposer is not None for one in running]):
            return True
        self._asleep = self._slept = self._rows = 0  # steps of requests without it are launched ahead, and not measured
        self._round = None
        return False

    def _may_pay(self, running: Seq[RunningRequest]) -> bool:
        """Whether certain draft tokens of some sequence would pay; forced tokens of a structure always may."""
        beside = len(running) - 1
        for one in running:
            if one.proposer is not None:
                pace, drafter = one.proposer.pace, one.proposer.drafter
                if one.sampler.constraint is not None or (
                    pace.may_pay(beside) if drafter is None else pace.may_pay(beside, draft_s=drafter.seconds)
                ):
                    return True
        return False

    def propose(self, running: Seq[RunningRequest], prepared: int = 0, /) -> None:
        """Append draft tokens; `rows` of a sequence is one more than there are.

        prepared: of the executor; where it has grown, the last step's time is not learned from.
        """
        now = time.perf_counter()
        decoding = [sequence for sequence in running if sequence.pending == 1]
        if prepared != self._prepared:
            self._prepared, self._rows = prepared, 0
        drafting = self._round.seconds() if self._round is not None else 0.0
        if self._rows and len(decoding) == len(running) and now - self._began > drafting:
            self.times.record(self._rows, (now - self._began - drafting) / (1 + self._slept), 1 + self._slept)
        self._round = None
        proposing = [one for one in decoding if one.proposer is not None and not one.drafted]
        for one in proposing:
            one.on_device = False
            if self._slept and one.proposer is not None:
                one.proposer.pace.skip(min(self._slept, one.proposer.pace.rest))
        for one in running:
            if one.device_drafts is not None:
                one.settle()  # its step was not launched
        self._asleep = self._slept = 0
        self.drafting_steps += 1
        self._propose(proposing, len(running))
        self._rows = sum(one.rows for one in running) if running and len(decoding) == len(running) else 0
        reading = any(one.proposer is not None and one.proposer.reading for one in proposing)  # a long prompt, piece by piece
        self._barren = self._barren + 1 if self._rows == len(running) and proposing and not reading else 0
        if self._barren and all(
            one.proposer.pace.settings.adaptive and one.sampler.constraint is None for one in proposing if one.proposer
        ):
            self._asleep, self._running = min(1 << (self._barren - 1), MAX_REST_STEPS), tuple(map(weakref.ref, running))
            for one in proposing:
                one.on_device = one.drawn
        drafters = [one.proposer.drafter for one in proposing if one.proposer is not None]
        if any(drafter is not None and drafter.dropped for drafter in drafters):
            self._rows = 0  # the GPU runs a discarded draft round before this step, so the step's time says nothing
        self._began = time.perf_counter() if self._round is None else self._round.began

    def launched(self, spans: Seq[TokenSpan], drawn: torch.Tensor | None, /) -> None:
        """A step was launched; drawn: its tokens on the device, if they are there."""
        if len(spans) == 1 and not self._asleep and (sequence := spans[0].sequence).proposer is not None:
            sequence.proposer.read(sequence.ids, len(sequence.ids) - sequence.drafted)
        if self._round is None or drawn is None:
            return
        proposer = spans[0].sequence.proposer
        drafter = None if proposer is None else proposer.drafter
        if drafter is not None and drafter.follow(drawn, [span.sequence for span in spans]):
            self._rows = 0

    def _propose(self, sequences: Seq[RunningRequest], running: int) -> None:
        wanted: dict[int, list[tuple[RunningRequest, int]]] = {}
        drafters: dict[int, Drafter] = {}
        most = max(1, STEP_ROWS // max(1, running) - 1)
        for sequence in sequences:
            proposer = sequence.proposer
            assert proposer is not None, "those without were left out"
            room, drafter = min(most, sequence.limit - sequence.new_tokens - 1), proposer.drafter
            constraint = sequence.sampler.constraint
            if constraint is not None and (forced := constraint.forced()):
                sequence.propose(forced[: max(0, min(room, proposer.pace.settings.max_tokens))])
            elif drafter is None:
                sequence.propose(proposer.propose(sequence.ids, room, running - 1))
            elif count := proposer.pace.length(room, running - 1, draft_s=drafter.seconds):
                drafters[id(drafter)] = drafter
                wanted.setdefault(id(drafter), []).append((sequence, count))
        for key, drafter in drafters.items():
            for (sequence, _), found in zip(wanted[key], drafter.propose(wanted[key])):
                sequence.propose(found)
                self._round = sequence.device_drafts.round if sequence.device_drafts is not None else self._round
