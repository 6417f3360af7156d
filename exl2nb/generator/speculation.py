"""Speculative decoding: its settings, how many tokens to guess, and what came of it. Knows neither models nor caches.

A guess is verified by the request's own sampler: the model runs all guessed tokens in one step, then every row is sampled in order, with
the request's own random number for that token, and as long as the token drawn is the one guessed the next row counts too. So the text is,
token for token, the one without speculation, for every sampler, penalty and constraint. Rejection sampling (Leviathan et al., 2023) would
accept a little more often, but draws other random numbers and would have to be proved right for every filter anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_range

KINDS = ("auto", "draft", "ngram", "off")
MAX_GUESSES = 7  # a step then has at most 8 rows per sequence, which every backend runs as a decode
PROBE = 12  # steps without a guess after which one is tried again
FADE = 0.995  # of a step's time that was measured, per step in which it is not measured again
FORGET = 0.9  # weight of what was known, per verified step
ROW_COST = 0.1  # of a step, what one more row costs, until it was measured


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How the next tokens are guessed.

    kind: "draft" (a smaller model with the same tokenizer), "ngram" (what followed the last tokens when they stood in the text before; good
    where an answer repeats its prompt, as in edits of code), "auto" (the draft model if the model was loaded with one), "off".
    Where a structure leaves no choice, what must follow is verified instead of a guess.
    max_tokens: guesses verified together, 1 to 7. adaptive: fewer where guesses fail. min_match, max_match: tokens that must agree with an
    earlier place in the text before "ngram" guesses; longer matches are tried first.

    Raises:
        OptionError: a value out of range.

    Example:
        >>> Speculation(kind="ngram", max_tokens=4).max_match
        4
    """

    kind: str = "auto"
    max_tokens: int = MAX_GUESSES
    adaptive: bool = True
    min_match: int = 2
    max_match: int = 4

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"speculation is {self.kind!r}; expected one of {', '.join(KINDS)}, or a Speculation")
        for name, low, high in (("max_tokens", 1, MAX_GUESSES), ("min_match", 1, 16), ("max_match", self.min_match, 16)):
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
            from exl2nb.core.options import make

            return make(cls, value, where="speculation")
        return cls(kind=value)


class Verified(NamedTuple):
    """One step that verified guesses. at: place of the first guess in the new tokens. ids: guessed. accepted: of them, from the first on."""

    at: int
    ids: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What speculation did for one request.

    kind: "draft" or "ngram". steps: of the model in which guesses were verified. proposed, accepted: tokens guessed, and found right.
    lengths: how often 0, 1, 2, ... guesses of a step were accepted. plain_steps: of the model without a guess. trail: each of `steps`.
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
        """Accepted of proposed, 0 to 1."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens per step of the model; 1 without speculation."""
        steps = self.steps + self.plain_steps
        return (steps + self.accepted) / steps if steps else 1.0

    def __str__(self) -> str:
        found = f"{self.accepted} of {self.proposed} guesses accepted ({self.rate:.0%})"
        return f"{self.kind}: {found}, {self.tokens_per_step:.2f} tokens per step"

    def _repr_html_(self) -> str:
        most = max(self.lengths, default=0) or 1
        bars = "".join(
            f'<tr><td style="text-align:right">{n}</td><td style="text-align:left"><span style="display:inline-block;height:.7em;'
            f'width:{12 * count / most:.1f}em;background:rgba(214,120,40,.6)"></span> {count}</td></tr>'
            for n, count in enumerate(self.lengths)
        )
        return f"<div>{self}</div><table><tr><th>accepted</th><th style='text-align:left'>steps</th></tr>{bars}</table>"


