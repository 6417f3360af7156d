"""Rows of tokens from a text: input of an evaluation. Knows nothing of models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError
from exl2nb.core.files import placeholder

if TYPE_CHECKING:
    from exl2nb.tokenizer.tokenizer import Tokenizer


def read_text(path: str | Path) -> str:
    """Text of a UTF-8 file.

    Raises:
        OptionError: the file is missing, unreadable, empty or not UTF-8.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"text file {path}: byte {error.start} is not UTF-8; expected plain UTF-8 text; convert the file first"
        ) from error
    except OSError as error:
        raise OptionError(f"text file {path}: {error.strerror}; expected a readable UTF-8 text file; check the path") from error
    if (found := placeholder(text[:512].encode())) is not None and found.startswith("a Git LFS"):  # a web page is a text, too
        raise OptionError(f"text file {path}: found {found}")
    if not text.strip():
        raise OptionError(f"text file {path}: found no text; expected plain UTF-8 text; give another file")
    return text


def token_rows(encoder: Tokenizer, text: str, *, rows: int, length: int, where: str = "text") -> Tensor:
    """Cut the encoding of the whole text into rows: consecutive, not overlapping, from the start.

    The tokenizer's own BOS, where it adds one, is at the front of the first row only.

    Args:
        where: what the text is called in messages.

    Returns:
        int32 `(rows, length)`.

    Raises:
        OptionError: rows or length out of range, or the text has too few tokens for them.
    """
    for name, value, low in (("rows", rows, 1), ("length", length, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise OptionError(f"{where}: {name} is {value!r}; expected a whole number of at least {low}")
    # A tokenizer may merge far: encode more characters than needed before giving up, but not a whole library for a few rows.
    ids: list[int] = []
    budget = rows * length * 16
    while True:
        ids = encoder.encode(text[:budget])
        if budget >= len(text) or len(ids) >= rows * length + 64:
            break
        budget *= 4
    if len(ids) < rows * length:
        fit, longest = len(ids) // length, len(ids) // rows
        hint = f"use at most {fit} rows of {length} or " if fit else f"use rows of at most {longest} tokens or " if longest > 1 else ""
        raise OptionError(f"{where}: {rows} rows of {length} need {rows * length} tokens, found {len(ids)}; {hint}give more text")
    return torch.tensor(ids[: rows * length], dtype=torch.int32).view(rows, length)
