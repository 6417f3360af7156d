"""Reuse of pages on a model whose next token depends on what it reads in them: a wrong page gives a wrong text."""

import time

import pytest

from exl2nb.cache.spec import PAGE_SIZE
from exl2nb.core.errors import GenerationError
from exl2nb.generator.sequence import RunningRequest

from . import fakes
from .fakes import greedy, ids, prompt


@pytest.fixture
def running(running):
    """Engines on rows of 512 logits: these tests run many steps."""

    def make(*, step_s=0.0, **options):
        return running(fakes.FakeModel(vocab=512, step_s=step_s), **options)

    return make


def ask(engine, text, count=8, **kwargs):
    return engine.submit(greedy(text, count, stream=False, **kwargs))


def right(engine, text, count=8, **kwargs):
    completion = ask(engine, text, count, **kwargs).result()
    assert ids(completion) == fakes.expected(engine.model, text, count)
    return completion.timings.reused_tokens


@pytest.mark.parametrize("length", [1, 5, 20, 255, 256, 257, 511, 512, 513, 1000])
def test_again(running, length):
    """All but the last token is there: full pages by reference, the rest by a copy."""
    engine, text = running(), prompt(1, length)
    assert right(engine, text) == 0
    before = sum(tokens for _, tokens in engine.model.steps)
    assert right(engine, text) == (length - 1 if length > 8 else 0)
    assert sum(tokens for _, tokens in engine.model.steps) - before == (8 if length > 8 else length + 7)


def test_turns_of_a_conversation(running):
    """Every turn continues the last answer: only what is new is computed."""
    engine, talk = running(), prompt(1, 100)
    for turn in range(12):
        known = len(talk) - 1
        talk += prompt(turn + 2, 30)
        reused = right(engine, talk, 40)
        assert reused == (0 if turn == 0 else known)
        talk += fakes.expected(engine.model, talk, 40)
    assert engine.pages.evictions == 0


def test_branches_of_one_beginning(running):
    engine, begin = running(), prompt(1, 300)
    right(engine, begin, 1)
    for i in range(5):
        assert right(engine, begin + prompt(i + 2, 50)) == 300
    together = [ask(engine, begin + prompt(i + 20, 50), 30) for i in range(5)]
    for i, handle in enumerate(together):
        assert ids(handle.result()) == fakes.expected(engine.model, begin + prompt(i + 20, 50), 30)


def test_the_same_prompt_many_times_at_once_is_computed_once(running):
    engine, text = running(step_s=0.001), prompt(1, 900)
    handles = [ask(engine, text, 3) for _ in range(8)]
    for handle in handles:
        assert ids(handle.result()) == fakes.expected(engine.model, text, 3)
    assert sum(tokens for _, tokens in engine.model.steps) <= 900 + 8 * 3
    assert sorted(handle.result().timings.reused_tokens for handle in handles) == [0, *[899] * 7]


def test_switched_off(running):
    engine = running()
    engine.pager.reuse = False
    assert right(engine, prompt(1, 600)) == right(engine, prompt(1, 600)) == 0
    assert engine.pages.num_cached == 0


def test_the_oldest_is_evicted_first(running):
    engine = running(pages=6)
    texts = [prompt(i, 2 * PAGE_SIZE) for i in range(4)]
    for text in texts[:2]:
        right(engine, text, 1)
    assert right(engine, texts[0], 1) == 2 * PAGE_SIZE - 1  # used again, so the other one is older
    right(engine, texts[2], 1)
    right(engine, texts[3], 1)
    assert engine.pages.evictions > 0
    assert right(engine, texts[1], 1) < PAGE_SIZE


def test_pages_of_a_failed_request_are_not_reused(running):
    engine, text = running(), prompt(1, 601)
    engine.model.nan_after = 600
    handle = ask(engine, text)
    with pytest.raises(GenerationError):
        handle.result(10)
    engine.model.nan_after = None
    assert right(engine, text) == 0


