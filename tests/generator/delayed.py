"""A device of the mind: draws by itself, runs behind the host on its own thread, keeps every launch in order, as a stream does."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from exl2nb.model.batch import Batch
from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.state import SamplerState


class DelayedExecutor:
    """Lookahead 1.

    delay_s: how long a step takes at most, at random. fail_at: launch -> what `result` raises.
    """

    lookahead = 1

    def __init__(self, model, cache, *, delay_s=0.0, draws=lambda state: True) -> None:
        self.model, self.cache, self.delay_s, self._draws = model, cache, delay_s, draws
        self.fail_at: dict[int, BaseException] = {}
        self.fed = self.ahead = self.unread = self.launches = self.same = 0
        self.closed = False
        self._chance = random.Random(0)
        self._stream = ThreadPoolExecutor(1)
        self._drawn: list[int] = []  # the tokens of the last launch, in the device's memory
        self._last: list[object] = []

    def can_draw(self, state):
        return self._draws(state)

    def launch(self, step):
        assert self.unread <= 1, "three steps in flight"
        self.ahead += self.unread
        self.unread += 1
        batch = Batch(**{name: getattr(step.batch, name).clone() for name in step.batch.__dataclass_fields__ if name != "long"})
        feed = None if step.feed is None else step.feed.copy()
        self.fed += feed is not None
        states = [draw and draw.state for draw in step.draws]
        if step.same:
            self.same += 1
            assert all(a is b for a, b in zip(states, self._last)) and len(states) == len(self._last)
        self._last = states
        number, self.launches = self.launches, self.launches + 1
        future = self._stream.submit(self._run, number, batch, feed, list(step.draws))
        return _Ticket(self, number, future)

    def _run(self, number, batch, feed, draws):
        if self.delay_s:
            time.sleep(self._chance.random() * self.delay_s)
        if number in self.fail_at:
            raise self.fail_at[number]
        if feed is not None:
            for t in np.flatnonzero(feed >= 0):
                batch.input_ids.numpy()[t] = self._drawn[feed[t]]
        with torch.inference_mode():
            logits = self.model.forward(batch, self.cache).to(torch.float32).numpy()
        results = [self._draw(row, draw) if draw else row for row, draw in zip(logits, draws)]
        self._drawn = [-1 if isinstance(one, np.ndarray) else one.id for one in results]
        return results

    def _draw(self, row, draw):
        state = SamplerState(replace(draw.state.params, seed=draw.state.seed))
        state.count = draw.number
        return sample_row(row, state, top=draw.top)

    def copy(self, source, target):
        def work():
            with torch.inference_mode():
                for pool in (*self.cache.k, *self.cache.v):
                    pool[target].copy_(pool[source])

        self._stream.submit(work)

    def close(self):
        self._stream.shutdown()
        self.closed = True


class _Ticket:
    def __init__(self, executor, number, future):
        self._executor, self.number, self._future = executor, number, future

    def result(self):
        self._executor.unread -= 1
        return self._future.result()
