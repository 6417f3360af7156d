"""The tensors of a step, written into buffers that are allocated once. Knows neither sampling nor text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from exl2nb.generator.scheduler import Span
from exl2nb.model.batch import Batch

MAX_SHAPES = 256  # batches kept; decoding comes back to the same few shapes


class BatchBuilder:
    """Makes a `Batch` of spans.

    The tensors of a batch are views of this builder's buffers, so a batch is good until the next `build`.

    Args:
        max_tokens: in a step. max_sequences: in a step. max_pages: of a sequence. page_size: tokens per page. device: of the model.
    """

    def __init__(self, *, max_tokens: int, max_sequences: int, max_pages: int, page_size: int, device: str = "cpu") -> None:
        self._page_size, self._device = page_size, device
        self._ids, self._positions, self._slots = (np.zeros(max_tokens, np.int32) for _ in range(3))
        self._table = np.zeros(max_sequences * max_pages, np.int32)
        self._bounds = np.zeros(max_sequences + 1, np.int32)
        self._lens, self._rows = np.zeros(max_sequences, np.int32), np.zeros(max_sequences, np.int32)
        self._batches: dict[tuple[int, int, int, int], Batch] = {}
        self._table_of: list[list[int]] = []

    def build(self, spans: Sequence[Span]) -> Batch:
        """Write the spans side by side. At least one; together within the sizes given at construction."""
        at = rows = 0
        size = self._page_size
        for b, (sequence, start, count, last) in enumerate(spans):
            if count == 1:
                self._ids[at] = sequence.ids[start]
                self._positions[at] = start
                self._slots[at] = sequence.pages[start // size] * size + start % size
            else:
                positions = np.arange(start, start + count, dtype=np.int32)
                self._ids[at : at + count] = sequence.ids[start : start + count]
                self._positions[at : at + count] = positions
                pages = np.asarray(sequence.pages, np.int32)
                self._slots[at : at + count] = pages[positions // size] * size + positions % size
            at += count
            self._bounds[b + 1] = at
            self._lens[b] = start + count
            if last:
                self._rows[rows] = at - 1
                rows += 1
        return self._batch(at, len(spans), self._write_table(spans), rows)

    def _write_table(self, spans: Sequence[Span]) -> int:
        """Fill the block table unless it stands there from the last step; returns its width."""
        pages = [span.sequence.pages for span in spans]
        width = max(map(len, pages))
        if len(pages) != len(self._table_of) or any(a is not b for a, b in zip(pages, self._table_of)):
            table = self._table[: len(pages) * width].reshape(len(pages), width)
            table[:] = 0
            for row, ids in zip(table, pages):
                row[: len(ids)] = ids
            self._table_of = pages
        return width

    def _batch(self, tokens: int, sequences: int, width: int, rows: int) -> Batch:
        key = (tokens, sequences, width, rows)
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= MAX_SHAPES:
                self._batches.clear()
            batch = self._batches[key] = Batch(
                input_ids=self._view(self._ids[:tokens]),
                positions=self._view(self._positions[:tokens]),
                slot_mapping=self._view(self._slots[:tokens]),
                block_table=self._view(self._table[: sequences * width].reshape(sequences, width)),
                cu_seqlens=self._view(self._bounds[: sequences + 1]),
                context_lens=self._view(self._lens[:sequences]),
                logit_rows=self._view(self._rows[:rows]),
            )
        return batch

    def _view(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)
