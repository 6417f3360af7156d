"""A device that runs ahead of the host gives the same texts, and loses no page whatever happens while a step is in flight."""

import functools
import random
import time

import pytest

from exl2nb.core.errors import EngineClosed, GenerationError
from exl2nb.generator.engine import Engine
from exl2nb.generator.request import Request
from exl2nb.sampling.params import SamplingParams

from . import fakes
from .fakes import greedy, ids, prompt


@pytest.fixture
def running(running):
    """Engines whose steps run on a `fakes.DelayedExecutor`."""

    def make(*, delay_s=0.0, draws=lambda state: True, **options):
        executor = functools.partial(fakes.DelayedExecutor, delay_s=delay_s, draws=draws)
        return running(fakes.FakeModel(vocab=512), executor=executor, **options)

    return make


def test_one_request_runs_ahead(running):
    engine = running()
    completion = engine.submit(greedy(prompt(1, 300), 40, top_logprobs=3)).result()
    assert ids(completion) == fakes.expected(engine.model, prompt(1, 300), 40)
    assert all(len(token.top) == 3 and token.rank == 1 for token in completion.tokens)
    executor = engine.executor
    assert executor.with_sources == 39
    assert executor.same >= 37
    assert executor.ahead >= 39
    assert engine.loop.steps == len(engine.model.steps) == 39 + sum(tokens > 1 for _, tokens in engine.model.steps)


def test_at_most_one_token_is_computed_past_an_end(running):
    engine = running()
    rule = fakes.expected(engine.model, prompt(1, 10), 9)
    engine.tokenizer.eos_ids = frozenset(rule[5:6])
    completion = engine.submit(greedy(prompt(1, 10), 60, ignore_eos=False)).result()
    first = rule.index(rule[5])
    assert (ids(completion), completion.finish_reason) == (rule[:first], "eos")
    assert engine.wait_idle()
    assert len(engine.model.steps) <= first + 2


def test_seeded_draws_as_on_the_host(running):
    def several(engine):
        handles = [
            engine.submit(greedy(prompt(i, 5 + 60 * i), 25, temperature=1.2, top_p=0.9, seed=i, stream=i % 2 == 0)) for i in range(6)
        ]
        return [[(t.id, t.text, t.logprob, t.rank) for t in handle.result().tokens] for handle in handles]

    host = fakes.engine(fakes.FakeModel(vocab=512))
    try:
        assert several(running(delay_s=0.002)) == several(host)
    finally:
        host.close()


def test_rows_the_device_cannot_draw_take_part(running):
    """Some requests are drawn by the host: while one of them runs nothing is launched ahead, and afterwards it is again."""
    engine = running(draws=lambda state: state.params.top_k != 7)
    device = engine.submit(greedy([5], 90))
    host = engine.submit(greedy([6], 10, temperature=1.0, top_k=7, seed=3))
    alone = running().submit(greedy([6], 10, temperature=1.0, top_k=7, seed=3)).result()
    assert host.result().tokens == alone.tokens
    assert ids(device.result()) == fakes.expected(engine.model, [5], 90)
    assert engine.executor.with_sources > 20


def test_crowd_in_a_small_cache(running):
    """Arrivals, ends, cancellations and preemptions while steps are in flight; shared beginnings; the cache is far too small."""
    engine, chance = running(delay_s=0.0004, pages=7, max_sequences=6), random.Random(1)
    begin = prompt(0, 600)
    jobs = []
    for i in range(60):
        text = begin[: chance.choice([3, 255, 256, 257, 400, 511, 512, 600])] + prompt(i, chance.randrange(1, 60))
        count = chance.randrange(1, 70)
        jobs.append((text, count, engine.submit(greedy(text, count, stream=chance.random() < 0.5, priority=chance.choice([0, 0, 1])))))
        if chance.random() < 0.3:
            jobs.pop(chance.randrange(len(jobs)))[2].cancel()
        time.sleep(chance.random() * 0.003)
    for text, count, handle in jobs:
        assert ids(handle.result()) == fakes.expected(engine.model, text, count)
    assert engine.wait_idle()
    assert engine.loop.scheduler.preemptions > 0
    assert engine.executor.with_sources > 50
    assert engine.pages.num_free == 7


def test_a_failed_result_ends_its_requests_alone(running):
    engine = running()
    engine.executor.fail_at[5] = RuntimeError("boom")
    doomed = engine.submit(greedy([5], 50))
    with pytest.raises(GenerationError, match="boom"):
        doomed.result()
    assert ids(engine.submit(greedy([6], 12)).result()) == fakes.expected(engine.model, [6], 12)


def test_close_and_exclusive_with_a_step_in_flight(running):
    engine = running(delay_s=0.004)
    handle = engine.submit(greedy([5], 3000))
    next(handle)
    with fakes.held(engine):
        assert engine.executor.unread == 0
        launches = engine.executor.launches
        time.sleep(0.02)
        assert engine.executor.launches == launches
    next(handle)
    engine.close()
    with pytest.raises(EngineClosed):
        list(handle)


@pytest.mark.cpu  # the delayed executor draws as the host does
def test_the_demo_model_gives_the_same_tokens(llm):
    prompts = ["It was", "The old man said", "She", "He went to the sea and"]
    sampling = [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.9), SamplingParams(temperature=0)]
    requests = [Request(prompt_ids=tuple(llm.tokenizer.encode(p)), sampling=s, max_tokens=24) for p, s in zip(prompts, sampling)]
    host = [llm.engine.submit(one).result() for one in requests]
    with fakes.held(llm.engine):
        ahead = Engine(llm.model, llm.tokenizer, llm.model.cache_spec(2048), executor=fakes.DelayedExecutor)
        device = [handle.result() for handle in [ahead.submit(one) for one in requests]]
        ahead.executor.model = ahead.model = fakes.FakeModel()  # the model belongs to the other engine
        ahead.close()
    assert [c.tokens for c in device] == [c.tokens for c in host]
