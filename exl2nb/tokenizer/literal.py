"""Keeps the words of a user plain text: the text of a control token in a message must not act as that token.

A chat template puts messages and control tokens into one string, so a message that holds "<|im_end|>" could end its own turn, open the
reasoning or forge a tool result. `protect` puts a mark behind the first character of each such text, the template is rendered, and the
tokenizer removes the marks after encoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

LITERAL_MARK = (
    "\ue002"  # of the private use area; no tokenizer splits or joins words at it that would not do so at any other unknown character
)
_ESCAPED_MARK = re.compile(r"\\ue002", re.IGNORECASE)


def control_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that matches the text of any control token; None where there is none.

    Args:
        texts: The texts of the control tokens.
    """
    ordered = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def protect(value: Any, pattern: re.Pattern[str] | None) -> Any:
    """Copy a value of JSON types with a mark inside each control text of its strings and of the keys of its objects."""
    if isinstance(value, str):
        if LITERAL_MARK in value:
            value = value.replace(LITERAL_MARK, "")
        return value if pattern is None else pattern.sub(lambda found: found[0][0] + LITERAL_MARK + found[0][1:], value)
    if isinstance(value, dict):
        return {protect(key, pattern): protect(one, pattern) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [protect(one, pattern) for one in value]
    return value


def unescaped(text: str) -> str:
    """The rendered text with the marks that a JSON filter has written as an escape put back as characters."""
    return _ESCAPED_MARK.sub(LITERAL_MARK, text)


def without_marks(text: str) -> str:
    """The text as a person reads it."""
    return text.replace(LITERAL_MARK, "")


def ids_without_marks(text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[int] | None:
    """The ids of a text without the tokens of its marks; None where a token spans a mark and another character.

    Args:
        text: The encoded text.
        ids: Its token ids.
        offsets: The first character and the end of each token in `text`.
    """
    places = {at for at, char in enumerate(text) if char == LITERAL_MARK}
    kept: list[int] = []
    for token, (start, end) in zip(ids, offsets):
        covered = [at in places for at in range(start, end)]
        if any(covered) and not all(covered):
            return None
        if not covered or not covered[0]:
            kept.append(token)
    return kept
