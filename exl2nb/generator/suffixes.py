"""A suffix automaton of token ids: where the end of a text stood before, for any number of texts. Knows no request.

One pass over the texts, a few microseconds a token (Blumer et al., 1985). A state is a set of runs of tokens that end at the same places;
`links` leads to the longest shorter run that also ends elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

TEXT_SEPARATOR = -1  # between two texts


class SuffixAutomaton:
    """Grows by one token at a time.

    text: every token so far, TEXT_SEPARATOR between texts. last: state of the whole of the text that grows.

    Example:
        >>> seen = SuffixAutomaton()
        >>> for token in [5, 6, 7, 8, 5, 6]:
        ...     seen.extend(token)
        >>> seen.repeated()
        (2, 2)
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.moves: list[dict[int, int]] = [{}]
        self.links, self.lengths = [-1], [0]
        self._ends = [0]  # of each state, where the continuation of one of its runs stands in `text`, mostly of the latest
        self.last = 0

    def start(self) -> None:
        """Begin another text."""
        if self.text and self.text[-1] != TEXT_SEPARATOR:
            self.text.append(TEXT_SEPARATOR)
        self.last = 0

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        moves, links, lengths, ends = self.moves, self.links, self.lengths, self._ends
        self.text.append(token)
        at, before = len(self.text), self.last
        known = moves[before].get(token)
        if known is not None and lengths[known] == lengths[before] + 1:  # another text has it
            ends[known], self.last = at, known
            return
        if known is None:
            new = self._state({}, lengths[before] + 1, at)
            self.last = new
            while before >= 0 and token not in moves[before]:
                moves[before][token] = new
                before = links[before]
            if before < 0:
                links[new] = 0
                return
            known = moves[before][token]
            if lengths[known] == lengths[before] + 1:
                links[new] = known
                return
        else:
            new = -1
        clone = self._state(dict(moves[known]), lengths[before] + 1, ends[known])
        links[clone], links[known] = links[known], clone
        if new >= 0:
            links[new] = clone
        else:
            ends[clone], self.last = at, clone
        while before >= 0 and moves[before].get(token) == known:
            moves[before][token] = clone
            before = links[before]

    def repeated(self) -> tuple[int, int]:
        """The longest end of the text that stood before: its length, and where it went on; (0, 0): none did."""
        state = self.links[self.last]
        if state <= 0:
            return 0, 0
        at, self._ends[state] = self._ends[state], len(self.text)
        return self.lengths[state], at

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Where another text stands after one more token: the state of its longest end that is in here, and that end's length."""
        moves, links = self.moves, self.links
        while state and token not in moves[state]:
            state = links[state]
            length = self.lengths[state]
        found = moves[state].get(token)
        return (0, 0) if found is None else (found, length + 1)

    def end_of(self, state: int) -> int:
        """Where a run of this state went on."""
        return self._ends[state]

    def after(self, at: int, count: int) -> list[int]:
        """At most `count` tokens from place `at` on; a run that reaches the end of the last text goes on with itself."""
        text, size, found = self.text, len(self.text), list[int]()
        count = count if at < size else 0
        for i in range(count):
            token = text[at + i] if at + i < size else found[at + i - size]
            if token == TEXT_SEPARATOR:
                break
            found.append(token)
        return found

    def _state(self, moves: dict[int, int], length: int, end: int) -> int:
        self.moves.append(moves)
        self.links.append(-1)
        self.lengths.append(length)
        self._ends.append(end)
        return len(self.lengths) - 1


class EarlierTexts:
    """The latest texts of an engine; when there are too many, the older ones are dropped together.

    index: of the texts; another object after they were dropped.
    """

    def __init__(self, most: int = 1 << 15) -> None:
        self.index, self._most = SuffixAutomaton(), most

    def add(self, ids: Sequence[int]) -> None:
        """Remember a text."""
        if len(self.index.text) + len(ids) > self._most:
            self.index = SuffixAutomaton()
        self.index.start()
        for token in ids:
            self.index.extend(token)
