"""What sampling asks of a grammar: which tokens may come next. Knows no grammar."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np


class Allowed(NamedTuple):
    """Tokens that may come next: f32 `(V,)` 0 where allowed and -inf elsewhere; and their ids, int64 ascending, where they are few."""

    bias: np.ndarray
    ids: np.ndarray | None


class Constraint(Protocol):
    """The state of one request in its grammar. Belongs to the request's thread; `allowed` may be prepared on another one."""

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
        """The text goes on with this token.

        Raises:
            StructureError: it is not allowed here.
        """
        ...

    def rewind(self, count: int, /) -> None:
        """Take the last `count` tokens back."""
        ...

    def copy(self) -> Constraint:
        """The same place in the grammar, independent from here on."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must follow whatever the model thinks; often none. Good as a draft."""
        ...


def constrain(logits: np.ndarray, allowed: Allowed) -> np.ndarray:
    """A copy with -inf where a token is not allowed."""
    return logits + allowed.bias
