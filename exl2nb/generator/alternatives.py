"""The alternatives of a token, made when somebody looks: at 2,000 tokens a second most of them are looked at by nobody."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from exl2nb.generator.request import Alternative


class Alternatives(Sequence[Alternative]):
    """Reads, compares, prints and copies as the tuple it stands for.

    Args:
        pairs: id and log probability, the most probable first.
        piece: id -> text.
    """

    __slots__ = ("_made", "_pairs", "_piece")

    def __init__(self, pairs: Sequence[tuple[int, float]], piece: Callable[[int], str]) -> None:
        self._pairs, self._piece, self._made = pairs, piece, None

    def _all(self) -> tuple[Alternative, ...]:
        if self._made is None:
            self._made: tuple[Alternative, ...] | None = tuple(
                [Alternative(i, self._piece(i), logprob, math.exp(logprob)) for i, logprob in self._pairs]
            )
        return self._made

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[Alternative]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, Alternatives) else other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def __reduce__(self) -> Any:
        return tuple, (self._all(),)
