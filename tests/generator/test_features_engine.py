"""The same features on the running engine: pages, threads and neighbours change nothing."""

import random
import threading
import time

import pytest

from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.generator.request import Request
from exl2nb.generator.speculation import Speculation

from . import fakes, stepper

RULE = fakes.FakeModel().logits_after


@pytest.fixture
def running():
    made = []

    def make(model=None, **kwargs):
        made.append(fakes.engine(model, **kwargs))
        return made[-1]

    yield make
    for engine in made:
        assert engine.wait_idle(5)
        assert engine.pages.num_free == engine.pages.num_pages
        engine.close()


def prompt(seed, length):
    return random.Random(seed).choices(range(3, fakes.VOCAB), k=length)


@pytest.mark.parametrize("length", [5, 255, 256, 257, 600])
@pytest.mark.parametrize("options", [{"beams": 3, "n": 3}, {"cfg_scale": 1.5, "negative_ids": (9, 8, 7)}])
def test_groups_are_what_they_are_without_an_engine(running, options, length):
    from exl2nb.generator.engine import sequences_for

    request = stepper.request(prompt(1, length), max_tokens=12, temperature=0, **options)
    wanted = stepper.run(sequences_for(request, stepper.TOKENIZER, context=4096)[0], RULE)
    engine = running()
    got = engine.submit(request).result(20)
    assert (got.text, stepper.ids(got), got.score) == (wanted.text, stepper.ids(wanted), wanted.score)
    assert [one.text for one in got.beams] == [one.text for one in wanted.beams]


def test_groups_where_nothing_fits(running):
    """Two places and few pages: members wait for each other, give way and go on."""
    request = stepper.request(prompt(2, 300), max_tokens=8, beams=4, n=2)
    wanted = running().submit(request).result(20)
    for sizes in ({"pages": 6, "max_sequences": 2}, {"pages": 7, "max_sequences": 1}):
        engine = running(**sizes)
        handles = [engine.submit(request) for _ in range(2)]
        others = [engine.submit(stepper.request(prompt(3, 260), max_tokens=5, temperature=0)) for _ in range(2)]
        assert [handle.result(30).text for handle in handles] == [wanted.text] * 2
        assert len({handle.result(30).text for handle in others}) == 1
    with pytest.raises(ContextOverflow, match="the request needs"):
        running(pages=4).submit(request)


def test_beams_share_the_pages_of_the_prompt(running):
    engine = running(pages=16)
    seen = []
    inner = engine.model.forward

    def forward(batch, cache):
        seen.append(len(batch.input_ids))
        assert engine.pages.num_pages - engine.pages.num_free <= 3 + 4 * 2
        return inner(batch, cache)

    engine.model.forward = forward
    done = engine.submit(stepper.request(prompt(4, 600), max_tokens=6, beams=4)).result(20)
    assert len(done.tokens) == 6
    assert sum(seen) == 600 + 4 * 5, "the prompt ran once, every beam one token a step"


def test_samples_share_the_pages_of_the_prompt(running):
    engine = running(pages=16)
    requests = [stepper.request(prompt(5, 600), max_tokens=5, seed=seed) for seed in range(6)]
    alone = [running().submit(request).result(20).text for request in requests]
    handles = engine.submit_many(requests)
    assert [handle.result(20).text for handle in handles] == alone
    assert sum(tokens for _, tokens in engine.model.steps) <= 600 + 6 * (5 + 8 + 88), "at most the last page was run again"


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3, "top_k": 20}])
def test_ngram_speculation_on_the_engine(running, options):
    def repeating(ids):
        row = RULE(ids) * 0
        row[3 + (ids[-1] * 3) % 7] = 8.0
        return row

    model = fakes.FakeModel()
    model.logits_after = repeating
    engine = running(model)
    texts = {}
    for kind in ("off", "ngram"):
        before = len(model.steps)
        speculation = Speculation(kind=kind, adaptive=False)
        request = stepper.request(prompt(6, 250), max_tokens=80, speculation=speculation, **options)
        done = engine.submit(request).result(20)
        texts[kind] = (stepper.ids(done), len(model.steps) - before)
    assert texts["off"][0] == texts["ngram"][0]
    assert len(texts["off"][0]) == 80
    if options == {"temperature": 0}:
        assert texts["ngram"][1] < texts["off"][1] / 2
        assert done.speculation.rate > 0.7
        assert done.speculation.steps + done.speculation.plain_steps + done.speculation.accepted == 80


