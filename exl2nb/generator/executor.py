"""Executors: compute the steps of the step loop. What a step is and what it returns; the executor of the CPU. Knows no text.

The host executor draws the rows of requests whose only filters are the usual cuts; all other rows go back as logits.
An executor with `lookahead` 1 draws tokens on its device and takes the next step before the results of the last one are read: where a row's
token is not known yet, the step says "the token that the launch before drew for row r".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.core.progress import Sink
from exl2nb.model.batch import Batch
from exl2nb.model.model import Ahead
from exl2nb.ops.cpu_sample import MOST_ROWS
from exl2nb.sampling.chain import batches, draw_batch, draw_settings, drawn_rows
from exl2nb.sampling.draw import Sampled
from exl2nb.sampling.sampler_state import SamplerState

if TYPE_CHECKING:
    from exl2nb.model.runner import StepRunner

AHEAD_ROWS = 4  # this many requests or more: the host's share of a step is worth running ahead


class DrawRequest(NamedTuple):
    """How to draw the token of one logit row.

    state: of the request; `state.params` and `state.seed` never change, the rest belongs to the host and may lag by the tokens in
    flight. number: of this draw, to be used as `uniform(state.seed, number)`. top: alternatives to report.
    """

    state: SamplerState
    number: int
    top: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One launch: T tokens, R logit rows.

    Attributes:
        batch: int32 host tensors. They are views of buffers that the next step overwrites: copy them before `launch` returns.
        sources: `(T,)` int32, where tokens come from that only the device knows; None: all tokens are known. sources[t] = -1:
            `batch.input_ids[t]` is the token. sources[t] = r: the token is what the launch before this one drew for its logit row r;
            `input_ids[t]` is 0.
        draws: R entries; None: return the raw logits of that row.
        same: the sequences, logit rows and block table are those of the launch before, each one token on; parameters need not be sent
            again.
        drafts: draft tokens, int32 on the device. sources[t] = r then means `drafts[r]`.
    """

    batch: Batch
    sources: np.ndarray | None
    draws: Sequence[DrawRequest | None]
    same: bool
    drafts: torch.Tensor | None = None


Results = list[Sampled | np.ndarray]
"""One entry per logit row: a `Sampled` where a Draw was given, else the raw logits f32 `(V,)` on the host.

Logits may also stand in the place of a draw that is impossible; the request's own sampler then says why.
"""


class PendingStep(Protocol):
    """A launched step that may still run."""

    def result(self) -> Results:
        """Wait for the step.

        Called once, in the order of the launches, except after an error. What it raises ends the requests of the step.
        """
        ...


class Executor(Protocol):
    """Computes steps, one after the other, in the order of the launches.

    Attributes:
        lookahead: how many launched steps may be unread when the next one is launched: 0 or 1; it may change with every launch.
        drawn: the tokens of the last launch by logit row, int32 on the device, where it draws them; None: on the host.

    `launch` and `copy` run on the engine thread, which is the only caller. Work of a later call must see what earlier calls wrote to the
    cache (one stream does that): the engine gives pages of an ended request to the next one while a step that still writes to them runs.
    """

    lookahead: int
    drawn: torch.Tensor | None

    @property
    def prepared(self) -> int:
        """Kinds of steps that were made ready while a step waited (captured, compiled). Such a step's time says nothing about others."""
        ...

    def can_draw(self, state: SamplerState, *, drafts: bool = False) -> bool:
        """Whether the executor draws for this request; asked once per request. False: its rows come back as logits.

        drafts: whether steps may hold draft tokens, so that a row is drawn before it is known whether the tokens before it stay.
        """
        ...

    def launch(self, step: StepInput) -> PendingStep | Results:
        """Begin a step, or run it and return its results. An exception means that nothing was begun."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy one page of the cache, in the order of the launches."""
        ...

    def prepare(self, progress: Sink | None) -> None:
        """Warm up: do in advance what the first steps would wait for, such as compiling kernels."""
        ...

    def close(self) -> None:
        """Wait for running steps and free what the executor holds. Results that were not read are dropped."""
        ...


class _StepAhead:
    """A step on a thread of its own (`Model.draw_ahead`)."""

    def __init__(self, ahead: Ahead, draws: Sequence[DrawRequest]) -> None:
        self.ahead, self._draws = ahead, draws

    def result(self) -> Results:
        self.ahead.join()
        return drawn_rows(self.ahead.drawn, self._draws, self.ahead.logits)


