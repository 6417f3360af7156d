"""The JSON files of a tokenizer, with their limits checked. Knows nothing of what their fields mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exl2nb.core.errors import TokenizerError
from exl2nb.core.files import placeholder, read_regular

LIMIT_BYTES = 256 << 20  # a tokenizer.json of 250 000 tokens has 30 MB


def read_text(path: Path, limit_bytes: int = LIMIT_BYTES) -> str:
    """The file as UTF-8 text.

    Raises:
        TokenizerError: not a regular file, not readable, not UTF-8, too large, or what a failed download leaves in its place.
    """
    try:
        raw = read_regular(path, limit_bytes)
        if len(raw) > limit_bytes:
            raise TokenizerError(f"{path}: more than {limit_bytes} bytes; expected at most as many: this is no tokenizer file")
        if (raw or path.suffix != ".jinja") and (found := placeholder(raw)) is not None:  # a template may be empty
            raise TokenizerError(f"{path}: found {found}")
        return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")  # as text mode reads it
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read as UTF-8 text ({error}); download the file again") from error


def read_object(path: Path) -> dict[str, Any]:
    """The file as a JSON object; an empty one where the file is missing.

    Raises:
        TokenizerError: the file is there and is something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value
