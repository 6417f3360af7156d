"""A model without weights: logits are a pure function of the ids in the cache, so that every schedule must give the same text.

`FakeModel` runs in an engine, `DelayedExecutor` runs it behind the host as a GPU does, `complete` runs its rule without an engine.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import exl2nb
from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.generator.engine import Engine
from exl2nb.generator.request import Request
from exl2nb.generator.sequence import RunningRequest
from exl2nb.generator.speculation import Proposer
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.runner import Capabilities
from exl2nb.ops.placement import Placement
from exl2nb.sampling.chain import sample_row
from exl2nb.sampling.sampler_state import SamplerState
from exl2nb.tokenizer.tokenizer import Tokenizer

DEMO = Path(exl2nb.__file__).parent / "demo_model"
VOCAB, CONTEXT = 4096, 4096


class FakeModel:
    """Keeps the ids it is shown in the K pool, as a real model keeps keys, and computes the next logits from what it finds there.

    A page freed too early, a wrong slot, position or context length therefore changes the text.

    Args:
        step_s: how long a step takes, the GIL released.
    """

    capabilities = Capabilities(placement=Placement.on("cpu", 1))

    def __init__(self, *, step_s: float = 0.0, vocab: int = VOCAB) -> None:
        self.vocab, self.step_s, self.closed = vocab, step_s, False
        self.fail_at: dict[int, BaseException] = {}  # step number -> what it raises
        self.steps: list[tuple[int, int]] = []  # (sequences, tokens) of each step
        self.entered = threading.Event()
        self.gate: threading.Event | None = None  # a step waits for it
        self.nan_after: int | None = None
        self.poison: int | None = None  # a step with this id fails
        self.most_tokens: int | None = None  # a larger step has no memory

    def forward(self, batch, cache):
        step = len(self.steps)
        self.steps.append((len(batch.context_lens), len(batch.input_ids)))
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(30)
        if self.step_s:
            time.sleep(self.step_s)
        if step in self.fail_at:
            raise self.fail_at[step]
        if self.poison is not None and (batch.input_ids == self.poison).any():
            raise ValueError("poison")
        if self.most_tokens is not None and len(batch.input_ids) > self.most_tokens:
            raise MemoryError("not enough memory")
        ids, slots, positions = (t.numpy() for t in (batch.input_ids, batch.slot_mapping, batch.positions))
        pool, page_size = cache.k[0].view(-1), cache.spec.page_size  # one number per slot: one head of one number
        assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
        pool[torch.from_numpy(slots.astype(np.int64))] = torch.from_numpy(ids.astype(np.float32))
        rows = []
        bounds = batch.cu_seqlens.tolist()
        for row in batch.logit_rows.tolist():
            b = int(np.searchsorted(bounds, row, side="right")) - 1
            length = int(positions[row]) + 1
            assert length <= int(batch.context_lens[b])
            at = np.arange(length)
            table = batch.block_table[b].numpy().astype(np.int64)
            seen = pool[torch.from_numpy(table[at // page_size] * page_size + at % page_size)].numpy().astype(np.int64)
            rows.append(self.logits_after(seen))
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, self.vocab)

    def logits_after(self, ids) -> np.ndarray:
        """The rule: a seeded row that depends on every id and its place."""
        key = int((np.asarray(ids, np.int64) * (np.arange(len(ids)) * 2 + 1)).sum() % (2**31))
        if self.nan_after is not None and len(ids) > self.nan_after:
            return np.full(self.vocab, np.nan, np.float32)
        return np.random.default_rng(key).normal(size=self.vocab).astype(np.float32) * 3

    def new_cache(self, spec):
        return KVCache(spec)

    def close(self):
        self.closed = True


def spec(pages: int = 16) -> CacheSpec:
    return CacheSpec(num_layers=1, num_kv_heads=1, head_dim=1, num_pages=pages, mode="fp32")


def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


TOKENIZER = tokenizer()
RULE = FakeModel().logits_after


def prompt(seed: int, length: int) -> list[int]:
    """Random ids below 512."""
    return random.Random(seed).choices(range(3, 512), k=length)


def request(prompt, **options) -> Request:
    return Request.of(prompt, where="test", **{"ignore_eos": True, **options})


def greedy(prompt, count: int = 8, **options) -> Request:
    return request(prompt, max_tokens=count, **{"temperature": 0, **options})


def ids(completion) -> list[int]:
    return [token.id for token in completion.tokens]


def bare(completion) -> list:
    """The tokens without what proposed them."""
    return [token._replace(source="") for token in completion.tokens]


def engine(model: FakeModel | None = None, *, pages: int = 16, **kwargs) -> Engine:
    return Engine(model or FakeModel(), kwargs.pop("tokenizer", None) or tokenizer(), spec(pages), vocab_size=VOCAB, **kwargs)


def expected(model: FakeModel, prompt, count: int) -> list[int]:
    """Greedy continuation by the rule alone."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits_after(ids).argmax()))
    return ids[len(prompt) :]