def test_another_salt_shares_no_pages(running):
    engine, text = running(), prompt(1, 300)
    right(engine, text)
    sequence = RunningRequest(greedy(text, 3), engine.tokenizer, context=engine.context)
    sequence.salt = "adapter"
    (handle,) = engine.submit_all([sequence])
    assert handle.result().timings.reused_tokens == 0


def test_more_requests_than_pages_are_preempted_and_resumed(running):
    """Each fits alone, together they do not: the later ones are preempted, and every text is that of the rule."""
    engine = running(step_s=0.0005, pages=5)
    handles = [ask(engine, prompt(i, 200), 400) for i in range(5)]
    done = [handle.result() for handle in handles]
    for i, completion in enumerate(done):
        assert ids(completion) == fakes.expected(engine.model, prompt(i, 200), 400)
    assert engine.loop.scheduler.preemptions > 0
    assert sum(c.timings.preemptions for c in done) == engine.loop.scheduler.preemptions
    assert done[0].timings.preemptions == 0


def test_seeded_draws_survive_preemption(running):
    def run(engine):
        requests = [greedy(prompt(i, 100), 450, seed=i, temperature=1.5, repetition_penalty=1.2) for i in range(4)]
        return [handle.result() for handle in [engine.submit(one) for one in requests]]

    tight, roomy = running(pages=4), running(pages=16)
    assert [c.tokens for c in run(tight)] == [c.tokens for c in run(roomy)]
    assert tight.loop.scheduler.preemptions > 0 == roomy.loop.scheduler.preemptions


def test_a_large_max_tokens_takes_no_pages_ahead(running):
    engine = running(step_s=0.001, pages=8)
    greedy = [ask(engine, prompt(i, 10), 2000) for i in range(6)]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not any(sequences == 6 for sequences, _ in engine.model.steps):
        time.sleep(0.01)
    for handle in greedy:
        handle.cancel()
    assert max(sequences for sequences, _ in engine.model.steps) == 6


def test_priority(running):
    engine = running(step_s=0.001, max_sequences=1)
    low = ask(engine, prompt(1, 50), 300)
    engine.model.entered.wait(5)
    waiting = [ask(engine, prompt(i, 5), 5) for i in (2, 3)]
    urgent = ask(engine, prompt(4, 50), 5, priority=5)
    assert ids(urgent.result()) == fakes.expected(engine.model, prompt(4, 50), 5)
    assert not low.done
    assert not waiting[0].done
    completion = low.result()
    assert ids(completion) == fakes.expected(engine.model, prompt(1, 50), 300)
    assert completion.timings.preemptions == 1
    for i, handle in zip((2, 3), waiting):
        assert ids(handle.result()) == fakes.expected(engine.model, prompt(i, 5), 5)


def test_a_crowd_of_one_caller_does_not_keep_another_waiting(running):
    engine = running(step_s=0.001, max_sequences=2)
    crowd = object()
    with fakes.held(engine):
        many = [engine.submit(greedy(prompt(i, 5), 10), group=crowd) for i in range(30)]
        single = ask(engine, prompt(99, 5), 10)
    single.result()
    assert sum(handle.done for handle in many) <= 6
    for handle in many:
        handle.result()


def test_decodes_go_on_beside_a_long_prompt(running):
    """Every step with a piece of the prompt has the other request's token too."""
    engine = running(step_s=0.002)
    first = ask(engine, [5], 200)
    engine.model.entered.wait(5)
    assert ids(ask(engine, prompt(1, 2000), 2).result()) == fakes.expected(engine.model, prompt(1, 2000), 2)
    assert ids(first.result()) == fakes.expected(engine.model, [5], 200)
    pieces = [(sequences, tokens) for sequences, tokens in engine.model.steps if tokens > 1]
    assert sum(sequences == 2 for sequences, _ in pieces) >= len(pieces) - 1 > 2
    assert max(tokens for _, tokens in pieces) <= 513
