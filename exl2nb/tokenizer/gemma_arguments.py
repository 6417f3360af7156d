"""Arguments of calls as Gemma 4 writes them: `key:<|"|>text<|"|>,count:3,list:[1,2]`, without the outer braces."""

from __future__ import annotations

import json
import re
from typing import Any

QUOTE_TOKEN = '<|"|>'
MAX_DEPTH = 100
_LITERAL_PATTERN = re.compile(r"[^,\[\]{}:<]+")
_KEY_PATTERN = re.compile(r"\s*([^:{}\[\],]+?)\s*:")


def written(arguments: dict[str, Any]) -> str:
    """The text of arguments. Keys are sorted, as the template of the model sorts them."""
    return ",".join(f"{key}:{_value(arguments[key])}" for key in sorted(arguments))


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE_TOKEN}{value}{QUOTE_TOKEN}"
    if isinstance(value, dict):
        return "{" + written(value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_value, value)) + "]"
    return json.dumps(value)


def read(text: str) -> tuple[dict[str, Any], int] | None:
    """Read arguments up to the brace that closes them.

    Args:
        text: What stands behind the opening brace.

    Returns:
        The arguments, and how many characters they take including the closing brace; None where the text is incomplete or malformed.
    """
    try:
        value, end = _read_object(text, 0, 0)
    except (IndexError, ValueError):
        return None
    return value, end


def _read_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    found: dict[str, Any] = {}
    at = _skip(text, at)
    while text[at] != "}":
        match = _KEY_PATTERN.match(text, at)
        if match is None:
            raise ValueError("no key")
        found[match[1].removeprefix(QUOTE_TOKEN).removesuffix(QUOTE_TOKEN)], at = _read_value(text, match.end(), depth)
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found, at + 1


def _read_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    at = _skip(text, at)
    if text.startswith(QUOTE_TOKEN, at):
        end = text.index(QUOTE_TOKEN, at + len(QUOTE_TOKEN))
        return text[at + len(QUOTE_TOKEN) : end], end + len(QUOTE_TOKEN)
    if text[at] == "{":
        return _read_object(text, at + 1, depth + 1)
    if text[at] == "[":
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        items: list[Any] = []
        at = _skip(text, at + 1)
        while text[at] != "]":
            item, at = _read_value(text, at, depth + 1)
            items.append(item)
            at = _skip(text, at)
            if text[at] == ",":
                at = _skip(text, at + 1)
        return items, at + 1
    match = _LITERAL_PATTERN.match(text, at)
    if match is None or match.end() == len(text):  # at the end of the text a literal may go on
        raise ValueError("no value")
    raw = match[0].strip()
    try:
        return json.loads(raw), match.end()
    except ValueError:
        return raw, match.end()


def _skip(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at
