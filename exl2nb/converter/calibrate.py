"""Calibration rows: tokens from a text, spread over all of it. Knows nothing of models beyond the tokenizer it is given."""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from exl2nb.core.errors import OptionError

Source = str | os.PathLike[str] | Sequence[str] | None
DEFAULT_NAME = "(default)"
_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
_CHARS_PER_TOKEN = 8  # more text per row than any tokenizer needs for prose; rows that still come out short fall back to the whole text


class Encoder(Protocol):
    """The part of `tokenizer.Tokenizer` that is needed here."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text."""
        ...


def read_calibration(source: Source) -> tuple[str, str]:
    """Text and name of a calibration source.

    Args:
        source: a text file (`.txt`, or compressed `.xz`, `.gz`), a list of strings, or None for the text shipped with the package.

    Raises:
        OptionError: the file is missing, unreadable, not UTF-8 text, or there is no text in it.
    """
    if source is None:
        return _read(Path(__file__).parent.parent / "demo_model" / "calibration.txt"), DEFAULT_NAME
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        return _read(path), path.name
    if not all(isinstance(part, str) for part in source):
        raise OptionError("calibration: found something that is not a string in the list; expected a path or a list of strings")
    text = "\n".join(source)
    if not text.strip():
        raise OptionError("calibration: found no text; expected a path or a list of strings with text in them")
    return text, f"{len(source)} strings"


def calibration_rows(encoder: Encoder, text: str, *, rows: int, length: int, seed: int = 0) -> Tensor:
    """Rows of consecutive tokens from places spread over the whole text.

    The text is cut into `rows` equal spans and each gives one row from a random place in it; every fourth row begins with what the
    tokenizer puts in front of a text (BOS), as prompts do. A text too short for that is encoded once and cut into rows.

    Args:
        encoder: a tokenizer.
        text: any text.
        rows: number of rows.
        length: tokens per row.
        seed: chooses the places.

    Returns:
        int32 `(rows, length)`; the same for the same arguments.

    Raises:
        OptionError: the text has too few tokens; the message says how many rows fit.
    """
    generator = torch.Generator().manual_seed(seed)
    span, need = len(text) / rows, length * _CHARS_PER_TOKEN
    jitter = torch.rand(rows, generator=generator, dtype=torch.float64).tolist()
    if span >= need:
        picked = []
        for row, share in enumerate(jitter):
            start = int(row * span + share * (span - need))
            piece = text[start : start + need].partition(" ")[2]  # begin at a word
            picked.append(encoder.encode(piece, add_special=row % 4 == 0)[:length])
        if all(len(ids) == length for ids in picked):
            return torch.tensor(picked, dtype=torch.int32)
    ids = encoder.encode(text)
    count = len(ids) // length
    if count < rows:
        raise OptionError(
            f"calibration: {rows} rows of {length} tokens need {rows * length} tokens, found {len(ids)}; "
            f"use rows={max(count, 1)}, a shorter length, or give more text"
        )
    places = torch.randperm(count, generator=generator)[:rows].sort().values
    return torch.tensor(ids[: count * length], dtype=torch.int32).view(count, length)[places].contiguous()


def split_rows(encoder: Encoder, text: str, *, rows: int, extra: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Calibration rows, and rows for the report from other places of the same text, spread over it too.

    Returns:
        int32 `(rows, length)` and `(extra, length)`, no token in both; fewer extra rows, down to none, where the text is short.

    Raises:
        OptionError: the text has too few tokens for `rows`.
    """
    for more in dict.fromkeys((extra, min(extra, 2), 0)):
        try:
            found = calibration_rows(encoder, text, rows=rows + more, length=length, seed=seed)
        except OptionError:
            if more:
                continue
            raise
        picked = {int((i + 0.5) * len(found) / more) for i in range(more)}
        kept = [i for i in range(len(found)) if i not in picked]
        return found[kept].contiguous(), found[sorted(picked)].contiguous()
    raise AssertionError("unreachable: zero extra rows either work or raise")


def _read(path: Path) -> str:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise OptionError(
            f"calibration {path}: {error.strerror or error}; expected a text file (.txt, .xz, .gz); check the path"
        ) from error
    except (UnicodeDecodeError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise OptionError(f"calibration {path}: {str(error)[:120]}; expected UTF-8 text, plain or compressed as the name says") from error
    if not text.strip():
        raise OptionError(f"calibration {path}: found no text; expected a UTF-8 text file; give another one")
    return text
