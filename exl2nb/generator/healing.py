"""Token healing: the last prompt token is drawn again among the tokens that begin with its text. Knows no model.

A prompt that ends in the middle of a word ends in a token that the model hardly ever saw there ("http" and ":" where it always saw "://").
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from exl2nb.tokenizer.tokenizer import Tokenizer

_pieces: weakref.WeakKeyDictionary[Tokenizer, Pieces] = weakref.WeakKeyDictionary()


class Healed(NamedTuple):
    """ids: the prompt without its last token. allowed: int64 ids that may stand in its place, ascending. skip: characters of them that the
    prompt shows already.
    """

    ids: tuple[int, ...]
    allowed: np.ndarray
    skip: int


class Pieces:
    """The texts of a vocabulary in order, to find all that begin alike. Special tokens and parts of characters are not in it.

    Cost: one look at every token; 0.2 s for 128 000 of them, once per tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        table = tokenizer.byte_table
        found = []
        for i in set(tokenizer.backend.get_vocab(with_added_tokens=True).values()):
            if i in tokenizer.skipped_ids or i in tokenizer.byte_ids:
                continue
            text = table.get(i, b"") if table is not None else tokenizer.piece(i).encode()
            if text:
                found.append((text, i))
        found.sort()
        self._texts, self._ids = [text for text, _ in found], [i for _, i in found]
        self._of = {i: text for text, i in found}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Pieces:
        """Those of a tokenizer; made once."""
        if tokenizer not in _pieces:
            _pieces[tokenizer] = cls(tokenizer)
        return _pieces[tokenizer]

    def text(self, token_id: int) -> bytes | None:
        """UTF-8 of a token, None for special tokens."""
        return self._of.get(token_id)

    def beginning_with(self, prefix: bytes) -> list[int]:
        """Tokens whose text begins with `prefix`."""
        at, found = bisect_left(self._texts, prefix), []
        while at < len(self._texts) and self._texts[at].startswith(prefix):
            found.append(self._ids[at])
            at += 1
        return found


def heal(ids: Sequence[int], tokenizer: Tokenizer) -> Healed | None:
    """Take the last token back.

    Args:
        ids: a prompt.
        tokenizer: that made it.

    Returns:
        None where there is nothing to heal: one token only, a special token or half a character at the end, or no longer token begins so.
    """
    pieces = Pieces.of(tokenizer)
    text = pieces.text(ids[-1])
    if len(ids) < 2 or text is None:
        return None
    try:
        shown = text.decode()
    except UnicodeDecodeError:
        return None
    allowed = pieces.beginning_with(text)
    if len(allowed) < 2:
        return None
    return Healed(tuple(ids[:-1]), np.array(sorted(allowed), np.int64), len(shown))
