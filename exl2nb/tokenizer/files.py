"""The JSON files of a tokenizer, with their limits checked. Knows nothing of what their fields mean."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from exl2nb.core.errors import TokenizerError

LIMIT_BYTES = 256 << 20  # a tokenizer.json of 250 000 tokens has 30 MB


def read_text(path: Path, limit_bytes: int = LIMIT_BYTES) -> str:
    """The file as UTF-8 text.

    Raises:
        TokenizerError: not a regular file, not readable, not UTF-8 or too large.
    """
    try:
        # non-blocking: opening a pipe by this name must not wait for its writer
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise TokenizerError(f"{path}: found a directory, pipe or device; expected a regular file")
            raw = file.read(limit_bytes + 1)
        if len(raw) > limit_bytes:
            raise TokenizerError(f"{path}: more than {limit_bytes} bytes; expected at most as many: this is no tokenizer file")
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
