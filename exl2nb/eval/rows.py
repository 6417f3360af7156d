"""Rows of tokens from a text, and their logits in order, a bounded piece at a time.

Logits are computed on an FP32 cache by default, since other logits are compared with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.core.files import placeholder
from exl2nb.core.progress import Meter, Sink
from exl2nb.model.batch import Batch
from exl2nb.model.model import Model

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


PIECE_BYTES = 64 << 20  # logits of one piece; 4096 tokens of a vocabulary of 4096, 128 of one of 128k


def check_ids(model: Model, ids: Tensor) -> Tensor:
    """Return `ids` as int32 `(rows, T)`.

    Raises:
        OptionError: not whole numbers, not two-dimensional, empty, or an id outside the vocabulary.
        ContextOverflow: rows longer than the model's context.
    """
    if ids.dtype not in (torch.int32, torch.int64, torch.int16, torch.uint8) or ids.dim() != 2 or not ids.numel():
        raise OptionError(f"input_ids: found {ids.dtype} {tuple(ids.shape)}; expected int32 or int64 (rows, tokens), both at least 1")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= model.config.vocab_size:
        wrong = low if low < 0 else high
        raise OptionError(
            f"input_ids: found id {wrong}; expected 0..{model.config.vocab_size - 1}; encode the text with this model's tokenizer"
        )
    if ids.shape[1] > model.context:
        raise ContextOverflow(f"rows of {ids.shape[1]} tokens; the model's context is {model.context}; use rows of at most that length")
    return ids.to(torch.int32)


class RowRunner:
    """Runs one model over rows of one length, every row from an empty context, reusing one cache of mode `cache`.

    adapter: row of `Model.adapters` that they run with, -1 for none.
    """

    def __init__(self, model: Model, length: int, cache: str = "fp32", *, adapter: int = -1) -> None:
        spec = model.cache_spec(length, mode=cache)
        self._model, self._cache = model, model.new_cache(spec)
        self._pages, self._adapter = list(range(spec.num_pages)), adapter
        self.piece = max(16, PIECE_BYTES // (4 * model.config.vocab_size))

    def pieces(self, row: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, logits f32 `(n, V)`) covering `row` int32 `(T,)`; n is at most `piece`."""
        for start in range(0, len(row), self.piece):
            ids = row[start : start + self.piece]
            long = self._model.rope_switch is None or len(row) > self._model.rope_switch
            batch = Batch.single(ids.tolist(), start=start, pages=self._pages, logit_rows="all", long=long, adapter=self._adapter)
            yield start, self._model.forward(batch, self._cache)


def logit_rows(model: Model, ids: Tensor, progress: Sink | None = None, *, cache: str = "fp32") -> Iterator[Tensor]:
    """`logits` as an iterator: one f32 `(T, V)` per row."""
    ids = check_ids(model, ids)
    runner = RowRunner(model, ids.shape[1], cache)
    with Meter("logits", total=len(ids), unit="rows", sink=progress) as meter:
        for row in ids:
            yield torch.cat([piece for _, piece in runner.pieces(row)])
            meter.step()


def logits(model: Model, ids: Tensor, progress: Sink | None = None, *, cache: str = "fp32") -> Tensor:
    """Logits of every position.

    Args:
        ids: int32 or int64 `(rows, T)`.
        cache: mode of the KV cache. What it costs shows in these logits as in generation, for every token reads what was stored.

    Returns:
        float32 `(rows, T, V)`, all in memory: for many rows use `logit_rows`.

    Raises:
        OptionError, ContextOverflow: see `check_ids`.
    """
    return torch.stack(list(logit_rows(model, ids, progress, cache=cache)))
