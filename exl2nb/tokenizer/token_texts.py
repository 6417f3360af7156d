"""Bytes and text of single tokens: byte-level alphabets, byte tokens <0x00> ... <0xFF>, and tokens whose text needs no neighbours."""

from __future__ import annotations

import json
from collections.abc import Callable

import tokenizers

from exl2nb.tokenizer.backend import library_errors


def byte_table(backend: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """Bytes of every token, where the decoder is byte-level; None otherwise.

    A token with a character outside the alphabet (an added one) stands for its own UTF-8 text, as in the tokenizers library.
    """
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    values = {char: value for value, char in enumerate(alphabet())}
    table: dict[int, bytes] = {}
    for text, token_id in backend.get_vocab(with_added_tokens=True).items():
        known = all(char in values for char in text)
        table[token_id] = bytes(values[char] for char in text) if known else text.encode("utf-8")
    return table


def alphabet() -> list[str]:
    """The character of each byte value: itself where it prints, otherwise the next free one from U+0100 on.

    Source: byte-level BPE (Radford et al., 2019).
    """
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    chars, spare = [], 0x100
    for value in range(256):
        chars.append(chr(value if value in prints else spare))
        spare += value not in prints
    return chars


def byte_tokens(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the tokens "<0x00>" ... "<0xFF>"."""
    found = (backend.token_to_id(f"<0x{value:02X}>") for value in range(256))
    return frozenset(i for i in found if i is not None)


def piece_bytes(backend: tokenizers.Tokenizer, byte_ids: frozenset[int]) -> dict[int, bytes] | None:
    """Bytes of every token of a SentencePiece vocabulary, whose decoder only replaces the mark of a space and joins byte tokens.

    Returns:
        Id to bytes; None where the decoder does something else, such as WordPiece.
    """
    decoder = json.loads(backend.to_str())["decoder"]
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if not steps or any(step["type"] not in LOCAL_DECODERS for step in steps):
        return None
    replaced = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    replaced += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    if any(old is None for old, _ in replaced):
        return None
    table: dict[int, bytes] = {}
    for text, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id in byte_ids:
            table[token_id] = bytes([int(text[3:5], 16)])
            continue
        for old, new in replaced:
            text = text.replace(old, new)
        table[token_id] = text.encode("utf-8", "replace")
    return table


LOCAL_DECODERS = (
    "Replace",
    "ByteFallback",
    "Fuse",
    "Metaspace",
    "Strip",
)  # decoders that look at one token at a time, the text's ends excepted
ANCHOR_TOKENS = ("▁a", "a", "▁the", "the", "e")


class PlainTexts(dict[int, "str | None"]):
    """Token id -> its text after any other text; None where the text depends on the neighbours (part of a character, a byte token).

    Args:
        find: the text of a token that is not in the table yet.

    Example:
        >>> texts = PlainTexts(lambda i: "ab"[i] if i < 2 else None)
        >>> texts[1], texts[2], len(texts)
        ('b', None, 2)
    """

    def __init__(self, find: Callable[[int], str | None]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._find(token_id)
        return text


def plain_texts(
    backend: tokenizers.Tokenizer, table: dict[int, bytes] | None, *, byte_ids: frozenset[int], skipped: frozenset[int]
) -> PlainTexts:
    """The table of a tokenizer.

    Args:
        backend: the tokenizer.
        table: bytes of every token, where the decoder is byte-level.
        byte_ids: tokens that stand for one byte.
        skipped: special tokens, which a stream may have to leave out; they have no plain text.
    """
    if table is not None:
        known = table

        def from_bytes(token_id: int) -> str | None:
            try:
                return None if token_id in skipped else known.get(token_id, b"").decode("utf-8")
            except UnicodeDecodeError:
                return None

        return PlainTexts(from_bytes)
    anchor = next((i for text in ANCHOR_TOKENS if (i := backend.token_to_id(text)) is not None), None)
    if anchor is None or not _local(backend):
        return PlainTexts(lambda token_id: None)
    with library_errors:
        before = backend.decode([anchor], skip_special_tokens=False)

    def from_decoder(token_id: int) -> str | None:
        if token_id in skipped or token_id in byte_ids:
            return None
        with library_errors:
            text = backend.decode([anchor, token_id], skip_special_tokens=False)
        return text[len(before) :] if text.startswith(before) and "�" not in text else None

    return PlainTexts(from_decoder)


def _local(backend: tokenizers.Tokenizer) -> bool:
    """Whether the decoder makes each token's text without looking at others, but for the very beginning of the whole text."""
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return all(step["type"] in LOCAL_DECODERS and not step.get("stop") for step in steps)
