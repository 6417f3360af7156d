"""What the parsers of answers report, piece by piece."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Delta(NamedTuple):
    """What became certain: text of the reasoning, of the content, or of a call's arguments; or a "call" that begins.

    Attributes:
        kind: What the text belongs to.
        text: The text; for a "call", the name of the function.
        call: The number of the call in the answer, from 0.
        id: The id of the call, where it begins.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    call: int = 0
    id: str = ""


def held_length(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`, which is not complete yet."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