class Guesser(Protocol):
    """Where guesses come from."""

    name: str

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that may follow `ids`."""
        ...


class StepTimes:
    """How long a step takes by its number of rows, learnt from steps.

    What was seen lately counts most; a number of rows that was not seen is taken to cost as much more as the rows between those that were,
    at first `ROW_COST` of a step each.
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}

    def told(self, rows: int, seconds: float) -> None:
        """A step with so many rows, and nothing else, took so long. What is far longer than usual was disturbed, and counts little."""
        known = self._seen.get(rows)
        weight = 0.2 if known is None or seconds > known else 0.5
        self._seen[rows] = seconds if known is None else known + weight * (min(seconds, 2.0 * known) - known)
        first = self.seconds(1)
        for other, took in self._seen.items():  # what was slow once is tried again some day
            if other not in (1, rows) and took > (floor := first * (1.0 + (other - 1) * ROW_COST)):
                self._seen[other] = max(floor, took * FADE)

    def seconds(self, rows: int) -> float:
        """Of a step with so many rows; 1 for one row while nothing is known."""
        if rows in self._seen:
            return self._seen[rows]
        below = max((n for n in self._seen if n < rows), default=None)
        above = min((n for n in self._seen if n > rows), default=None)
        if below is None:
            first = 1.0 if above is None else self._seen[above] / (1.0 + (above - 1) * ROW_COST)
            return first * (1.0 + (rows - 1) * ROW_COST)
        if above is None:
            return self._seen[below] * (1.0 + (rows - 1) * ROW_COST) / (1.0 + (below - 1) * ROW_COST)
        part = (rows - below) / (above - below)
        return self._seen[below] * (1.0 - part) + self._seen[above] * part


class Pace:
    """How many tokens to guess next, and the record of what became of them.

    With probability a that a guess is right, k guesses give (1 - a**(k+1)) / (1 - a) tokens on average; the k that gives most tokens per
    second, for the a seen lately and the time that a step with so many rows takes, is the best.

    Args:
        settings: of the request.
        times: of the steps that the guesses are verified in.
    """

    def __init__(self, settings: Speculation, *, times: StepTimes | None = None) -> None:
        self.settings, self._times = settings, times or StepTimes()
        self._right, self._tried = 1.6, 2.0  # as if 1.6 of 2 had been right: begin hopefully
        self._idle = 0
        self.steps = self.proposed = self.accepted = self.plain_steps = 0
        self.lengths = [0] * (settings.max_tokens + 1)
        self.trail: list[Verified] = []

    def length(self, room: int, beside: int = 0, *, guess_s: float = 0.0) -> int:
        """Guesses to make now.

        Args:
            room: at most so many. beside: rows of other sequences in the step, whose tokens come later if it takes longer. guess_s: what
            making a guess takes.
        """
        most = min(self.settings.max_tokens, room)
        if most <= 0:
            return 0
        if not self.settings.adaptive:
            return most
        likely, times = min(0.995, self._right / self._tried), self._times

        def speed(k: int) -> float:
            tokens = beside + (1.0 - likely ** (k + 1)) / (1.0 - likely)
            return tokens / (times.seconds(beside + 1 + k) + k * guess_s)

        best = max(range(most + 1), key=speed)
        if best == 0:
            self._idle += 1
            if self._idle >= PROBE:
                self._idle = 0
                return 1
        return best

    def told(self, proposed: int, accepted: int) -> None:
        """A step verified `proposed` guesses and accepted so many; (0, 0) is a step without."""
        if not proposed:
            self.plain_steps += 1
            return
        self.steps += 1
        self.proposed += proposed
        self.accepted += accepted
        self.lengths[accepted] += 1
        self._right = self._right * FORGET + accepted
        self._tried = self._tried * FORGET + min(accepted + 1, proposed)

    def acceptance(self, kind: str) -> Acceptance:
        """The record."""
        return Acceptance(
            kind=kind,
            steps=self.steps,
            proposed=self.proposed,
            accepted=self.accepted,
            lengths=tuple(self.lengths),
            plain_steps=self.plain_steps,
            trail=tuple(self.trail),
        )
