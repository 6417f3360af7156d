"""Random sequences of actions on scheduler and pages: arrivals, cancels, failures, rewinds, drafts, forks, files, in a cache far too small.

The model's next token is a hash of what it finds in the pages, so a wrong page, a page freed too early or one overwritten while it
is read gives a wrong text. After every action the reference counts equal the references, and every published page holds its tokens.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from exl2nb.cache.pages import chain_key
from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.core.errors import OptionError
from exl2nb.generator import prompt_cache as cache_file
from exl2nb.generator.batch_buffers import BatchBuilder
from exl2nb.generator.loop import StepLoop
from exl2nb.generator.pager import Pager
from exl2nb.generator.request import Request
from exl2nb.generator.scheduler import Scheduler
from exl2nb.generator.sequence import RunningRequest
from exl2nb.model.runner import HOST_CHUNKS
from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.sampler_state import SamplerState

from . import fakes

SIZE, PAGES, VOCAB = 8, 14, 24
ROWS = np.random.default_rng(0).normal(size=(509, VOCAB)).astype(np.float32) * 3
WEIGHTS = np.arange(SIZE * PAGES) * 2 + 1
BEGINNINGS = [random.Random(i).choices(range(3, VOCAB), k=60) for i in range(3)]
COUNTS: Counter[str] = Counter()  # steps taken and texts compared by the lives of one test


def logits_after(ids):
    return ROWS[int((np.asarray(ids) * WEIGHTS[: len(ids)]).sum()) % len(ROWS)]


def expected(request, seed, back=()):
    """The text by the rule alone. back: (after how many tokens, how many are taken back); the next one is then another."""
    ids, count, other, back = list(request.prompt_ids), 0, False, list(back)
    state = SamplerState(request.sampling, request.prompt_ids)
    state.seed = seed
    while count < request.max_tokens:
        token = (sample_row(logits_after(ids), state).id + other) % VOCAB
        other = False
        ids.append(token)
        count += 1
        if back and count == back[0][0]:
            _, length = back.pop(0)
            del ids[-length:]
            count, other = count - length, True
            state.rewind(length)
    return ids[len(request.prompt_ids) :]


class Rewinding(RunningRequest):
    """Takes tokens back once or twice, as a banned text makes it."""

    back: list
    other = False
    host_only = True

    def advance(self, rows):
        sampled = sample_row(rows[0], self.sampler)
        sampled = sampled._replace(id=(sampled.id + self.other) % VOCAB)
        self.other = False
        self.ids.append(sampled.id)
        if self.back and self.new_tokens == self.back[0][0]:
            _, length = self.back.pop(0)
            del self.ids[-length:]
            self.sampler.rewind(length)
            self.computed, self.other = min(self.computed, len(self.ids) - 1), True
        return "length" if self.new_tokens >= self.limit else None


class Guessing(RunningRequest):
    """Proposes draft tokens behind its last token, some right, some wrong."""

    host_only = True

    def guess(self):
        left = self.limit - self.new_tokens
        if self.pending != 1 or left < 2:
            return
        chance, ids = random.Random(len(self.ids)), list(self.ids)
        for _ in range(chance.randrange(1, min(5, left))):
            ids.append(int(logits_after(ids).argmax()) if chance.random() < 0.7 else 3)
        self.drafted = len(ids) - len(self.ids)
        self.ids = ids

    def advance(self, rows):
        assert len(rows) == self.rows
        guesses = self.ids[len(self.ids) - self.drafted :]
        self.withdraw()
        for row, guess in zip(rows, [*guesses, None]):
            token = sample_row(row, self.sampler).id
            self.ids.append(token)
            if token != guess or self.new_tokens >= self.limit:
                break
        self.computed = min(self.computed, len(self.ids) - 1)
        return "length" if self.new_tokens >= self.limit else None


class Speculator:
    def wakes(self, running):
        return True

    def launched(self, spans, drawn):
        pass

    def propose(self, running, prepared):
        for sequence in running:
            if isinstance(sequence, Guessing):
                sequence.guess()


class Life(RuleBasedStateMachine):
    lookahead = 0

    @initialize()
    def begin(self):
        self.cache = KVCache(CacheSpec(1, 1, 1, PAGES, "fp32", SIZE))
        self.cache.k[0].fill_(-7)
        model = fakes.FakeModel(vocab=VOCAB)
        model.logits_after = logits_after
        self.executor = fakes.DelayedExecutor(model, self.cache, lookahead=self.lookahead, stream=fakes.AtOnce())
        self.pager = Pager(PAGES, page_size=SIZE, copy=self.executor.copy)
        scheduler = Scheduler(self.pager, max_sequences=4)
        scheduler.chunk = 32
        builder = BatchBuilder(max_tokens=HOST_CHUNKS.max_tokens + 4 * 32, max_sequences=4, max_pages=PAGES + 4, page_size=SIZE)
        self.loop = StepLoop(scheduler, builder, self.executor)
        self.loop.speculator = Speculator()
        self.alive: list[tuple[RunningRequest, list]] = []
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name, "cache.safetensors")

    # ---- what can happen

    @rule(seed=st.integers(0, 10**6), many=st.integers(1, 4))
    def arrive(self, seed, many):
        for i in range(many):
            self._arrive(random.Random(seed * 4 + i))
        self.run(2)

    def _arrive(self, chance):
        kind, count = chance.choice([RunningRequest, RunningRequest, Rewinding, Guessing]), chance.choice([1, 5, 20, 40])
        common = chance.choice([0, 7, 8, 9, 24, 50])
        prompt = BEGINNINGS[chance.randrange(3)][:common] + chance.choices(range(3, VOCAB), k=chance.randrange(20) + (common == 0))
        request = Request.of(
            prompt, where="test", max_tokens=count, temperature=chance.randrange(2), seed=chance.randrange(4),
            priority=chance.choice([0, 0, 0, 1]), ignore_eos=True, stream=False,
        )  # fmt: skip
        sequence, back = kind(request, fakes.TOKENIZER, context=SIZE * PAGES), []
        if kind is Rewinding:
            back = [(count // 2, min(count // 2, 6)), (count * 3 // 4, min(count * 3 // 4, 11))] if count > 4 else []
            sequence.back = list(back)
        self.loop.scheduler.check(sequence)
        self.loop.add(sequence, chance.choice([None, "a", "b"]))
        self.alive.append((sequence, expected(request, sequence.sampler.seed, back)))

    @rule(count=st.integers(1, 12))
    def run(self, count):
        for _ in range(count):
            if not self.loop.busy:
                break
            self.loop.step()
            COUNTS["steps"] += 1

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 100))
    def cancel(self, which):
        if which < 30:
            sequence, _ = self.alive.pop(which % len(self.alive))
            sequence.channel.cancelled = True
        self.run(1)

    @precondition(lambda self: self.loop.scheduler.running)
    @rule()
    def fail(self):
        """A step fails once."""
        self.executor.fail_at[self.executor.launches] = ValueError("asked to")
        self.run(1)
        self.executor.fail_at.clear()
        self.alive = [(s, text) for s, text in self.alive if s.channel.error is None]

    @rule(which=st.integers(0, 100), seed=st.integers(0, 3))
    def fork(self, which, seed):
        """Another request that continues where this one stands."""
        self.run(1)
        able = [s for s, _ in self.alive if type(s) is RunningRequest and s.pages and not s.in_flight]
        if not able:
            return
        source = able[which % len(able)]
        left = SIZE * PAGES - len(source.ids)
        if left < 2:
            return
        request = Request.of(source.ids, where="test", max_tokens=min(9, left), temperature=1.0, seed=seed, ignore_eos=True, stream=False)
        target = RunningRequest(request, fakes.TOKENIZER, context=SIZE * PAGES)
        self.loop.scheduler.fork(source, target)
        if target.pending == 0:
            target.computed -= 1
        self.loop.add(target)
        self.alive.append((target, expected(request, target.sampler.seed)))

    @rule(on=st.booleans())
    def reuse(self, on):
        self.pager.reuse = on
        self.run(3)

    @precondition(lambda self: len(self.pager.index) > 0)
    @rule(forget=st.booleans())
    def save(self, forget):
        self.loop.drain()
        with suppress(OptionError):  # no page whose whole text is there
            cache_file.save_pages(self.file, self.pager, self.cache, model="tiny")
        if forget:
            for page in range(PAGES):
                if self.pager.table.state(page) == "cached":
                    self.pager.index.forget(page)

    @precondition(lambda self: self.file.exists())
    @rule()
    def load(self):
        self.loop.drain()
        cache_file.load_pages(self.file, self.pager, self.cache, model="tiny", vocab_size=VOCAB)
        self.run(3)

    # ---- what must hold

    @invariant()
    def reference_counts_equal_the_references(self):
        table = self.pager.table
        held = [page for s in (*self.loop.scheduler.running, *self.loop.scheduler.waiting) for page in s.pages]
        assert [table.count(page) for page in range(PAGES)] == [held.count(page) for page in range(PAGES)]
        assert table.num_free == PAGES - len(set(held))
        assert {page for page in range(PAGES) if table.state(page) != "used"} == set(range(PAGES)) - set(held)

    @invariant()
    def published_pages_hold_what_they_say(self):
        cells = self.cache.k[0].view(-1, SIZE)
        for page in range(PAGES):
            entry = self.pager.index.entry(page)
            assert (entry is not None) == self.pager.table.kept(page)
            if entry is not None:
                assert cells[page, : len(entry.tokens)].tolist() == entry.tokens.tolist()
                assert entry.key is None or entry.key == chain_key(entry.parent, entry.tokens)

    @invariant()
    def texts_are_those_of_the_rule(self):
        over = [(s, text) for s, text in self.alive if s.ended]
        self.alive = [(s, text) for s, text in self.alive if not s.ended]
        for sequence, text in over:
            assert sequence.channel.error is None
            assert sequence.ids[len(sequence.request.prompt_ids) :] == text
            COUNTS["texts"] += 1

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        for _ in range(5000):
            if not self.loop.busy:
                break
            self.loop.step()
            COUNTS["steps"] += 1
        assert not self.loop.busy
        self.texts_are_those_of_the_rule()
        self.published_pages_hold_what_they_say()
        assert self.pager.table.num_free == PAGES
        self.folder.cleanup()


class LifeAhead(Life):
    lookahead = 1


CALM = settings(  # not shrunk: a failure here is read better from the first life that shows it than after ten minutes
    max_examples=10, stateful_step_count=80, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)  # fmt: skip


def live(life, monkeypatch, first, steps):
    """Run lives, seeded from `first` on, until they have taken so many steps; the invariants are asserted after every action."""
    monkeypatch.setattr("os.fsync", lambda file: None)
    COUNTS.clear()
    for number in range(first, first + steps // 25):
        if COUNTS["steps"] < steps:
            with torch.inference_mode():
                run_state_machine_as_test(seed(number)(life), settings=CALM)
    return COUNTS


@pytest.mark.parametrize("life", [Life, LifeAhead])
def test_lives(life, monkeypatch):
    counts = live(life, monkeypatch, 0, 3000)
    assert counts["steps"] >= 3000
    assert counts["texts"] > 150


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("life", [Life, LifeAhead])
def test_long_lives(life, monkeypatch):
    counts = live(life, monkeypatch, 1000, 30_000)
    assert counts["steps"] >= 30_000
    assert counts["texts"] > 1500
