"""Chunks of a stream as the rows a widget shows. Takes anything that looks like a chunk, so widgets work on recorded data too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from exl2nb.core.errors import OptionError
from exl2nb.generator.request import Chunk
from exl2nb.widgets.protocol import Alternative, TokenItem

_new: Any = tuple.__new__  # half the time of calling the class


def items_of(chunk: Any) -> list[TokenItem]:
    """The tokens of one chunk.

    Args:
        chunk: a str, or an object with `.text` and `.tokens`. The chunk's text is the truth: where the tokens' own texts do not add up
            to it (a character that spans tokens), the last token carries it all.

    Raises:
        OptionError: neither of them.
    """
    if isinstance(chunk, str):
        return [TokenItem(chunk, -1, None, None, [])] if chunk else []
    text, tokens = getattr(chunk, "text", None), getattr(chunk, "tokens", None)
    if not isinstance(text, str) or tokens is None:
        raise OptionError(f"stream gave {type(chunk).__name__!r}; expected str, or an object with .text and .tokens")
    items = [token_item(token) for token in tokens]
    if not items:
        return [TokenItem(text, -1, None, None, [])] if text else []
    if "".join(item.text for item in items) != text:
        items = [*(item._replace(text="") for item in items[:-1]), items[-1]._replace(text=text)]
    return items


def raw_items(chunk: Any) -> Sequence[Any]:
    """The tokens of a chunk with the least work: the engine's own as they are, everything else by `items_of`."""
    return chunk.tokens if type(chunk) is Chunk else items_of(chunk)


def brief_rows(tokens: Sequence[Any]) -> list[tuple[str, int, float | None, int | None, list[Alternative] | None]]:
    """Rows of a delta from what `raw_items` gave: plain JSON values, alternatives left out where there are any."""
    return [
        (token.text, token.id, None if token.prob is None else round(token.prob, 6), token.rank, None if token.top else [])
        for token in tokens
    ]


def token_item(token: Any) -> TokenItem:
    """A token object, a mapping or a sequence in the order of TokenItem, as a TokenItem of plain JSON values."""
    with suppress(AttributeError, TypeError):  # what the engine gives needs no looking twice: at 2,000 a second it counts
        if type(token.text) is str and type(token.id) is int:
            rivals = [_new(Alternative, (rival.text, round(rival.prob, 6))) for rival in token.top]
            return TokenItem(token.text, token.id, round(token.prob, 6), token.rank, rivals)
    if isinstance(token, (tuple, list)) and not hasattr(token, "text"):
        token = dict(zip(TokenItem._fields, token))

    def read(name: str) -> Any:
        return token.get(name) if isinstance(token, Mapping) else getattr(token, name, None)

    prob, logprob, rank = read("prob"), read("logprob"), read("rank")
    if prob is None and logprob is not None:
        prob = math.exp(logprob)
    number = read("id")
    return TokenItem(
        text=str(read("text") or ""),
        id=-1 if number is None else int(number),
        prob=None if prob is None else round(float(prob), 6),
        rank=None if rank is None else int(rank),
        top=[alternative(entry) for entry in read("top") or ()],
    )


def alternative(entry: Any) -> Alternative:
    """(text, prob), (id, text, prob), or an object with .text and .prob."""
    if hasattr(entry, "text") and hasattr(entry, "prob"):
        return Alternative(str(entry.text), round(float(entry.prob), 6))
    *_, text, prob = entry
    return Alternative(str(text), round(float(prob), 6))