@contextmanager
def held(engine):
    """The engine runs a call until the block ends."""
    began, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=engine.call, args=(lambda: (began.set(), release.wait(30)),))
    thread.start()
    assert began.wait(10)
    try:
        yield
    finally:
        release.set()
        thread.join()


# ---- sequences without an engine: any number of tokens a step, as a scheduler might choose


class FakeProposer:
    """Proposes draft tokens of a given quality: each is the right one with probability `right`."""

    def __init__(self, rule, right: float, seed: int = 0) -> None:
        self.rule, self.right, self.rng = rule, right, random.Random(seed)

    def propose(self, ids, count):
        future = list(ids)
        for _ in range(count):
            best = int(np.argmax(self.rule(future)))
            future.append(best if self.rng.random() < self.right else self.rng.randrange(3, VOCAB))
        return future[len(ids) :]


def run(sequence: RunningRequest, rule, *, guesser=None, rng: random.Random | None = None, steps: int = 5000):
    """Until it ends; prompts and forks in pieces chosen by `rng`. The completion."""
    guesses = sequence.proposer
    for _ in range(steps):
        for member in list(sequence.members):
            if not member.pending or (member.group is not None and not member.group.ready(member)):
                continue
            if guesses is not None and member.pending == 1 and not member.drafted:
                room = member.limit - member.new_tokens - 1
                found = guesses.propose(member.ids, room) if guesser is None else guesser.propose(member.ids, guesses.pace.length(room))
                member.propose(found)
            if rng is not None and member.pending > member.rows and rng.random() < 0.5:
                member.computed += rng.randrange(1, member.pending - member.rows + 1)
                continue
            count = member.rows
            member.computed = len(member.ids)
            ids = member.ids
            reason = member.advance(np.stack([rule(ids[: len(ids) - count + 1 + i]) for i in range(count)]))
            if reason is not None:
                return sequence.complete(reason)
    raise AssertionError("it does not end")


def complete(prompt, rule, *, guesser=None, rng=None, **options):
    made = RunningRequest(request(prompt, **options), TOKENIZER, context=CONTEXT)
    if made.request.speculation.kind == "ngram" or guesser is not None:
        made.proposer = Proposer.ngram(made.request.speculation)
    return run(made, rule, guesser=guesser, rng=rng)


# ---- an executor behind the host


