"""Two ways in which vocabularies hold bytes: the printable alphabet of byte-level BPE, and tokens named <0x00> ... <0xFF>."""

from __future__ import annotations

import json

import tokenizers


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
