"""Add the tokens that tokenizer_config.json declares and tokenizer.json lacks, as Transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from exl2nb.core.errors import TokenizerError

MAX_DECLARED_TOKENS = 1 << 18
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Add the tokens of `added_tokens_decoder`, and make the tokens of `extra_special_tokens` special, as Transformers does.

    Entries that agree with tokenizer.json change nothing. An entry that disagrees takes the place of the one in tokenizer.json.

    Args:
        backend: The tokenizer of tokenizer.json; it is changed.
        config: The contents of tokenizer_config.json.
        path: The file that `config` was read from, for messages.

    Raises:
        TokenizerError: An entry is malformed, or a token would get another id than the one that is declared.
    """
    known = backend.get_added_tokens_decoder()
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, Mapping) or len(declared) > MAX_DECLARED_TOKENS:
        raise TokenizerError(
            f"{path}: added_tokens_decoder is {str(declared)[:80]}; expected an object of at most {MAX_DECLARED_TOKENS} ids"
        )
    entries = sorted((_entry(key, value, path) for key, value in declared.items()), key=lambda entry: entry[0])
    changed = [(number, token) for number, token in entries if number not in known or repr(known[number]) != repr(token)]
    for number, token in changed:
        known_before = backend.token_to_id(token.content) is not None
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != number:
            where = (
                f"in tokenizer.json it is id {found}"
                if known_before
                else f"tokenizer.json has no such token, and the next free id is {found}"
            )
            raise TokenizerError(
                f"{path}: added_tokens_decoder declares {token.content!r} as id {number}, but {where}; copy both files from the same model"
            )
    texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([text for text in _extra(config) if text not in texts and backend.token_to_id(text) is not None])


def _entry(key: Any, value: Any, path: Path) -> tuple[int, tokenizers.AddedToken]:
    content = value.get("content") if isinstance(value, Mapping) else None
    number = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10 else -1
    if number < 0 or not isinstance(content, str) or not content:
        raise TokenizerError(f"{path}: added_tokens_decoder holds {str(key)[:40]!r}: {str(value)[:80]}; expected an id and its token")
    flags = {flag: value[flag] is True for flag in _FLAGS if flag in value}
    try:
        return number, tokenizers.AddedToken(content, **flags)
    except (TypeError, ValueError, UnicodeEncodeError) as error:
        raise TokenizerError(f"{path}: added_tokens_decoder holds {content[:40]!r}, which cannot be a token ({error})") from error


def _extra(config: Mapping[str, Any]) -> list[str]:
    """The texts of `extra_special_tokens` (a list, or an object by role) and of `additional_special_tokens`, its older name."""
    found: list[str] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value = config.get(key)
        entries = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
        for entry in entries:
            text = entry.get("content") if isinstance(entry, Mapping) else entry
            if isinstance(text, str) and text and text.isprintable():
                found.append(text)
    return list(dict.fromkeys(found))
