"""Texts to find while text still comes, across token boundaries: what may still become one is held back. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """Where one of the texts stands, in characters from the very beginning, and which one it is."""

    start: int
    end: int
    text: str


class StopMatcher:
    """Reads text as it comes.

    Args:
        stops: texts that end the answer; may be none.
        ignore_case: take upper and lower case for the same.

    Example:
        >>> matcher = StopMatcher(["END"])
        >>> matcher.feed("the E"), matcher.feed("N"), matcher.feed("D of it")
        ((4, False), (4, False), (4, True))
        >>> matcher.match.text
        'END'
    """

    def __init__(self, stops: Sequence[str], *, ignore_case: bool = False) -> None:
        self._given = tuple(stops)
        self._fold = _lower if ignore_case else str
        self._stops = tuple(map(self._fold, self._given))
        self._longest = max(map(len, self._stops), default=0)
        self._text, self._start = "", 0  # the last characters, which may be part of a stop text, and where they begin
        self._passed = 0  # matches that end here or earlier do not count
        self.match: Match | None = None
        self.beginnings = frozenset(stop[0] for stop in self._stops)  # folded; a piece with none of these may be passed over, see `pass_to`

    def pass_to(self, place: int) -> None:
        """So many characters have come, the last ones without being fed: nothing was held, and none of them was in `beginnings`."""
        self._text, self._start = "", place

    def feed(self, text: str, *, armed: bool = True) -> tuple[int, bool]:
        """Take more text.

        Args:
            text: what comes next.
            armed: False: what is complete with this text does not count, now or later (an answer that is too short to end).

        Returns:
            How many characters of all the text so far may be shown, and whether a stop text was found: then these are all of the answer,
            up to the stop text that is complete first, which does not depend on how the text was cut into pieces.
        """
        if not self._stops:
            self._start += len(text)
            return self._start, False
        self._text += self._fold(text)
        if not armed:
            self._passed = self._start + len(self._text)
        found = [match for stop, given in zip(self._stops, self._given) if (match := self._find(stop, given)) is not None]
        if found:
            self.match = min(found, key=lambda match: (match.end, match.start))
            return self.match.start, True
        held = next((n for n in range(min(self._longest - 1, len(self._text)), 0, -1) if self._ends_with_beginning(n)), 0)
        cut = len(self._text) - held
        self._text, self._start = self._text[cut:], self._start + cut
        return self._start, False

    def save(self) -> tuple[str, int, int]:
        """What `load` needs to come back here."""
        return self._text, self._start, self._passed

    def load(self, saved: tuple[str, int, int]) -> None:
        """Go back to a saved place."""
        self._text, self._start, self._passed = saved
        self.match = None

    def _find(self, stop: str, given: str) -> Match | None:
        at = self._text.find(stop, max(0, self._passed - self._start - len(stop) + 1))
        return None if at < 0 else Match(self._start + at, self._start + at + len(stop), given)

    def _ends_with_beginning(self, n: int) -> bool:
        tail = self._text[-n:]
        return any(len(stop) > n and stop.startswith(tail) for stop in self._stops)


def _lower(text: str) -> str:
    """Lower case without a change of length, so that places stay places."""
    return text.lower() if text.isascii() else "".join([low if len(low := c.lower()) == 1 else c for c in text])
