"""The guesses of the sequences that run: where they come from, how many, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Protocol

from exl2nb.core.errors import OptionError
from exl2nb.generator.ngram import NgramGuesser
from exl2nb.generator.speculation import Acceptance, Pace, Speculation, StepTimes, Verified

if TYPE_CHECKING:
    from exl2nb.generator.request import Request
    from exl2nb.generator.sequence import Sequence

STEP_ROWS = 64  # of logits in one step, which many sequences share


class Drafter(Protocol):
    """A draft model."""

    guess_s: float  # what making one guess takes, as far as known

    def guess(self, wanted: Ids[tuple[Sequence, int]], /) -> list[list[int]]:
        """For each sequence at most so many tokens that may follow."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...


class Guesses:
    """The guesses of one sequence.

    name: "ngram" or "draft", which the tokens that were guessed right are marked with. kept: ids from the beginning that have stood since a
    draft model last looked; what it has cached is right up to there.
    """

    def __init__(self, name: str, pace: Pace, *, ngram: NgramGuesser | None = None, drafter: Drafter | None = None) -> None:
        self.name, self.pace, self.drafter, self._ngram = name, pace, drafter, ngram
        self.kept = 1 << 62
        self._unsaid: tuple[int, int] | None = None  # a place, and the token that would have been guessed there

    @classmethod
    def ngram(cls, settings: Speculation, times: StepTimes | None = None) -> Guesses:
        """From the text itself."""
        return cls("ngram", Pace(settings, times=times, watched=True), ngram=NgramGuesser(settings.min_match, settings.max_match))

    @classmethod
    def draft(cls, settings: Speculation, drafter: Drafter, times: StepTimes | None = None) -> Guesses:
        """From a draft model."""
        return cls("draft", Pace(settings, times=times), drafter=drafter)

    def guess(self, ids: Ids[int], room: int, beside: int = 0) -> list[int]:
        """Tokens that may follow, at most `room`; none where they come from a draft model, which guesses for many sequences together.

        beside: other sequences in the step.
        """
        if self._ngram is None:
            return []
        if self._unsaid is not None and self._unsaid[0] < len(ids):
            self.pace.seen(ids[self._unsaid[0]] == self._unsaid[1])
        self._unsaid = None
        count = self.pace.length(room, beside)
        found = self._ngram.guess(ids, max(1, count)) if room > 0 else []
        if found and not count:
            self._unsaid = len(ids), found[0]
            return []
        return found

    def told(self, guessed: Ids[int], accepted: int, *, at: int, kept: int) -> None:
        """A step is over: these guesses, from place `at` of the new tokens on, were verified, and so many accepted; `kept` ids stand."""
        self.pace.told(len(guessed), accepted)
        if guessed:
            self.pace.trail.append(Verified(at, tuple(guessed), accepted))
        self.kept = min(self.kept, kept)

    @property
    def acceptance(self) -> Acceptance:
        """The record so far."""
        return self.pace.acceptance(self.name)


def guesses_for(request: Request, drafter: Drafter | None, times: StepTimes | None = None) -> Guesses | None:
    """What a request's settings mean on a model with this draft model.

    Raises:
        OptionError: a draft model is asked for and there is none.
    """
    settings = request.speculation
    if settings.kind == "ngram":
        return Guesses.ngram(settings, times)
    if settings.kind == "draft" and drafter is None:
        raise OptionError("speculation is 'draft' and the model has no draft model; load it with draft=, or use speculation='ngram'")
    if settings.kind == "off" or drafter is None or request.sampling.post_sampling:  # hooks are for draws that count, not for guesses
        return None
    return Guesses.draft(settings, drafter, times)


class GuessingSpeculator:
    """Puts guesses behind the ids of the sequences that decode, before each step, and learns how long steps take.

    times: of the steps.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self._began, self._rows = 0.0, 0  # the step that runs: when, and with how many rows; 0: not one to learn from

    def propose(self, running: Ids[Sequence], /) -> None:
        """Append guesses; `rows` of a sequence is one more than its guesses."""
        now = time.perf_counter()
        decoding = [sequence for sequence in running if sequence.pending == 1]
        if self._rows and len(decoding) == len(running):
            self.times.told(self._rows, now - self._began)
        self._guess([one for one in decoding if one.guesses is not None and not one.guessed], len(running))
        self._rows = sum(one.rows for one in running) if running and len(decoding) == len(running) else 0
        self._began = time.perf_counter()

    def _guess(self, sequences: Ids[Sequence], running: int) -> None:
        wanted: dict[int, list[tuple[Sequence, int]]] = {}
        drafters: dict[int, Drafter] = {}
        most = max(1, STEP_ROWS // max(1, running) - 1)
        for sequence in sequences:
            guesses = sequence.guesses
            assert guesses is not None, "those without were left out"
            room, drafter = min(most, sequence.limit - sequence.new_tokens - 1), guesses.drafter
            constraint = sequence.sampler.constraint
            if constraint is not None and (forced := constraint.forced()):  # what must follow needs no guess
                sequence.propose(forced[: max(0, min(room, guesses.pace.settings.max_tokens))])
            elif drafter is None:
                sequence.propose(guesses.guess(sequence.ids, room, running - 1))
            elif count := guesses.pace.length(room, running - 1, guess_s=drafter.guess_s):
                drafters[id(drafter)] = drafter
                wanted.setdefault(id(drafter), []).append((sequence, count))
        for key, drafter in drafters.items():
            for (sequence, _), found in zip(wanted[key], drafter.guess(wanted[key])):
                sequence.propose(found)
