"""What one forward step reads: plain int32 tensors, one row of `block_table` per sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from exl2nb.cache.spec import PAGE_SIZE

LOGIT_ROWS = ("all", "last", "none")
batch_tensors: Callable[[Batch], tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]] = attrgetter(
    "input_ids", "positions", "slot_mapping", "block_table", "cu_seqlens", "context_lens", "logit_rows"
)
"""The tensors of a batch, in the order in which every op takes them."""


@dataclass(frozen=True, eq=False)
class PictureRows:
    """Rows of a step that are pictures'.

    rows: int64 `(n,)` on the host, rising. values: f32 `(n, H)`, in place of the embedding's rows. deep: f32 `(n, H)` each, added to the
    stream after layer 0, 1, ... axes: int64 `(n, 3)` on the host, positions in time, height and width; None where the model has one
    position per token. blocks: (first row, last + 1) of runs that see each other whole; a sequence's later tokens begin with none of them.
    """

    rows: Tensor
    values: Tensor
    deep: tuple[Tensor, ...] = ()
    axes: Tensor | None = None
    blocks: tuple[tuple[int, int], ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[PictureRows]) -> PictureRows | None:
        """Those of several sequences in order; None of none."""
        if len(parts) <= 1:
            return parts[0] if parts else None
        axes = [part.axes for part in parts if part.axes is not None]
        return cls(
            rows=torch.cat([part.rows for part in parts]),
            values=torch.cat([part.values for part in parts]),
            deep=tuple(torch.cat(some) for some in zip(*(part.deep for part in parts))),
            axes=torch.cat(axes) if axes else None,
            blocks=tuple(block for part in parts for block in part.blocks),
        )

    def select(self, place: Tensor) -> PictureRows | None:
        """Those of some tokens. place: int64 `(T,)`, a token's new row, or -1."""
        there = place[self.rows] >= 0
        if not there.any():
            return None
        on_device = there.to(self.values.device)
        moved = [(int(place[a]), b - a) for a, b in self.blocks if place[a] >= 0]
        return PictureRows(
            rows=place[self.rows[there]].long(),
            values=self.values[on_device],
            deep=tuple(part[on_device] for part in self.deep),
            axes=None if self.axes is None else self.axes[there],
            blocks=tuple((a, a + length) for a, length in moved),
        )


