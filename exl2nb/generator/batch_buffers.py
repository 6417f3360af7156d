"""The tensors of a step, written into buffers that are allocated once. Knows neither sampling nor text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from exl2nb.generator.executor import DrawRequest, StepInput
from exl2nb.generator.scheduler import TokenSpan
from exl2nb.model.batch import Batch, PictureRows

MAX_SHAPES = 256  # batches kept; decoding comes back to the same few shapes
MAX_ROWS = 32  # tokens of a sequence in a step that is no prompt: its last one and its draft tokens


class BatchBuilder:
    """Makes a `StepInput` of spans.

    The tensors of a batch are views of this builder's buffers, so a step is good until the next `build`.

    Most steps are like the last one: the same sequences decode one token each, on the same pages. `build` then adds one to four rows of
    numbers (`_growing`) and writes nothing else. Tokens that only the device knows have id 0 and an entry in `_sources`: the row of the
    last launch's drawn tokens, or of a draft round's tokens.

    Args:
        max_tokens: in a step.
        max_sequences: in a step.
        max_pages: of a sequence.
        page_size: tokens per page.
        switches: batches say which sequences are long.
    """

    def __init__(self, *, max_tokens: int, max_sequences: int, max_pages: int, page_size: int, switches: bool = False) -> None:
        self._long = np.ones(max_sequences, np.int32) if switches else None
        self._page_size, self._max_pages = page_size, max_pages
        self._ids, self._rows, self._sources, self._adapters, self._moved = (np.zeros(max_tokens, np.int32) for _ in range(5))
        # of sequences that decode: where the page that is written begins in the text, its first slot; _offsets: how far into it they are
        self._firsts, self._page_slots = (np.zeros(max_sequences, np.int32) for _ in range(2))
        self._ones = (1,) * max_sequences
        self._growing = np.zeros((4, max(max_tokens, max_sequences)), np.int32)  # what is one more in every step of decoding
        self._positions, self._slots, self._offsets, self._lens = self._growing
        self._table = np.zeros(max_sequences * max_pages, np.int32)
        self._bounds = np.zeros(max_sequences + 1, np.int32)
        self._batches: dict[tuple[int, int, int, int, bool], Batch] = {}
        self._last: tuple[object, ...] = ()  # the sequences of the last step
        self._changes, self._width, self._decoding = -1, 0, False
        self._sources_stand = False  # `_sources` holds 0, 1, 2, ...: each token is what the last launch drew in the same row
        self._has_pictures = False  # a sequence of the last step has pictures
        self._adapted = False  # a sequence of the last step has an adapter
        self._row_of: dict[int, int] = {}  # a sequence of the last step -> its logit row

    def build(self, spans: Sequence[TokenSpan], changes: int) -> StepInput:
        """Write the spans side by side.

        Args:
            spans: at least one; together within the sizes given at construction.
            changes: a number that is another one whenever a sequence's list of pages has changed.
        """
        sequences, starts, lengths, wanted, in_flight = zip(*spans)
        count, all_in_flight = len(spans), False not in in_flight
        ones = self._ones[:count]
        same_table = changes == self._changes and sequences == self._last
        if not same_table:
            self._has_pictures = any([sequence.pictures is not None for sequence in sequences])
        decoding, has_pictures = lengths == ones == wanted, self._has_pictures
        if has_pictures and decoding:  # the last token of a prompt may be a picture's
            decoding = all([start >= sequence.pictured for sequence, start in zip(sequences, starts)])
        same, drafts = same_table and decoding and self._decoding, None
        if self._long is not None:
            self._long[:count] = [sequence.long for sequence in sequences]
        if not same_table:
            self._width = self._write_table(sequences)
        if decoding:
            tokens = rows = count
            self._write_decodes(sequences, starts, in_flight, moved=not same)
        else:
            tokens, rows = self._write(spans)
            drafts = self._write_draft_sources(spans, tokens)
        if True in in_flight and not (same and self._sources_stand and all_in_flight):
            self._write_sources(spans, tokens)
        draws: list[DrawRequest | None] = []
        for sequence, _, _, wants, _ in spans:
            if sequence.drawn:
                sampler = sequence.sampler
                number = sampler.count + sequence.in_flight
                for i in range(number, number + wants):
                    draws.append(_draw(DrawRequest, (sampler, i, sequence.top)))
            else:
                draws += (None,) * wants
        if not same:
            self._adapted = any([sequence.adapter >= 0 for sequence in sequences])
            if self._adapted:
                self._adapters[:tokens] = [sequence.adapter for sequence, length in zip(sequences, lengths) for _ in range(length)]
            self._row_of, row = {}, 0
            for span in spans:
                if span.rows:
                    self._row_of[id(span.sequence)] = row
                    row += span.rows
        self._last, self._changes, self._decoding = sequences, changes, decoding
        self._sources_stand = same and all_in_flight
        key = (tokens, count, self._width, rows, self._adapted)
        batch = self._batches.get(key) or self._new_batch(*key)
        if has_pictures:
            batch = self._with_pictures(batch, spans)
        sources = self._sources[:tokens] if drafts is not None or True in in_flight else None
        return StepInput(batch, sources, draws, same and drafts is None, drafts)

    def _with_pictures(self, batch: Batch, spans: Sequence[TokenSpan]) -> Batch:
        """The batch with positions and rows of sequences that have pictures."""
        at, parts, moved = 0, [], None
        for sequence, start, length, _, _ in spans:
            pictures = sequence.pictures
            if pictures is not None:
                if pictures.axes is not None:
                    moved = self._moved[: len(batch.positions)] if moved is None else moved
                    moved[at : at + length] = pictures.positions(start, length)
                if start < pictures.end and (part := pictures.within(start, length, at)) is not None:
                    parts.append(part)
            at += length
        if moved is not None:
            at = 0
            for sequence, _, length, _, _ in spans:
                if sequence.pictures is None or sequence.pictures.axes is None:
                    moved[at : at + length] = self._positions[at : at + length]
                at += length
        positions = batch.positions if moved is None else torch.from_numpy(moved)
        return replace(batch, positions=positions, pictures=PictureRows.joined(parts))

    def forget(self) -> None:
        """The step that was built last was not launched."""
        self._last, self._decoding, self._changes, self._sources_stand = (), False, -1, False

    def _write_decodes(self, sequences: Sequence[Any], starts: Sequence[int], in_flight: Sequence[bool], *, moved: bool) -> None:
        """`_write` where each sequence has one token, which wants logits. moved: other sequences, or other pages, than in the last step."""
        count, size = len(sequences), self._page_size
        if not moved and False not in in_flight:  # every sequence goes on by one token
            growing = self._growing[:, :count]
            growing += 1
            if np.maximum.reduce(self._offsets[:count]) < size:
                if not self._sources_stand:
                    self._ids[:count] = 0
                return
        if False in in_flight:
            tokens: list[int] = []
            for sequence, start, unknown in zip(sequences, starts, in_flight):
                tokens.append(0 if unknown else sequence.ids[start])
            self._ids[:count] = tokens
        else:
            self._ids[:count] = 0
        positions, offsets = self._positions[:count], self._offsets[:count]
        positions[:] = starts
        np.subtract(positions, self._firsts[:count], out=offsets)
        if moved or np.maximum.reduce(offsets.view(np.uint32)) >= size:  # another page than before, for some of them
            self._firsts[:count] = [start - start % size for start in starts]
            self._page_slots[:count] = [sequence.pages[start // size] * size for sequence, start in zip(sequences, starts)]
            np.subtract(positions, self._firsts[:count], out=offsets)
        np.add(offsets, self._page_slots[:count], out=self._slots[:count])
        if not self._decoding or count != len(self._last):
            self._bounds[: count + 1] = range(count + 1)
            self._rows[:count] = range(count)
        np.add(positions, 1, out=self._lens[:count])

    def _write_sources(self, spans: Sequence[TokenSpan], tokens: int) -> None:
        """Write for each token in flight the logit row of the last launch that drew it, and -1 for the others."""
        self._sources[:tokens] = -1
        at = 0
        for span in spans:
            if span.in_flight:
                self._sources[at], self._ids[at] = self._row_of[id(span.sequence)], 0
            at += span.length

    def _write_draft_sources(self, spans: Sequence[TokenSpan], tokens: int) -> torch.Tensor | None:
        """Write for each draft token on the device, and the token before it, the index into its round's tokens.

        Returns:
            The tokens of the round, int32 on the device. None: no draft token is there.
        """
        found, end = None, 0
        for sequence, _, length, _, _ in spans:
            end += length
            if sequence.device_drafts is not None:
                if found is None:
                    self._sources[:tokens] = -1
                launched, row = sequence.device_drafts.round, sequence.device_drafts.row
                found, rows = launched.ids, launched.rows
                self._sources[end - sequence.rows : end] = range(row, row + rows * sequence.rows, rows)
        return found

    def _write(self, spans: Sequence[TokenSpan]) -> tuple[int, int]:
        at = rows = 0
        size = self._page_size
        for b, (sequence, start, count, wanted, in_flight) in enumerate(spans):
            positions = np.arange(start, start + count, dtype=np.int32)
            self._ids[at : at + count] = 0 if in_flight else sequence.ids[start : start + count]
            self._positions[at : at + count] = positions
            pages = np.asarray(sequence.pages, np.int32)
            self._slots[at : at + count] = pages[positions // size] * size + positions % size
            at += count
            self._bounds[b + 1] = at
            self._lens[b] = start + count
            self._rows[rows : rows + wanted] = range(at - wanted, at)
            rows += wanted
        return at, rows

    def _write_table(self, sequences: Sequence[Any]) -> int:
        pages = [sequence.pages for sequence in sequences]
        width = min(max(map(len, pages)), self._max_pages)
        table = self._table[: len(pages) * width].reshape(len(pages), width)
        table[:] = 0
        for row, ids in zip(table, pages):
            row[: len(ids)] = ids[:width]
        return width

    def _new_batch(self, tokens: int, sequences: int, width: int, rows: int, adapted: bool) -> Batch:
        if len(self._batches) >= MAX_SHAPES:
            self._batches.clear()
        view = torch.from_numpy
        batch = self._batches[tokens, sequences, width, rows, adapted] = Batch(
            input_ids=view(self._ids[:tokens]),
            positions=view(self._positions[:tokens]),
            slot_mapping=view(self._slots[:tokens]),
            block_table=view(self._table[: sequences * width].reshape(sequences, width)),
            cu_seqlens=view(self._bounds[: sequences + 1]),
            context_lens=view(self._lens[:sequences]),
            logit_rows=view(self._rows[:rows]),
            long=None if self._long is None else view(self._long[:sequences]),
            adapters=view(self._adapters[:tokens]) if adapted else None,
        )
        return batch


_draw = tuple.__new__  # half the time of `DrawRequest(...)`
