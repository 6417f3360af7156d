"""Rounds of a draft model on one GPU: all its steps and draws are one captured graph, and the target's step reads the tokens there.

While the target verifies them, the next round can be launched behind that step: its graph begins with what the host would else have to read
first, which draft tokens were accepted. The host then works while the draft does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.core import env
from exl2nb.core.log import logger
from exl2nb.generator.draft import FIRST_STEP_TOKENS, DraftSlot
from exl2nb.generator.gpu_executor import PinnedState, graph_rows, has_bias, packed_params, write_bias
from exl2nb.generator.speculation import DraftRound
from exl2nb.model.model import DecodeInputs
from exl2nb.ops.cuda_sample import ROW_BYTES, sample_rows
from exl2nb.ops.gpu import capturing, current_stream, launch_lock

if TYPE_CHECKING:
    from exl2nb.model.model import Model

ROW_WORDS = ROW_BYTES // 4  # of a row's settings
COUNTER_WORD = 10  # of the number of the draw, its low half
MAX_CAPTURED_ROUNDS = 16  # kinds of captured rounds, each with logits of its own


class RoundKind(NamedTuple):
    """What distinguishes captured rounds: sequences at most, pages of a sequence at most, draft tokens, whether some rows have biases."""

    rows: int
    width: int
    steps: int
    biased: bool


class GpuRounds:
    """Runs rounds of a model.

    Args:
        model: on one GPU.
        cache: there too.

    Attributes:
        prepared: kinds of rounds that were captured, failed captures included.
    """

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._graphs: dict[RoundKind, RoundGraph | None] = {}
        self._graphed = env.get("EXL2NB_CUDA_GRAPHS", "1") == "1"
        self.prepared = 0

    @property
    def graphs(self) -> dict[RoundKind, RoundGraph | None]:
        """What was captured; None for a round that could not be."""
        return dict(self._graphs)

    def launch(self, places: Sequence[DraftSlot], steps: int, began: float) -> DraftRound | None:
        """Enqueue a round; None where it cannot be captured.

        Args:
            places: the sequences.
            steps: draft tokens of each.
            began: `time.perf_counter()` when the round was begun.
        """
        width = max(len(place.pages) for place in places)
        with_bias = any(has_bias(place.draw.state.params) for place in places)
        kind = RoundKind(rows=graph_rows(len(places)), width=1 << (width - 1).bit_length(), steps=steps, biased=with_bias)
        if kind not in self._graphs:
            self.prepared += 1
            kept = [one for one, graph in self._graphs.items() if graph is not None]
            if len(kept) >= MAX_CAPTURED_ROUNDS:
                torch.cuda.synchronize(self._model.capabilities.draw_device)  # it may run; what was launched keeps its results
                del self._graphs[kept[0]]
            self._graphs[kind] = self._capture(kind) if self._graphed else None
            began = time.perf_counter()
        graph = self._graphs[kind] = self._graphs.pop(kind)  # the last one used goes last
        return None if graph is None else graph.replay(places, began)

    def follow(self, launched: DraftRound, drawn: Tensor, sequences: int) -> DraftRound | None:
        """Enqueue the round that follows one whose draft tokens are verified by the step launched last; None where that cannot be captured.

        Args:
            launched: the round, of so many sequences. drawn: int32 on the GPU, by that step, for each sequence of the round in order, one
            token after its last one and each of its draft tokens.
        """
        graph = next((one for one in self._graphs.values() if one is not None and one.latest is launched), None)
        if graph is None or graph.broken:
            return None
        if not graph.follows:
            self.prepared += 1
            try:
                graph.capture_next()
            except RuntimeError as error:
                graph.broken = True
                logger.warning("rounds of a draft model cannot follow one another (%s): they wait for the host", str(error).splitlines()[0])
                return None
        return graph.replay_next(drawn, sequences)

    def close(self) -> None:
        """Drop the graphs."""
        self._graphs.clear()

    def _capture(self, kind: RoundKind) -> RoundGraph | None:
        before = torch.cuda.current_stream(self._model.capabilities.draw_device)
        try:
            return RoundGraph(self._model, self._cache, kind)
        except RuntimeError as error:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream current
            reason, steps = str(error).splitlines()[0], kind.steps
            logger.warning("rounds of %d draft tokens cannot be captured (%s): they are launched step by step, more slowly", steps, reason)
            return None


class RoundGraph:
    """A captured round, and the round that follows it.

    Attributes:
        follows: the round that follows was captured too.
        broken: it cannot be captured.
        latest: the round that was launched last.
    """

    def __init__(self, model: Model, cache: KVCache, kind: RoundKind) -> None:
        rows, width, steps = self.rows, self.width, self.steps = kind[:3]
        self._device = torch.device(model.capabilities.draw_device)
        self._sizes = [
            rows * ROW_WORDS,
            FIRST_STEP_TOKENS * rows,
            FIRST_STEP_TOKENS * rows,
            rows,
            rows,
            rows,
            rows * width,
            5 * rows,
            rows,
            (1 + steps) * rows,
        ]
        self._state = torch.zeros(sum(self._sizes), dtype=torch.int32, device=self._device)
        self._results = torch.zeros(2 * steps, rows, 4, dtype=torch.int32).pin_memory()  # of a round, and of the one that follows
        self._bias = torch.zeros(rows, model.outputs, device=self._device) if kind.biased else None
        self._verified = torch.zeros(1 + steps, rows, dtype=torch.int32, device=self._device)
        parts = self._state.split(self._sizes)
        self._run, self._advance = (
            _round_launcher(model, cache, parts, self._results, self._bias),
            partial(write_round_inputs, parts, self._verified),
        )
        self._graph, self._next, self._half = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), 0
        self.follows = self.broken = False
        self.latest: DraftRound | None = None
        ends = np.cumsum(self._sizes).tolist()
        self._host, self._numbers = PinnedState(self._state, [*zip([0, *ends], ends)]), self._results.numpy()
        self._events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(2)]
        self._advance()  # both with no sequence at all: nothing is written to the cache; loads the kernels, which a capture forbids
        self._run()
        self._capture(self._graph)
        self._graph.replay()  # the first one takes longer

    def _capture(self, graph: torch.cuda.CUDAGraph, *before: Callable[[], None]) -> None:
        with capturing:
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self._device), capture_error_mode="thread_local"):
                for run in (*before, self._run):
                    run()

    def capture_next(self) -> None:
        """Record the round that follows one."""
        before = torch.cuda.current_stream(self._device)
        try:
            self._capture(self._next, self._advance)
        finally:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream current
        self.follows = True

    def replay(self, places: Sequence[DraftSlot], began: float) -> DraftRound:
        """Write what the round reads, and enqueue it."""
        params, ids, positions, last, lens, _, table, first, alive, tokens = self._host.cleared()
        packed = packed_params([place.draw for place in places])
        params[: len(packed)] = packed
        table = table.reshape(self.rows, self.width)
        for row, (latest, start, pages, _) in enumerate(places):
            at = FIRST_STEP_TOKENS * row
            ids[at : at + FIRST_STEP_TOKENS], positions[at : at + FIRST_STEP_TOKENS], tokens[row] = (
                latest,
                range(start, start + FIRST_STEP_TOKENS),
                latest[-1],
            )
            last[row], lens[row] = start + FIRST_STEP_TOKENS - 1, start + FIRST_STEP_TOKENS
            table[row, : len(pages)] = pages
        first = first.reshape(5, self.rows)
        first[:2], first[2], first[3] = positions.reshape(self.rows, FIRST_STEP_TOKENS).T, last, lens
        first[4] = params.reshape(self.rows, ROW_WORDS)[:, COUNTER_WORD]
        alive[: len(places)] = 1
        self._host.send()
        if self._bias is not None:
            write_bias(self._bias, [place.draw for place in places])
        self._half = 0
        return self._launched(self._graph, len(places), began, time.perf_counter() - began)

    def replay_next(self, drawn: Tensor, sequences: int) -> DraftRound:
        """Enqueue the round that follows."""
        each = 1 + self.steps
        self._verified[:, :sequences].copy_(drawn[: sequences * each].view(sequences, each).T)
        self._half = 1 - self._half
        return self._launched(self._next, sequences, time.perf_counter(), 0.0)

    def _launched(self, graph: torch.cuda.CUDAGraph, sequences: int, began: float, waited: float) -> DraftRound:
        begin, end = self._events[self._half]
        begin.record(current_stream(self._device))
        with launch_lock(self._device) as stream:
            graph.replay()
        end.record(stream)
        results = self._numbers[self._half * self.steps :][: self.steps, :sequences]
        self.latest = _Round(self._state[-(1 + self.steps) * self.rows :], self.rows, began, results, (begin, end), waited)
        return self.latest


def write_round_inputs(state: Sequence[Tensor], verified: Tensor) -> None:
    """Write the inputs of a round from those of the one before, and from what the target drew.

    Args:
        state: parts of the state of a graph. verified: int32 `(1 + steps, R)`: what the target drew after the last token of each sequence,
            and after each draft token.
    """
    params, ids, positions, last, lens, _, _, first, alive, tokens = state
    rows = len(lens)
    known = tokens.view(-1, rows)
    drawn = torch.cat([known[:1], verified])
    accepted = torch.eq(drawn[1:-1], known[1:]).cumprod(0, dtype=torch.int32).sum(0)
    begun = drawn.gather(0, torch.stack([accepted, accepted + 1]))  # the last two tokens now
    first.view(5, rows).add_((accepted + 1) * alive)
    ids.view(rows, FIRST_STEP_TOKENS).copy_(begun.T)
    known[0].copy_(begun[1])
    positions.view(rows, FIRST_STEP_TOKENS).copy_(first.view(5, rows)[:2].T)
    last.copy_(first.view(5, rows)[2])
    lens.copy_(first.view(5, rows)[3])
    params.view(rows, ROW_WORDS)[:, COUNTER_WORD].copy_(first.view(5, rows)[4])


def _round_launcher(model: Model, cache: KVCache, state: Sequence[Tensor], results: Tensor, bias: Tensor | None) -> Callable[[], None]:
    """What launches the steps and draws. It does not know the graph: a cycle would keep a closed model's weights until it is collected."""
    params, ids, positions, last, lens, number, table, _, _, tokens = state
    rows, steps = len(lens), len(results) // 2
    drafts = tokens.view(1 + steps, rows)[1:]  # behind the last token of each sequence
    device, settings = drafts.device, params.view(torch.uint8).view(rows, ROW_BYTES)
    logits = torch.zeros(rows, model.outputs, device=device)
    pages = table.view(rows, -1)
    bounds = torch.arange(0, FIRST_STEP_TOKENS * rows + 1, FIRST_STEP_TOKENS, dtype=torch.int32, device=device)
    ends = torch.arange(FIRST_STEP_TOKENS - 1, FIRST_STEP_TOKENS * rows, FIRST_STEP_TOKENS, dtype=torch.int32, device=device)
    inputs = [DecodeInputs(ids, positions, lens, pages, bounds, ends)]
    inputs += [DecodeInputs(drafts[step], last, lens, pages) for step in range(steps - 1)]
    forwards = [model.make_decode_launcher(cache, one, logits, None) for one in inputs]

    def run() -> None:
        for step, forward in enumerate(forwards):
            forward()
            sample_rows(
                model.capped(logits), settings, None, number, drafts[step], last, lens, None, None, 2 * steps, True, bias, results
            )  # fmt: skip

    return run


class _Round:
    """A round that may still run. It is read before the second one after it is launched, which has the same place for results."""

    def __init__(
        self, ids: Tensor, rows: int, began: float, results: np.ndarray, events: tuple[torch.cuda.Event, torch.cuda.Event], waited: float
    ) -> None:
        self.ids, self.rows, self.began = ids, rows, began
        self._results, self._events, self._waited = results, events, waited
        self._read: list[list[int]] = []

    def tokens(self, row: int) -> list[int]:
        if not self._read:
            self._events[1].synchronize()
            self._read = self._results[..., 0].T.clip(min=0).tolist()  # -1, no distribution, is 0 for the steps
        return self._read[row]

    def seconds(self) -> float:
        first, end = self._events
        end.synchronize()
        return self._waited + first.elapsed_time(end) / 1e3
