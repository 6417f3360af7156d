"""The guesses of the sequences that run: where they come from, how many, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Protocol

from exl2nb.core.errors import OptionError
from exl2nb.generator.ngram import NgramGuesser
from exl2nb.generator.speculation import ROW_COST, Acceptance, Pace, Speculation

if TYPE_CHECKING:
    from exl2nb.generator.request import Request
    from exl2nb.generator.sequence import Sequence

STEP_ROWS = 64  # of logits in one step, which many sequences share


class Drafter(Protocol):
    """A draft model."""

    cost: float  # of one guess, as a share of a step of the target

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

    @classmethod
    def ngram(cls, settings: Speculation) -> Guesses:
        """From the text itself."""
        return cls("ngram", Pace(settings), ngram=NgramGuesser(settings.min_match, settings.max_match))

    @classmethod
    def draft(cls, settings: Speculation, drafter: Drafter) -> Guesses:
        """From a draft model."""
        return cls("draft", Pace(settings, cost=ROW_COST + drafter.cost), drafter=drafter)

    def guess(self, ids: Ids[int], room: int, beside: int = 0) -> list[int]:
        """Tokens that may follow, at most `room`; none where they come from a draft model, which guesses for many sequences together.

        beside: other sequences in the step.
        """
        if self._ngram is None:
            return []
        count = self.pace.length(room, beside)
        return self._ngram.guess(ids, count) if count else []

    def told(self, guessed: int, accepted: int, *, kept: int) -> None:
        """A step is over: so many guesses were verified and accepted; the first `kept` ids stand."""
        self.pace.told(guessed, accepted)
        self.kept = min(self.kept, kept)

    @property
    def acceptance(self) -> Acceptance:
        """The record so far."""
        return self.pace.acceptance(self.name)


def guesses_for(request: Request, drafter: Drafter | None) -> Guesses | None:
    """What a request's settings mean on a model with this draft model.

    Raises:
        OptionError: a draft model is asked for and there is none.
    """
    settings = request.speculation
    if settings.kind == "ngram":
        return Guesses.ngram(settings)
    if settings.kind == "draft" and drafter is None:
        raise OptionError("speculation is 'draft' and the model has no draft model; load it with draft=, or use speculation='ngram'")
    if settings.kind == "off" or drafter is None or request.sampling.post_sampling:  # hooks are for draws that count, not for guesses
        return None
    return Guesses.draft(settings, drafter)


class GuessingSpeculator:
    """Puts guesses behind the ids of the sequences that decode, before each step."""

    def propose(self, running: Ids[Sequence], /) -> None:
        """Append guesses; `rows` of a sequence is one more than its guesses."""
        wanted: dict[int, list[tuple[Sequence, int]]] = {}
        drafters: dict[int, Drafter] = {}
        most, beside = max(1, STEP_ROWS // len(running) - 1) if running else 0, len(running) - 1
        for sequence in running:
            guesses = sequence.guesses
            if guesses is None or sequence.pending != 1 or sequence.guessed:
                continue
            room = min(most, sequence.limit - sequence.new_tokens - 1)
            if guesses.drafter is None:
                sequence.propose(guesses.guess(sequence.ids, room, beside))
            elif count := guesses.pace.length(room, beside):
                drafters[id(guesses.drafter)] = guesses.drafter
                wanted.setdefault(id(guesses.drafter), []).append((sequence, count))
        for key, drafter in drafters.items():
            for (sequence, _), found in zip(wanted[key], drafter.guess(wanted[key])):
                sequence.propose(found)
