"""The line between the step loop and whatever computes a step: what a device is told, and what comes back. Knows no text.

A host stepper computes a step at once; it draws the rows of requests with the usual cuts together and leaves all others to the requests.
A stepper with `lookahead` 1 draws tokens on its device and can take the next step before anybody has read the last one: where a row's token
is not known yet, the step says "what you drew for row r of the launch before".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.model.batch import Batch
from exl2nb.sampling.chain import batches, draw_batch
from exl2nb.sampling.report import Sampled
from exl2nb.sampling.state import SamplerState

if TYPE_CHECKING:
    from exl2nb.generator.engine import Forward


class Draw(NamedTuple):
    """How to draw the token of one logit row.

    state: of the request; `state.params` and `state.seed` never change, the rest belongs to the host and may lag behind by the tokens in
    flight. number: of this draw, to be used as `uniform(state.seed, number)`. top: alternatives to report.
    """

    state: SamplerState
    number: int
    top: int


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: T tokens, R logit rows.

    batch: int32 host tensors. They are views of buffers that the next step overwrites: copy them before `launch` returns. feed: `(T,)`
    int32 or None. feed[t] = -1: `batch.input_ids[t]` is the token. feed[t] = r: the token is what the launch before this one drew for its
    logit row r; `input_ids[t]` is 0. None: all tokens are known. draws: R entries; None asks for the raw logits of that row. same: the
    sequences, logit rows and block table are those of the launch before, each one token on; parameters need not be sent again.
    """

    batch: Batch
    feed: np.ndarray | None
    draws: Sequence[Draw | None]
    same: bool


class Ticket(Protocol):
    """A launched step."""

    def result(self) -> list[Sampled | np.ndarray]:
        """Wait for the step: one entry per logit row, a `Sampled` where a Draw was given, else the raw logits f32 `(V,)` on the host.

        Logits may also stand in the place of a draw that is impossible; the request's own sampler then says why.
        Called once per ticket, in the order of the launches, except after an error. What it raises ends the requests of the step.
        """
        ...


class Stepper(Protocol):
    """Computes steps, one after the other, in the order of the launches.

    lookahead: how many launched steps may be unread when the next one is launched: 0 or 1.

    `launch` and `copy` run on the engine thread, which is the only caller. Work of a later call must see what earlier calls wrote to the
    cache (one stream does that): the engine gives pages of an ended request to the next one while a step that still writes to them runs.
    """

    lookahead: int

    def can_draw(self, state: SamplerState) -> bool:
        """Whether the stepper draws for this request; asked once per request. False: its rows come back as logits."""
        ...

    def launch(self, step: Step) -> Ticket:
        """Begin a step. An exception means that nothing was begun."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy one page of the cache, in the order of the launches."""
        ...

    def close(self) -> None:
        """Wait for what runs and give back what the stepper holds. Tickets that were not read are dropped."""
        ...


class _Over:
    """The ticket of a step that is over."""

    def __init__(self, results: list[Sampled | np.ndarray]) -> None:
        self._results = results

    def result(self) -> list[Sampled | np.ndarray]:
        return self._results


class HostStepper:
    """Runs the model at once and draws what can be drawn in one call; the other requests draw their tokens themselves.

    Args:
        model: anything with `forward`.
        cache: the pages.
    """

    lookahead = 0

    def __init__(self, model: Forward, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    def can_draw(self, state: SamplerState) -> bool:
        """Where the cuts are the usual ones and nothing else looks at the logits."""
        return batches(state)

    def launch(self, step: Step) -> Ticket:
        """Run the step to its end."""
        logits = self._model.forward(step.batch, self._cache)
        if logits.is_cuda or logits.dtype is not torch.float32:
            logits = logits.to("cpu", torch.float32)
        if step.draws and None not in step.draws:
            rows, drawn = range(len(step.draws)), draw_batch(logits, step.draws)  # pyright: ignore[reportArgumentType]
            if None not in drawn:
                return _Over(drawn)  # pyright: ignore[reportArgumentType]
        else:
            rows = [row for row, draw in enumerate(step.draws) if draw is not None]
            if not rows:
                return _Over(list(logits.numpy()))
            drawn = draw_batch(logits[rows], [draw for draw in step.draws if draw is not None])
        results: list[Sampled | np.ndarray] = list(logits.numpy())
        for row, sampled in zip(rows, drawn):
            if sampled is not None:
                results[row] = sampled
        return _Over(results)

    def copy(self, source: int, target: int) -> None:
        """Copy one page in every layer."""
        self._cache.copy_page(source, target)

    def close(self) -> None:
        """Nothing to wait for."""
