"""Rounds of a draft model on one GPU: all its steps and draws are one captured graph, and the target's step reads the tokens there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from exl2nb.cache.pool import KVCache
from exl2nb.core import env
from exl2nb.core.log import logger
from exl2nb.generator.draft import FIRST, Place
from exl2nb.generator.gpu_executor import PinnedState, biased, bucket, packed_params, write_bias
from exl2nb.generator.speculation import DraftRound
from exl2nb.model.model import DecodeInputs
from exl2nb.ops.cuda_sample import ROW_BYTES, sample_rows
from exl2nb.ops.gpu import capturing, launch_lock

if TYPE_CHECKING:
    from exl2nb.model.model import Model

WORDS = ROW_BYTES // 4  # of a row's settings


class GpuRounds:
    """Runs rounds of a model.

    prepared: kinds of rounds that were captured.

    Args:
        model: on one GPU. cache: there too.
    """

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._graphs: dict[tuple[int, int, int, bool], _Graph | None] = {}  # None: could not be captured
        self._graphed = env.get("EXL2NB_CUDA_GRAPHS", "1") == "1"
        self.prepared = 0

    def launch(self, places: Sequence[Place], steps: int, began: float) -> DraftRound | None:
        """Enqueue a round; None where it cannot be captured.

        Args:
            places: the sequences. steps: draft tokens of each. began: `time.perf_counter()` when the round was begun.
        """
        width = max(len(place.pages) for place in places)
        moved = any(biased(place.draw.state.params) for place in places)
        key = bucket(len(places)), 1 << (width - 1).bit_length(), steps, moved
        if key not in self._graphs:
            self.prepared += 1
            self._graphs[key] = self._capture(*key) if self._graphed else None
            began = time.perf_counter()
        graph = self._graphs[key]
        return None if graph is None else graph.replay(places, began)

    def close(self) -> None:
        """Drop the graphs."""
        self._graphs.clear()

    def _capture(self, rows: int, width: int, steps: int, moved: bool) -> _Graph | None:
        before = torch.cuda.current_stream(self._model.draw_device)
        try:
            return _Graph(self._model, self._cache, rows, width, steps, moved)
        except RuntimeError as error:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream current
            reason = str(error).splitlines()[0]
            logger.warning("rounds of %d draft tokens cannot be captured (%s): they are launched step by step, more slowly", steps, reason)
            return None


class _Graph:
    """A round of `steps` draft tokens for up to `rows` sequences of at most `width` pages."""

    def __init__(self, model: Model, cache: KVCache, rows: int, width: int, steps: int, moved: bool) -> None:
        self.rows, self.width, self.steps = rows, width, steps
        self._device = torch.device(model.draw_device)
        self._sizes = [rows * WORDS, FIRST * rows, FIRST * rows, rows, rows, rows, rows * width, (1 + steps) * rows]
        self._state = torch.zeros(sum(self._sizes), dtype=torch.int32, device=self._device)
        self._results = torch.zeros(steps, rows, 4, dtype=torch.int32).pin_memory()
        self._bias = torch.zeros(rows, model.outputs, device=self._device) if moved else None
        self._run = _recorded(model, cache, self._state.split(self._sizes), self._results, self._bias)
        ends = np.cumsum(self._sizes).tolist()
        self._host, self._numbers = PinnedState(self._state, [*zip([0, *ends], ends)]), self._results.numpy()
        self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._run()  # with no sequence at all: nothing is written to the cache; loads the kernels, which a capture forbids
        with capturing:
            torch.cuda.synchronize(self._device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=torch.cuda.Stream(self._device), capture_error_mode="thread_local"):
                self._run()
        self._graph.replay()  # the first one takes longer

    def replay(self, places: Sequence[Place], began: float) -> DraftRound:
        """Write what the round reads, and enqueue it."""
        params, ids, positions, last, lens, _, table, tokens = self._host.cleared()
        packed = packed_params([place.draw for place in places])
        params[: len(packed)] = packed
        table = table.reshape(self.rows, self.width)
        for row, (latest, start, pages, _) in enumerate(places):
            at = FIRST * row
            ids[at : at + FIRST], positions[at : at + FIRST], tokens[row] = latest, range(start, start + FIRST), latest[-1]
            last[row], lens[row] = start + FIRST - 1, start + FIRST
            table[row, : len(pages)] = pages
        first, end = self._events
        self._host.send()
        if self._bias is not None:
            write_bias(self._bias, [place.draw for place in places])
        waited = time.perf_counter() - began
        first.record()
        with launch_lock(self._device):
            self._graph.replay()
        end.record()
        return _Round(self._state[-len(tokens) :], self.rows, began, self._numbers[:, : len(places)], (first, end), waited)


def _recorded(model: Model, cache: KVCache, state: Sequence[Tensor], results: Tensor, bias: Tensor | None) -> Callable[[], None]:
    """What launches the steps and draws. It does not know the graph: a cycle would keep a closed model's weights until it is collected."""
    params, ids, positions, last, lens, number, table, tokens = state
    rows, steps = len(lens), len(results)
    drafts = tokens.view(1 + steps, rows)[1:]  # behind the last token of each sequence
    device, settings = drafts.device, params.view(torch.uint8).view(rows, ROW_BYTES)
    logits = torch.zeros(rows, model.outputs, device=device)
    pages = table.view(rows, -1)
    bounds = torch.arange(0, FIRST * rows + 1, FIRST, dtype=torch.int32, device=device)
    ends = torch.arange(FIRST - 1, FIRST * rows, FIRST, dtype=torch.int32, device=device)
    inputs = [DecodeInputs(ids, positions, lens, pages, bounds, ends)]
    inputs += [DecodeInputs(drafts[step], last, lens, pages) for step in range(steps - 1)]
    forwards = [model.decode_step(cache, one, logits, None) for one in inputs]

    def run() -> None:
        for step, forward in enumerate(forwards):
            forward()
            sample_rows(
                model.capped(logits), settings, None, number, drafts[step], last, lens, None, None, steps, True, bias, results
            )  # fmt: skip

    return run


class _Round:
    """A round that may still run. It is read before the graph is replayed again, which has one place for results and one pair of events."""

    def __init__(
        self, ids: Tensor, rows: int, began: float, results: np.ndarray, events: tuple[torch.cuda.Event, torch.cuda.Event], waited: float
    ) -> None:
        self.ids, self.rows, self.began = ids, rows, began
        self._results, self._events, self._waited = results, events, waited
        self._read: np.ndarray | None = None

    def tokens(self, row: int) -> list[int]:
        if self._read is None:
            self._events[1].synchronize()
            self._read = self._results[..., 0].T.clip(min=0).copy()  # -1, no distribution, is 0 for the steps
        return self._read[row].tolist()

    def seconds(self) -> float:
        first, end = self._events
        end.synchronize()
        return self._waited + first.elapsed_time(end) / 1e3
