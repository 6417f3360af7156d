"""The interface between sampling and a grammar: which tokens may come next. Knows no grammar."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from exl2nb.ops.cpu_sample import mask_logits

SPARSE_MASK_RATIO = 16  # where at most one token in 16 is allowed, filters work on their ids alone
_BIT_COUNTS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1).astype(np.uint8)


class Allowed(NamedTuple):
    """Tokens that may come next.

    bits: int32 `(ceil(V / 32),)`, token i is bit i % 32 of word i // 32, the lowest first; 0 beyond V.
    """

    bits: np.ndarray

    @classmethod
    def of(cls, allowed: np.ndarray) -> Allowed:
        """From bool `(V,)`, True where allowed.

        Example:
            >>> Allowed.of(np.array([True, False, True])).bits.tolist()
            [5]
        """
        packed = np.zeros(-(-len(allowed) // 32) * 4, np.uint8)
        few = np.packbits(allowed, bitorder="little")
        packed[: len(few)] = few
        return cls(packed.view(np.int32))

    def __contains__(self, token_id: object) -> bool:
        return isinstance(token_id, (int, np.integer)) and bool(self.bits[int(token_id) >> 5] >> (int(token_id) & 31) & 1)

    def few(self) -> np.ndarray | None:
        """Their ids, int64 ascending, where they are few; else None.

        Example:
            >>> Allowed.of(np.arange(64) == 40).few().tolist(), Allowed.of(np.arange(64) > 40).few()
            ([40], None)
        """
        words = self.bits.view(np.uint32)
        if _popcount(words) * SPARSE_MASK_RATIO > 32 * len(words):
            return None
        used = np.flatnonzero(words)
        at = np.flatnonzero(np.unpackbits(words[used].view(np.uint8), bitorder="little").view(bool))
        return used[at >> 5] * 32 + (at & 31)

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """A copy of f32 `(V,)` with -inf where a token is not allowed."""
        row = np.ascontiguousarray(logits, np.float32)
        return mask_logits(torch.from_numpy(row), torch.from_numpy(self.bits)).numpy()


def _popcount(words: np.ndarray) -> int:
    """How many bits are set in uint32 `(n,)`."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        return int(np.bitwise_count(words).sum(dtype=np.int64))
    return int(_BIT_COUNTS.take(words.view(np.uint8)).sum(dtype=np.int64))


class Constraint(Protocol):
    """One request's position in its grammar. Used on the engine thread; `allowed` may be prepared on another one."""

    @property
    def finished(self) -> bool:
        """True where the text is complete and nothing may follow, or its end was chosen."""
        ...

    @property
    def accepting(self) -> bool:
        """True where the text could end here."""
        ...

    def allowed(self) -> Allowed:
        """The tokens that may come next, the end of the text included where it may end. Good until the next call of another method."""
        ...

    def accept(self, token_id: int, /) -> None:
        """Advance by this token.

        Raises:
            StructureError: it is not allowed here.
        """
        ...

    def rewind(self, count: int, /) -> None:
        """Remove the last `count` tokens."""
        ...

    def copy(self) -> Constraint:
        """An independent copy at the same position."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must follow whatever the logits say; often none. Usable as draft tokens."""
        ...