@dataclass(frozen=True, kw_only=True)
class SequenceSlice:
    """The tokens one sequence adds in this step: `ids` at positions start, start + 1, ...; `pages` are all pages of the sequence so far.

    logit_rows: "all", "last" or "none" of these tokens want logits. long: the sequence is, or will be, longer than `Model.rope_switch`; the
    same in every step of a sequence, since what is in the cache was rotated accordingly. adapter: row of `Model.adapters`, -1 for none.
    """

    ids: Sequence[int]
    start: int
    pages: Sequence[int]
    logit_rows: str = "last"
    long: bool = True
    adapter: int = -1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One ragged step of B sequences and T tokens; all tensors int32 on the host (a model on a GPU copies them).

    input_ids, positions, slot_mapping: `(T,)`; slot = page * page_size + offset is where a token's K and V go. block_table:
    `(B, max_pages)`, short rows padded with 0. cu_seqlens: `(B + 1,)` prefix sums of tokens. context_lens: `(B,)` tokens attention reads,
    this step's included. logit_rows: `(R,)` rows of the step that want logits. long: `(B,)`, 1 for sequences beyond `Model.rope_switch`;
    None: all are. adapters: `(T,)`, each token's row of `Model.adapters`, -1 for none; None: no token has one. pictures: the rows that are
    pictures'; None: no row is.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    logit_rows: Tensor
    long: Tensor | None = None
    adapters: Tensor | None = None
    pictures: PictureRows | None = None

    def __post_init__(self) -> None:
        num_tokens, num_sequences = self.input_ids.shape[0], self.context_lens.shape[0]
        assert self.positions.shape == self.slot_mapping.shape == (num_tokens,), "one position and slot per token"
        assert self.block_table.shape[:-1] == (num_sequences,), "one row of pages per sequence"
        assert self.cu_seqlens.shape == (num_sequences + 1,), "cu_seqlens has one entry more than sequences"
        assert self.long is None or self.long.shape == (num_sequences,), "one flag per sequence"
        assert self.adapters is None or self.adapters.shape == (num_tokens,), "one adapter per token"
        tensors = [getattr(self, name) for name in self.__dataclass_fields__ if name != "pictures"]
        assert all(tensor.dtype == torch.int32 for tensor in tensors if tensor is not None), "a batch is int32"

    def blocks(self) -> list[tuple[int, int, int, int]]:
        """Runs of rows that see each other whole: first row, last + 1, number of the sequence, position after the run."""
        if self.pictures is None or not self.pictures.blocks:
            return []
        bounds, lens, found = self.cu_seqlens.tolist(), self.context_lens.tolist(), []
        for first, last in self.pictures.blocks:
            sequence = next(b for b in range(len(lens)) if first < bounds[b + 1])
            found.append((first, last, sequence, lens[sequence] - (bounds[sequence + 1] - last)))
        return found

    def select(self, sequences: Sequence[int]) -> tuple[Batch, Tensor, Tensor]:
        """Some of the sequences as a batch, int64 `(T,)` which of the tokens they are, and int64 `(R,)` which of the logit rows."""
        bounds = self.cu_seqlens.tolist()
        tokens = torch.cat([torch.arange(bounds[row], bounds[row + 1]) for row in sequences])
        place = torch.full((bounds[-1],), -1, dtype=torch.int32)
        place[tokens] = torch.arange(len(tokens), dtype=torch.int32)
        there = place[self.logit_rows.long()]
        lengths = torch.tensor([0, *(bounds[row + 1] - bounds[row] for row in sequences)])
        chosen = torch.tensor(sequences)
        batch = Batch(
            input_ids=self.input_ids[tokens], positions=self.positions[tokens], slot_mapping=self.slot_mapping[tokens],
            block_table=self.block_table[chosen], cu_seqlens=lengths.cumsum(0).int(), context_lens=self.context_lens[chosen],
            logit_rows=there[there >= 0], long=None if self.long is None else self.long[chosen],
            adapters=None if self.adapters is None else self.adapters[tokens],
            pictures=None if self.pictures is None else self.pictures.select(place.long()),
        )  # fmt: skip
        return batch, tokens, (there >= 0).nonzero()[:, 0]

    def cut(self, first: int, end: int) -> tuple[Batch, Tensor]:
        """The tokens [first, end) as a batch without pictures, and int64 `(R,)` which of the logit rows are in it."""
        assert self.pictures is None, "runs of pictures are not cut"
        inside = self.cu_seqlens.clamp(first, end)  # a sequence that ends behind `end` is not so long yet
        there = (inside[1:] > inside[:-1]).nonzero()[:, 0]
        rows = ((self.logit_rows >= first) & (self.logit_rows < end)).nonzero()[:, 0]
        batch = Batch(
            input_ids=self.input_ids[first:end], positions=self.positions[first:end], slot_mapping=self.slot_mapping[first:end],
            block_table=self.block_table[there], cu_seqlens=torch.cat((inside[there], inside[there[-1:] + 1])) - first,
            context_lens=(self.context_lens - (self.cu_seqlens[1:] - inside[1:]))[there], logit_rows=self.logit_rows[rows] - first,
            long=None if self.long is None else self.long[there], adapters=None if self.adapters is None else self.adapters[first:end],
        )  # fmt: skip
        return batch, rows

    @classmethod
    def build(cls, spans: Sequence[SequenceSlice], *, page_size: int = PAGE_SIZE, device: str = "cpu") -> Batch:
        """Put the spans of several sequences side by side.

        Args:
            spans: at least one; each with at least one token and pages for all its tokens.
        """
        assert spans, "a batch holds at least one sequence"
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        bounds = [0]
        width = max(len(span.pages) for span in spans)
        for span in spans:
            end = span.start + len(span.ids)
            assert end > span.start >= 0, "a span has tokens"
            assert end <= len(span.pages) * page_size, f"{end} tokens do not fit {len(span.pages)} pages"
            assert span.logit_rows in LOGIT_ROWS, span.logit_rows
            ids += span.ids
            positions += range(span.start, end)
            slots += [span.pages[p // page_size] * page_size + p % page_size for p in range(span.start, end)]
            bounds.append(len(ids))
            first = {"all": bounds[-2], "last": bounds[-1] - 1, "none": bounds[-1]}[span.logit_rows]
            rows += range(first, bounds[-1])

        tables = [page for span in spans for page in (*span.pages, *[0] * (width - len(span.pages)))]
        lens = [span.start + len(span.ids) for span in spans]
        parts = (ids, positions, slots, tables, bounds, lens, rows)
        # one tensor, cut into views: seven small ones would cost a decode step more than its sampling does
        flat = torch.tensor([value for part in parts for value in part], dtype=torch.int32, device=device)
        cut = flat.split([len(part) for part in parts])
        flags = [int(span.long) for span in spans]
        adapters = [span.adapter for span in spans for _ in span.ids] if any(span.adapter >= 0 for span in spans) else None
        return cls(
            input_ids=cut[0],
            positions=cut[1],
            slot_mapping=cut[2],
            block_table=cut[3].view(len(spans), width),
            cu_seqlens=cut[4],
            context_lens=cut[5],
            logit_rows=cut[6],
            long=None if all(flags) else torch.tensor(flags, dtype=torch.int32, device=device),
            adapters=None if adapters is None else torch.tensor(adapters, dtype=torch.int32, device=device),
        )

    @classmethod
    def single(
        cls,
        ids: Sequence[int],
        *,
        start: int,
        pages: Sequence[int],
        logit_rows: str = "last",
        page_size: int = PAGE_SIZE,
        device: str = "cpu",
        long: bool = True,
        adapter: int = -1,
    ) -> Batch:
        """One sequence: `ids` from position `start` on, its K and V in `pages`; logits for "all" or the "last"; the rest: see
        `SequenceSlice`.
        """
        span = SequenceSlice(ids=ids, start=start, pages=pages, logit_rows=logit_rows, long=long, adapter=adapter)
        return cls.build([span], page_size=page_size, device=device)