class HostExecutor:
    """Runs the model and draws what can be drawn in one call; the other requests draw their tokens themselves.

    Where several requests decode and all can be drawn for, a small model runs one step ahead (`Model.draw_ahead`): its host then costs as
    much as a part of the step, and there is a processor without work while it works. All other steps run at once.

    Attributes:
        lookahead: 1 while the last step launched is one that runs ahead.
        ahead_steps: steps that ran ahead so far, by their number of rows.
    """

    def __init__(self, model: StepRunner, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self.lookahead = self.prepared = 0
        self.drawn: torch.Tensor | None = None
        self.ahead_steps = Counter[int]()
        self._fused, self._ahead = model.capabilities.fused_draw, model.capabilities.draws_ahead
        self._last: Ahead | None = None  # launched last, and perhaps not complete

    def can_draw(self, state: SamplerState, *, drafts: bool = False) -> bool:
        """Whether the request's only filters are the usual cuts, which depend on no token before."""
        return batches(state)

    def launch(self, step: StepInput) -> PendingStep | Results:
        """Run the step to its end, or begin it."""
        draws, batch = step.draws, step.batch
        if self._ahead and len(draws) >= AHEAD_ROWS and self._may_run_ahead(step):
            return self._launch_ahead(step)
        if self._last is not None:
            self._settle(self._last, step)
        self.lookahead = 0
        if not draws or None in draws:
            return self._launch_mixed(step)
        wanted: Sequence[DrawRequest] = draws  # pyright: ignore[reportAssignmentType]
        if not self._fused or batch.pictures is not None:
            return draw_batch(_logits_on_host(self._model.forward(batch, self._cache)), wanted)
        drawn, logits = self._model.step_draw(batch, self._cache, *draw_settings(wanted))
        return drawn_rows(drawn, wanted, logits)

    def copy(self, source: int, target: int) -> None:
        """Copy one page in every layer, after the running step."""
        if self._last is not None:
            self._last.join()
        self._cache.copy_page(source, target)

    def prepare(self, progress: Sink | None) -> None:
        """Nothing: the CPU's kernels are compiled."""

    def close(self) -> None:
        """Wait for the step that runs."""
        if self._last is not None:
            self._last.join()
        self._last = None

    def _launch_mixed(self, step: StepInput) -> Results:
        """A step with rows that the requests draw themselves."""
        logits = _logits_on_host(self._model.forward(step.batch, self._cache))
        results: Results = list(logits.numpy())
        rows = [row for row, draw in enumerate(step.draws) if draw is not None]
        if rows:
            drawn = draw_batch(logits[rows], [draw for draw in step.draws if draw is not None])
            for row, sampled in zip(rows, drawn):
                results[row] = sampled
        return results

    def _may_run_ahead(self, step: StepInput) -> bool:
        draws, batch = step.draws, step.batch
        decoding = len(draws) == len(batch.input_ids) == len(batch.context_lens)
        decoding = decoding and batch.pictures is None
        return decoding and len(draws) <= MOST_ROWS and None not in draws and torch.get_num_threads() > 1

    def _launch_ahead(self, step: StepInput) -> PendingStep:
        sources = None
        if step.sources is not None:
            assert self._last is not None, "tokens in flight were drawn by the launch before"
            sources = torch.from_numpy(step.sources), self._last.drawn
        draws: Sequence[DrawRequest] = step.draws  # pyright: ignore[reportAssignmentType]
        self._last = self._model.draw_ahead(step.batch, self._cache, draw_settings(draws), sources)
        self.lookahead = 1
        self.ahead_steps[len(draws)] += 1
        return _StepAhead(self._last, draws)

    def _settle(self, last: Ahead, step: StepInput) -> None:
        """Wait for the launch before, and fill in what it drew."""
        last.join()
        self._last = None
        if step.sources is None:
            return
        ids = step.batch.input_ids.numpy()
        drawn = last.drawn[:, 0].clamp(min=0).numpy()
        for token, row in enumerate(step.sources.tolist()):
            if row >= 0:
                ids[token] = drawn[row]


def _logits_on_host(logits: torch.Tensor) -> torch.Tensor:
    """The logits, f32."""
    return logits.to("cpu", torch.float32)
