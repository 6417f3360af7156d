"""What sampling remembers about one request: its seed, how many tokens it drew, which tokens it has seen."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.rng import fresh_seed, uniform


class SamplerState:
    """The changing half of sampling, one per request.

    Args:
        params: the fixed half.
        prompt_ids: they count as seen for the repetition penalty.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int] = ()) -> None:
        self.params = params
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.count = 0
        self._tracks = params.repetition_penalty != 1.0
        self._known: set[int] = set()
        self._seen = np.empty(0, np.int64)
        if self._tracks:
            self._add(prompt_ids)

    @property
    def seen(self) -> np.ndarray:
        """int64 `(n,)`: each token seen, once, in order of appearance. Empty while no filter asks for it."""
        return self._seen[: len(self._known)]

    def uniform(self) -> float:
        """The random number of the token that is drawn next; asking twice gives the same."""
        return uniform(self.seed, self.count)

    def push(self, token_id: int) -> None:
        """The request has taken this token."""
        self.count += 1
        if self._tracks and token_id not in self._known:
            self._add((token_id,))

    def _add(self, ids: Iterable[int]) -> None:
        new = [i for i in dict.fromkeys(ids) if i not in self._known]
        start = len(self._known)
        if start + len(new) > len(self._seen):
            grown = np.empty(max(64, 2 * (start + len(new))), np.int64)
            grown[:start] = self._seen[:start]
            self._seen = grown
        self._seen[start : start + len(new)] = new
        self._known.update(new)
