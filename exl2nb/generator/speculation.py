"""Speculative decoding: its settings, how many tokens to guess, and what came of it. Knows neither models nor caches.

A guess is verified by the request's own sampler: the model runs all guessed tokens in one step, then every row is sampled in order, with
the request's own random number for that token, and as long as the token drawn is the one guessed the next row counts too. So the text is,
token for token, the one without speculation, for every sampler, penalty and constraint. Rejection sampling (Leviathan et al., 2023) would
accept a little more often, but draws other random numbers and would have to be proved right for every filter anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from exl2nb.core.errors import OptionError
from exl2nb.core.options import check_flag, check_range

KINDS = ("auto", "draft", "ngram", "off")
MAX_GUESSES = 7  # a step then has at most 8 rows per sequence, which every backend runs as a decode
PROBE, RARELY = 12, 48  # steps without a guess after which one is tried again: after the first failure, and after several
STALE = 512  # steps after which the time of a step with so many rows, not seen since, is no longer believed
FORGET = 0.9  # weight of what was known, per verified step
GAIN = 1.03  # guesses that promise less than this are not made: the promise is an estimate
SURE = 0.995  # the most that is believed of a guess
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
        check_flag("Speculation: adaptive", self.adaptive)
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
    """One step that verified guesses. at: place of the first guess in the new tokens. ids: guessed. accepted: the first so many of them."""

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


class StepTimes:
    """How long a step takes by its number of rows, learnt from steps.

    What was seen lately counts most. A number of rows that was not seen is taken to lie on the line between those that were, or on the line
    from one row through the largest one that was. So one row more is tried before many are: see `reach`.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, int]] = {}  # rows -> seconds, and when that was seen last
        self._count = 0

    def told(self, rows: int, seconds: float) -> None:
        """A step with so many rows, and nothing else, took so long. What is far longer than usual was disturbed, and counts little."""
        self._count += 1
        if rows in self._seen:
            known, _ = self._seen[rows]
            seconds = known + (0.2 if seconds > known else 0.5) * (min(seconds, 2.0 * known) - known)
        self._seen[rows] = seconds, self._count
        for other in [n for n, (_, last) in self._seen.items() if self._count - last > STALE]:
            del self._seen[other]  # what was slow once is tried again some day

    @property
    def plain_due(self) -> bool:
        """True where steps were seen, but lately none with one row, beside which all others are judged."""
        return bool(self._seen) and 1 not in self._seen

    @property
    def reach(self) -> int:
        """Rows of a step that may be tried: twice what was seen."""
        return 2 * max(self._seen, default=1)

    def seconds(self, rows: int) -> float:
        """Of a step with so many rows; 1 for one row while nothing is known."""
        seen = self._seen
        if rows in seen:
            return seen[rows][0]
        below = max((n for n in seen if n < rows), default=None)
        above = min((n for n in seen if n > rows), default=None)
        if below is None:
            first = 1.0 if above is None else seen[above][0] / (1.0 + (above - 1) * ROW_COST)
            return first * (1.0 + (rows - 1) * ROW_COST)
        if above is not None:
            part = (rows - below) / (above - below)
            return seen[below][0] * (1.0 - part) + seen[above][0] * part
        if below > 1 and 1 in seen:
            return seen[below][0] + max(0.0, seen[below][0] - seen[1][0]) * (rows - below) / (below - 1)
        return seen[below][0] * (1.0 + (rows - 1) * ROW_COST) / (1.0 + (below - 1) * ROW_COST)


class Pace:
    """How many tokens to guess next, and the record of what became of them.

    With probability a that a guess is right, k guesses give (1 - a**(k+1)) / (1 - a) tokens on average; the k that gives most tokens per
    second, for the a seen lately and the time that a step with so many rows takes, is the best, if it is better than none by `GAIN`.

    Args:
        settings: of the request.
        times: of the steps that the guesses are verified in.
        watched: `seen` tells of guesses that were not made; then none needs to be made to find out.
    """

    def __init__(self, settings: Speculation, *, times: StepTimes | None = None, watched: bool = False) -> None:
        self.settings, self._times, self._watched = settings, times or StepTimes(), watched
        self._right, self._tried = 1.6, 2.0  # as if 1.6 of 2 had been right: begin hopefully
        self._idle, self._patience, self._longest = 0, PROBE, 0
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
        if most <= 0 or not self.settings.adaptive:
            return max(0, most)
        if self._times.plain_due and not beside:
            return 0
        most = min(most, max(1, self._times.reach - beside - 1, 2 * self._longest + 1))
        best = self._best(min(SURE, self._right / self._tried), most, beside, guess_s)
        if best or self._watched:
            return best
        self._idle += 1
        if self._idle < self._patience or not self._best(SURE, most, beside, guess_s):
            return 0  # also where not even certain guesses would pay
        self._idle, self._patience = 0, min(2 * self._patience, RARELY)
        return 1

    def _best(self, likely: float, most: int, beside: int, guess_s: float) -> int:
        """The number of guesses that gives most tokens per second; 0 where none does clearly."""
        times = self._times

        def speed(k: int) -> float:
            tokens = beside + (1.0 - likely ** (k + 1)) / (1.0 - likely)
            return tokens / (times.seconds(beside + 1 + k) + k * guess_s)

        best = max(range(1, most + 1), key=speed)
        return best if speed(best) > GAIN * speed(0) else 0

    def seen(self, right: bool) -> None:
        """A guess that was not made would have been right, or not."""
        self._right = self._right * FORGET + right
        self._tried = self._tried * FORGET + 1

    def told(self, proposed: int, accepted: int) -> None:
        """A step verified `proposed` guesses and accepted so many; (0, 0) is a step without."""
        if not proposed:
            self.plain_steps += 1
            return
        self.steps += 1
        self.proposed += proposed
        self.accepted += accepted
        self.lengths[accepted] += 1
        self._longest = max(self._longest, proposed)
        self._right = self._right * FORGET + accepted
        self._tried = self._tried * FORGET + min(accepted + 1, proposed)
        if accepted:
            self._patience = PROBE

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
