"""Calibration rows: tokens from a text, spread over all of it. Knows nothing of models beyond the tokenizer it is given."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from exl2nb.converter import sources
from exl2nb.converter.sources import Render
from exl2nb.core.errors import CalibrationWarning, OptionError

Source = str | os.PathLike[str] | Sequence[Any] | None
DEFAULT_NAME = "(default)"
SELF = "self"  # text that the model writes (self_text)
SENSITIVITY = 0.15  # of the calibration rows; the others are for Hessians
MAX_UNKNOWN = 0.25
MAX_PARTS = 0.35  # demo model: English 0.00, Finnish 0.09, source code 0.00, Russian, of which its vocabulary knows nothing, 0.90
_CHARS_PER_TOKEN = 8  # more text per row than any tokenizer needs for prose; rows that still come out short fall back to the whole text


@dataclass(frozen=True)
class Rows:
    """Token rows, int32 `(n, S)` each, from different places of one text, so that nothing is judged by what it was made from.

    hessians: what rounding looks at. sensitivity: what the price of an error, and so the allocation, is taken from; empty where there is a
    single row, which then serves for both. report: kept out of everything but the report. name: of the text.
    """

    hessians: Tensor
    sensitivity: Tensor
    report: Tensor
    name: str

    @classmethod
    def of(cls, ids: Tensor, report: Tensor, name: str) -> Rows:
        """Divide calibration rows: SENSITIVITY of them, spread over all, are for sensitivity."""
        judging = min(len(ids) - 1, max(1, round(SENSITIVITY * len(ids))))
        return cls(*part(ids, judging), report, name)

    @property
    def used(self) -> int:
        """How many rows are for Hessians."""
        return len(self.hessians)

    @property
    def calibrating(self) -> Tensor:
        """The rows for Hessians, then those for sensitivity."""
        return torch.cat([self.hessians, self.sensitivity])

    def facts(self) -> dict[str, Any]:
        """What files and reports say of them."""
        count, length = self.calibrating.shape
        return {"rows": count, "length": length, "dataset": self.name}

    def split(self) -> dict[str, int]:
        """How many rows serve for what."""
        return {"hessians": self.used, "sensitivity": len(self.sensitivity), "report": len(self.report)}


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
    """See whether a text is in a language of the tokenizer.

    Raises:
        OptionError: much of it is unknown. A tokenizer that falls back on bytes knows everything; where much of the text comes out as parts
            of characters that its vocabulary lacks, a CalibrationWarning says so.
    """
    special = getattr(encoder, "special_tokens", {})
    unknown = encoder.encode(special["unk_token"], add_special=False) if "unk_token" in special else []
    share = float((ids == unknown[0]).float().mean()) if len(unknown) == 1 else 0.0
    if share > MAX_UNKNOWN:
        raise OptionError(
            f"calibration {name}: {100 * share:.0f} % of its tokens are unknown to the model's tokenizer, expected at most "
            f"{100 * MAX_UNKNOWN:.0f} %; give text in a language of the model"
        )
    share = float(torch.isin(ids, torch.tensor(_parts(encoder), dtype=ids.dtype)).float().mean())
    if share > MAX_PARTS:
        warnings.warn(
            f"calibration {name}: {100 * share:.0f} % of its tokens are parts of characters that the model's vocabulary lacks, expected at "
            f"most {100 * MAX_PARTS:.0f} %; is it in a language of the model?",
            CalibrationWarning,
            stacklevel=2,
        )


def _parts(encoder: Encoder) -> list[int]:
    """Tokens that stand for bytes, or for some bytes of a character."""
    table: dict[int, bytes] | None = getattr(encoder, "byte_table", None)
    if table is None:
        return sorted(getattr(encoder, "byte_ids", ()))
    return [token for token, text in table.items() if not _is_text(text)]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


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
