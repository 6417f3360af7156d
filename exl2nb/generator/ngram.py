"""Guesses from the text itself: what followed the last tokens when they stood there before (prompt lookup). Knows no model."""

from __future__ import annotations

from collections.abc import Sequence


class NgramGuesser:
    """An index of the places where each run of tokens was continued, latest first.

    Args:
        min_match, max_match: lengths of the runs; the longest that is found counts.

    Example:
        >>> NgramGuesser(1, 3).guess([5, 6, 7, 8, 5, 6], 3)
        [7, 8, 5]
    """

    name = "ngram"

    def __init__(self, min_match: int, max_match: int) -> None:
        self._lengths = range(max_match, min_match - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}  # run -> where its latest continuation stands
        self._known = 0  # positions up to here are in the index as continuations

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that followed the same run before; a copy that reaches the end goes on with itself."""
        self._learn(ids)
        size = len(ids)
        for length in self._lengths:
            if size <= length:
                continue
            at = self._after.get(tuple(ids[size - length :]))
            # an index of a text that was cut back in between may point past the end or to other tokens: then it is a poor guess, no error
            if at is not None and at < size:
                found: list[int] = []
                for i in range(count):
                    found.append(ids[at + i] if at + i < size else found[at + i - size])
                return found
        return []

    def _learn(self, ids: Sequence[int]) -> None:
        shortest = self._lengths[-1]
        for at in range(max(min(self._known, len(ids)), shortest), len(ids)):
            for length in self._lengths:
                if length <= at:
                    self._after[tuple(ids[at - length : at])] = at
        self._known = len(ids)