@pytest.mark.parametrize("way", ["cancel", "drop", "timeout"])
def test_ending_while_guesses_are_verified(running, way):
    """A step with guesses in it runs when the request ends: none of them is in the answer, and all pages come back."""
    model = fakes.FakeModel()
    model.logits_after = lambda ids: RULE([3])
    inner, verifying, gate = model.forward, threading.Event(), threading.Event()

    def forward(batch, cache):
        if len(batch.logit_rows) > 1:
            verifying.set()
            assert gate.wait(20)
        return inner(batch, cache)

    model.forward = forward
    engine = running(model)
    more = {"timeout_s": 0.4} if way == "timeout" else {}
    request = stepper.request([5, 6, 5, 6], max_tokens=100, temperature=0, speculation=Speculation(kind="ngram", adaptive=False), **more)
    handle = engine.submit(request)
    assert verifying.wait(20), "guesses were made and are being verified"
    chunk = handle.poll()
    known = len(chunk.tokens) if chunk else 0
    if way == "cancel":
        handle.cancel()
    elif way == "drop":
        del handle
    else:
        time.sleep(0.4)
    gate.set()
    if way != "drop":
        done = handle.result(20)
        assert done.finish_reason == {"cancel": "cancelled", "timeout": "timeout"}[way]
        assert stepper.ids(done) == fakes.expected(model, [5, 6, 5, 6], len(done.tokens))
        assert known <= len(done.tokens) <= known + 8, "what was verified when it ended, and nothing later"
        assert done.speculation.accepted + done.speculation.steps + done.speculation.plain_steps == len(done.tokens)
    assert engine.wait_idle(20)
    assert engine.pages.num_free == engine.pages.num_pages
    after = engine.submit(stepper.request([7, 8], max_tokens=6, temperature=0)).result(20)
    assert stepper.ids(after) == fakes.expected(model, [7, 8], 6)


def test_cancel_while_the_prompt_runs(running):
    """In the middle of a prompt, beside a neighbour that decodes: it ends without a token, the neighbour goes on as if alone."""
    model = fakes.FakeModel()
    inner, prefilling, gate = model.forward, threading.Event(), threading.Event()

    def forward(batch, cache):
        if len(batch.input_ids) > 8:
            prefilling.set()
            assert gate.wait(20)
        return inner(batch, cache)

    model.forward = forward
    engine = running(model)
    neighbour = engine.submit(stepper.request([9], max_tokens=40, temperature=0))
    handle = engine.submit(stepper.request(prompt(8, 700), max_tokens=9, temperature=0))
    assert prefilling.wait(20)
    assert handle.progress == (0, 700), "the first piece of the prompt is being run"
    handle.cancel()
    gate.set()
    done = handle.result(20)
    assert (done.finish_reason, done.tokens) == ("cancelled", ())
    assert sum(tokens for _, tokens in model.steps) < 700
    assert stepper.ids(neighbour.result(20)) == fakes.expected(model, [9], 40)


def test_refusals(running):
    engine = running()
    with pytest.raises(OptionError, match="stop is 5000; expected a text or a token id from 0 to 4095"):
        engine.submit(stepper.request([5], stop=[5000]))
    with pytest.raises(OptionError, match="the negative prompt holds ids outside 0 to 4095"):
        engine.submit(stepper.request([5], negative_ids=(5000,), cfg_scale=2.0))
    with pytest.raises(OptionError, match="speculation is 'draft' and the model has no draft model"):
        engine.submit(stepper.request([5], speculation="draft"))
    with pytest.raises(ContextOverflow, match="the negative prompt has 5000 tokens"):
        engine.submit(stepper.request([5], negative_ids=(5,) * 5000, cfg_scale=2.0))


def mixed(rng: random.Random, number: int) -> Request:
    """One of many kinds of request, on one of two long prompts or a short one."""
    prefix = prompt(rng.choice([100, 101]), 300) if rng.random() < 0.7 else []
    kinds = [
        {"temperature": 0},
        {"seed": number, "temperature": 0.8, "top_p": 0.9},
        {"seed": number, "top_k": 30, "repetition_penalty": 1.3, "speculation": "ngram"},
        {"seed": number, "min_p": 0.05, "stop": ["e", "the"], "min_tokens": 4},
        {"temperature": 0, "speculation": "ngram", "banned_strings": ["a"]},
        {"seed": number, "presence_penalty": 0.7, "banned_strings": ["in", "s"]},
        {"seed": number, "negative_ids": (7, 8), "cfg_scale": 1.4},
        {"beams": 2, "length_penalty": 0.5},
        {"seed": number, "token_healing": True, "top_logprobs": 3},
        {"seed": number, "mirostat": True, "speculation": "ngram"},
        {"seed": number, "dry_multiplier": 0.8, "stop": [9, 10, 11]},
    ]
    return stepper.request([*prefix, *prompt(number, rng.randint(1, 40))], max_tokens=rng.randint(1, 24), **kinds[number % len(kinds)])


@pytest.mark.parametrize("pages", [64, 14])
def test_32_requests_together_are_each_alone(running, pages):
    rng = random.Random(pages)
    requests = [mixed(rng, number) for number in range(32)]
    alone = running(pages=64, max_sequences=2)
    wanted = [alone.submit(request).result(30) for request in requests]
    engine = running(fakes.FakeModel(step_s=0.0002), pages=pages)
    handles = [engine.submit(request) for request in requests]
    for want, handle, request in zip(wanted, handles, requests):
        got = handle.result(60)
        assert (got.text, got.finish_reason, got.stopped_by) == (want.text, want.finish_reason, want.stopped_by), request
        assert [t._replace(source="") for t in got.tokens] == [t._replace(source="") for t in want.tokens]
        assert got.rewinds == want.rewinds
    assert max(sequences for sequences, _ in engine.model.steps) > 4
