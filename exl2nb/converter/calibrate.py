"""Calibration rows: tokens from a text, spread over all of it. Knows nothing of models beyond the tokenizer it is given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from exl2nb.converter import sources
from exl2nb.converter.sources import Render
from exl2nb.core.errors import OptionError

Source = str | os.PathLike[str] | Sequence[Any] | None
DEFAULT_NAME = "(default)"
SELF = "self"  # text that the model writes (self_text)
MAX_UNKNOWN = 0.25
_CHARS_PER_TOKEN = 8  # more text per row than any tokenizer needs for prose; rows that still come out short fall back to the whole text


class Encoder(Protocol):
    """The part of `tokenizer.Tokenizer` that is needed here."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text."""
        ...


def read_calibration(source: Source, render: Render | None = None) -> tuple[str, str]:
    """Text and name of a calibration source.

    Args:
        source: a file (`.txt`, `.jsonl`, `.json`, also as `.xz` or `.gz`; `.parquet`), "dataset:owner/name" on the hub, a list of
            strings, records or conversations, or None for the text shipped with the package.
        render: a conversation (list of messages) -> text, by the model's chat template.

    Raises:
        OptionError: the file is missing, unreadable, not UTF-8 text, or there is no text in it.
    """
    if source is None:
        return sources.read_path(Path(__file__).parent.parent / "demo_model" / "calibration.txt", None), DEFAULT_NAME
    if isinstance(source, str) and source.startswith(sources.HUB):
        return sources.read_hub(source.removeprefix(sources.HUB), render), source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        return sources.read_path(path, render), path.name
    return sources.read_list(source, render), f"{len(source)} strings"


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


def check_known(encoder: Encoder, ids: Tensor, name: str) -> None:
    """Raise OptionError where much of a text is unknown to the tokenizer: another language, or another tokenizer."""
    special = getattr(encoder, "special_tokens", {})
    unknown = encoder.encode(special["unk_token"], add_special=False) if "unk_token" in special else []
    share = float((ids == unknown[0]).float().mean()) if len(unknown) == 1 else 0.0
    if share > MAX_UNKNOWN:
        raise OptionError(
            f"calibration {name}: {100 * share:.0f} % of its tokens are unknown to the model's tokenizer, expected at most "
            f"{100 * MAX_UNKNOWN:.0f} %; give text in a language of the model"
        )


def part(found: Tensor, extra: int) -> tuple[Tensor, Tensor]:
    """Rows, and `extra` of them taken out, spread over all."""
    picked = {int((i + 0.5) * len(found) / extra) for i in range(extra)}
    kept = [i for i in range(len(found)) if i not in picked]
    return found[kept].contiguous(), found[sorted(picked)].contiguous()


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
        return part(found, more)
    raise AssertionError("unreachable: zero extra rows either work or raise")
