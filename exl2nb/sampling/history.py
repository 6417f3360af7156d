"""The ids of a request as they grow, and how often each occurred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np


class History:
    """Prompt and new tokens in one array.

    Args:
        prompt_ids: what stands before the new text.
    """

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        self._ids = np.fromiter(prompt_ids, np.int64)
        self.prompt_length = self._length = len(self._ids)

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> np.ndarray:
        """int64 `(S,)`: all of them."""
        return self._ids[: self._length]

    @property
    def new_ids(self) -> np.ndarray:
        """int64: those after the prompt."""
        return self._ids[self.prompt_length : self._length]

    def push(self, token_id: int) -> None:
        """Add one."""
        if self._length == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(max(64, self._length), np.int64)))
        self._ids[self._length] = token_id
        self._length += 1

    def pop(self) -> int:
        """Take the last one back."""
        self._length -= 1
        return int(self._ids[self._length])

    def copy(self) -> History:
        """The same ids, independent from here on."""
        twin = History(self.ids)
        twin.prompt_length = self.prompt_length
        return twin


class Tally:
    """Distinct ids and their counts as arrays that need no rebuilding. The order means nothing."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        counts = Counter(ids)
        self._slot = {token_id: at for at, token_id in enumerate(counts)}
        spare = np.empty(64, np.int64)
        self._ids = np.concatenate((np.fromiter(counts.keys(), np.int64), spare))
        self._counts = np.concatenate((np.fromiter(counts.values(), np.int64), spare))

    @property
    def ids(self) -> np.ndarray:
        """int64 `(n,)`, all different."""
        return self._ids[: len(self._slot)]

    @property
    def counts(self) -> np.ndarray:
        """int64 `(n,)`: how often each of `ids` is there."""
        return self._counts[: len(self._slot)]

    def add(self, token_id: int) -> None:
        """One more of an id."""
        at = self._slot.get(token_id)
        if at is not None:
            self._counts[at] += 1
            return
        at = self._slot[token_id] = len(self._slot)
        if at == len(self._ids):
            self._ids, self._counts = (np.concatenate((a, np.empty_like(a))) for a in (self._ids, self._counts))
        self._ids[at], self._counts[at] = token_id, 1

    def copy(self) -> Tally:
        """The same counts, independent from here on."""
        twin = Tally()
        twin._slot, twin._ids, twin._counts = dict(self._slot), self._ids.copy(), self._counts.copy()
        return twin

    def remove(self, token_id: int) -> None:
        """One less of an id; the last of its kind leaves."""
        at = self._slot[token_id]
        self._counts[at] -= 1
        if self._counts[at]:
            return
        last = len(self._slot) - 1
        moved = int(self._ids[last])
        self._ids[at], self._counts[at] = moved, self._counts[last]
        self._slot[moved] = at
        del self._slot[token_id]


def fading(distance: np.ndarray, reach: int, decay: int) -> np.ndarray:
    """Strength of a penalty for a token `distance` (1 = the last one) ago: 1 up to `reach`, then linearly down to 0 after `decay` more.

    Example:
        >>> fading(np.array([1, 2, 3, 4, 5]), 2, 2).round(2).tolist()
        [1.0, 1.0, 0.67, 0.33, 0.0]
    """
    return np.clip((reach + decay + 1 - distance) / (decay + 1), 0.0, 1.0)


def faded(ids: np.ndarray, reach: int, decay: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What penalties that look back `reach` tokens, fading over `decay` more, see of a text.

    Returns:
        Distinct ids; the strength of the latest occurrence of each; the sum of strengths over all its occurrences.
    """
    window = ids[max(0, len(ids) - reach - decay) :][::-1]
    found, first, inverse = np.unique(window, return_index=True, return_inverse=True)
    strength = fading(np.arange(1, len(window) + 1), reach, decay)
    return found, strength[first], np.bincount(inverse.reshape(-1), strength, len(found))