class DelayedExecutor:
    """A device with lookahead 1: it draws by itself, behind the host on its own thread, and keeps every launch in order, as a stream does.

    delay_s: how long a step takes at most, at random. fail_at: launch -> what `result` raises. stream: runs the launches; one thread, or
    `AtOnce`, then a launch that fails raises at once.
    """

    def __init__(self, model, cache, *, delay_s=0.0, draws=lambda state: True, lookahead=1, stream=None) -> None:
        self.prepared = 0
        self.model, self.cache, self.delay_s, self._draws = model, cache, delay_s, draws
        self.fail_at: dict[int, BaseException] = {}
        self.with_sources = self.ahead = self.unread = self.launches = self.same = 0
        self.closed, self.lookahead, self._latest = False, lookahead, None
        self._chance = random.Random(0)
        self._stream = stream or ThreadPoolExecutor(1)
        self._drawn: list[int] = []  # the tokens of the last launch, in the device's memory
        self._last: list[object] = []

    def can_draw(self, state, *, drafts=False):
        return self._draws(state)

    @property
    def drawn(self):
        return None if self._latest is None or self._latest.exception() else torch.tensor(self._drawn, dtype=torch.int32)

    def launch(self, step):
        assert self.unread <= max(1, self.lookahead), "too many steps in flight"
        self.ahead += self.unread
        batch = Batch(
            **{
                name: getattr(step.batch, name).clone()
                for name in step.batch.__dataclass_fields__
                if name not in ("long", "adapters", "pictures")
            }
        )
        sources = None if step.sources is None else step.sources.copy()
        self.with_sources += sources is not None
        states = [draw and draw.state for draw in step.draws]
        if step.same:
            self.same += 1
            assert all(a is b for a, b in zip(states, self._last)) and len(states) == len(self._last)
        self._last = states
        number, self.launches = self.launches, self.launches + 1
        future = self._latest = self._stream.submit(self._run, number, batch, sources, list(step.draws), step.drafts)
        self.unread += 1
        return _Ticket(self, number, future)

    def _run(self, number, batch, sources, draws, drafts):
        if self.delay_s:
            time.sleep(self._chance.random() * self.delay_s)
        if number in self.fail_at:
            raise self.fail_at[number]
        if sources is not None:
            tokens = self._drawn if drafts is None else drafts.tolist()
            for t in np.flatnonzero(sources >= 0):
                batch.input_ids.numpy()[t] = tokens[sources[t]]
        with torch.inference_mode():
            logits = self.model.forward(batch, self.cache).to(torch.float32).numpy()
        results = [drawn(row, draw) if draw else row for row, draw in zip(logits, draws)]
        self._drawn = [-1 if isinstance(one, np.ndarray) else one.id for one in results]
        return results

    def copy(self, source, target):
        def work():
            with torch.inference_mode():
                for pool in (*self.cache.k, *self.cache.v):
                    pool[target].copy_(pool[source])

        self._stream.submit(work)

    def close(self):
        self._stream.shutdown()
        self.closed = True


def drawn(row, draw):
    """What a device draws."""
    state = SamplerState(replace(draw.state.params, seed=draw.state.seed))
    state.count = draw.number
    return sample_row(row, state, top=draw.top)


class FakeRounds:
    """Rounds of a draft model as a GPU runs them: the first step has two tokens of each sequence, the tokens stay on the device."""

    def __init__(self, model, cache) -> None:
        self.model, self.cache, self.prepared, self.rounds, self.closed = model, cache, 0, [], False
        self.followed = 0

    def launch(self, places, steps, began):
        size = self.cache.spec.page_size
        found = [[] for _ in places]
        for step in range(steps):
            spans = [
                SequenceSlice(
                    ids=[*place.ids, *mine][0 if step == 0 else -1 :], start=place.start + (step + 1 if step else 0), pages=place.pages
                )
                for place, mine in zip(places, found)
            ]
            with torch.inference_mode():
                logits = self.model.forward(Batch.build(spans, page_size=size), self.cache).to(torch.float32).numpy()
            for row, place, mine in zip(logits, places, found):
                mine.append(drawn(row, place.draw._replace(number=place.draw.number + step)).id)
        self.rounds.append(FakeRound(places, found, began))
        return self.rounds[-1]

    def follow(self, launched, drawn, sequences):
        self.followed += 1
        assert sequences == launched.rows
        places, steps = [], len(launched.found[0])
        for row, (place, mine) in enumerate(zip(launched.places, launched.found)):
            text = [place.ids[-1], *drawn[row * (1 + steps) :][: 1 + steps].tolist()]
            accepted = 0
            while accepted < steps and text[1 + accepted] == mine[accepted]:
                accepted += 1
            draw = place.draw._replace(number=place.draw.number + accepted + 1)
            places.append(place._replace(ids=text[accepted : accepted + 2], start=place.start + accepted + 1, draw=draw))
        return self.launch(places, steps, 0.0)

    def close(self):
        self.closed = True


class FakeRound:
    def __init__(self, places, found, began):
        self.places = places
        tokens = [[place.ids[-1], *mine] for place, mine in zip(places, found)]
        self.ids, self.rows, self.began = torch.tensor(tokens, dtype=torch.int32).T.flatten(), len(found), began
        self.found, self.reads = found, 0

    def tokens(self, row):
        self.reads += 1
        return self.found[row]

    def seconds(self):
        return 1e-6


class _Ticket:
    def __init__(self, executor, number, future):
        self._executor, self.number, self._future = executor, number, future

    def result(self):
        self._executor.unread -= 1
        return self._future.result()


class AtOnce:
    """A stream that runs each launch before `submit` returns."""

    def submit(self, work, *arguments):
        future = Future()
        future.set_result(work(*arguments))
        return future

    def shutdown(self):
        pass
