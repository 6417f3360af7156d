"""Stop texts across token boundaries: what may still become one is held back. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Reads text as it comes.

    Args:
        stops: texts that end the answer; may be none.

    Example:
        >>> matcher = StopMatcher(["END"])
        >>> matcher.feed("the E"), matcher.feed("N"), matcher.feed("D of it")
        ((4, False), (4, False), (4, True))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._text, self._start = "", 0  # the last characters, which may be part of a stop text, and where they begin

    def feed(self, text: str) -> tuple[int, bool]:
        """Take more text.

        Returns:
            How many characters of all the text so far may be shown, and whether a stop text was found: then these are all of the answer,
            up to the stop text that is complete first, which does not depend on how the text was cut into pieces.
        """
        if not self._stops:
            self._start += len(text)
            return self._start, False
        self._text += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if found:
            return self._start + min(found)[1], True
        held = next((n for n in range(min(self._longest - 1, len(self._text)), 0, -1) if self._ends_with_beginning(n)), 0)
        cut = len(self._text) - held
        self._text, self._start = self._text[cut:], self._start + cut
        return self._start, False

    def _ends_with_beginning(self, n: int) -> bool:
        tail = self._text[-n:]
        return any(len(stop) > n and stop.startswith(tail) for stop in self._stops)
