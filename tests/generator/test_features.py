"""Generation features on a running engine: pages, threads and neighbours change nothing. On a rule, then on the demo model."""

import random
import threading
import time

import pytest

import exl2nb as ex
from exl2nb.core.errors import ContextOverflow, Exl2Error, OptionError
from exl2nb.generator.engine import make_requests
from exl2nb.generator.request import Request
from exl2nb.generator.speculation import Speculation

from . import fakes


@pytest.mark.parametrize("length", [5, 255, 256, 257, 600])
@pytest.mark.parametrize("options", [{"beams": 3, "n": 3}, {"cfg_scale": 1.5, "negative_ids": (9, 8, 7)}])
def test_beams_and_guidance_as_without_an_engine(running, options, length):
    request = fakes.request(fakes.prompt(1, length), max_tokens=12, temperature=0, **options)
    wanted = fakes.run(make_requests(request, fakes.TOKENIZER, context=4096)[0], fakes.RULE)
    engine = running()
    got = engine.submit(request).result(20)
    assert (got.text, fakes.ids(got), got.score) == (wanted.text, fakes.ids(wanted), wanted.score)
    assert [one.text for one in got.beams] == [one.text for one in wanted.beams]


def test_beams_in_a_small_cache(running):
    """Two places and few pages: beams wait for each other, are preempted and go on."""
    request = fakes.request(fakes.prompt(2, 300), max_tokens=8, beams=4, n=2)
    wanted = running().submit(request).result(20)
    for sizes in ({"pages": 6, "max_sequences": 2}, {"pages": 7, "max_sequences": 1}):
        engine = running(**sizes)
        handles = [engine.submit(request) for _ in range(2)]
        others = [engine.submit(fakes.greedy(fakes.prompt(3, 260), 5)) for _ in range(2)]
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
    done = engine.submit(fakes.request(fakes.prompt(4, 600), max_tokens=6, beams=4)).result(20)
    assert len(done.tokens) == 6
    assert sum(seen) == 600 + 4 * 5, "the prompt ran once, every beam one token a step"


def test_samples_share_the_pages_of_the_prompt(running):
    engine = running(pages=16)
    requests = [fakes.request(fakes.prompt(5, 600), max_tokens=5, seed=seed) for seed in range(6)]
    alone = [running().submit(request).result(20).text for request in requests]
    handles = engine.submit_many(requests)
    assert [handle.result(20).text for handle in handles] == alone
    assert sum(tokens for _, tokens in engine.model.steps) <= 600 + 6 * (5 + 8 + 88), "at most the last page was run again"


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3, "top_k": 20}])
def test_ngram_speculation_on_the_engine(running, options):
    def repeating(ids):
        row = fakes.RULE(ids) * 0
        row[3 + (ids[-1] * 3) % 7] = 8.0
        return row

    model = fakes.FakeModel()
    model.logits_after = repeating
    engine = running(model)
    texts = {}
    for kind in ("off", "ngram"):
        before = len(model.steps)
        speculation = Speculation(kind=kind, adaptive=False)
        request = fakes.request(fakes.prompt(6, 250), max_tokens=80, speculation=speculation, **options)
        done = engine.submit(request).result(20)
        texts[kind] = (fakes.ids(done), len(model.steps) - before)
    assert texts["off"][0] == texts["ngram"][0]
    assert len(texts["off"][0]) == 80
    if options == {"temperature": 0}:
        assert texts["ngram"][1] < texts["off"][1] / 2
        assert done.speculation.rate > 0.7
        assert done.speculation.steps + done.speculation.plain_steps + done.speculation.accepted == 80


def gated(model, which):
    """Steps for which `which(batch)` holds set the first event and wait for the second."""
    inner, begun, gate = model.forward, threading.Event(), threading.Event()

    def forward(batch, cache):
        if which(batch):
            begun.set()
            assert gate.wait(20)
        return inner(batch, cache)

    model.forward = forward
    return begun, gate


@pytest.mark.parametrize("way", ["cancel", "drop", "timeout"])
def test_ending_while_draft_tokens_are_verified(running, way):
    """A step with draft tokens runs when the request ends: none of them is in the answer, and all pages come back."""
    model = fakes.FakeModel()
    model.logits_after = lambda ids: fakes.RULE([3])
    verifying, gate = gated(model, lambda batch: len(batch.logit_rows) > 1)
    engine = running(model)
    more = {"timeout_s": 0.4} if way == "timeout" else {}
    request = fakes.request([5, 6, 5, 6], max_tokens=100, temperature=0, speculation=Speculation(kind="ngram", adaptive=False), **more)
    handle = engine.submit(request)
    assert verifying.wait(20), "draft tokens were proposed and are being verified"
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
        assert fakes.ids(done) == fakes.expected(model, [5, 6, 5, 6], len(done.tokens))
        assert known <= len(done.tokens) <= known + 8, "what was verified when it ended, and nothing later"
        assert done.speculation.accepted + done.speculation.steps + done.speculation.plain_steps == len(done.tokens)
    assert engine.wait_idle(20)
    after = engine.submit(fakes.greedy([7, 8], 6)).result(20)
    assert fakes.ids(after) == fakes.expected(model, [7, 8], 6)


def test_cancel_while_the_prompt_runs(running):
    """In the middle of a prompt, beside a neighbour that decodes: it ends without a token, the neighbour goes on as if alone."""
    model = fakes.FakeModel()
    prefilling, gate = gated(model, lambda batch: len(batch.input_ids) > 8)
    engine = running(model)
    neighbour = engine.submit(fakes.greedy([9], 40))
    handle = engine.submit(fakes.greedy(fakes.prompt(8, 700), 9))
    assert prefilling.wait(20)
    assert handle.progress == (0, 700), "the first piece of the prompt is being run"
    handle.cancel()
    gate.set()
    done = handle.result(20)
    assert (done.finish_reason, done.tokens) == ("cancelled", ())
    assert sum(tokens for _, tokens in model.steps) < 700
    assert fakes.ids(neighbour.result(20)) == fakes.expected(model, [9], 40)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stop": [5000]}, OptionError, "stop is 5000; expected a text or a token id from 0 to 4095"),
        ({"negative_ids": (5000,), "cfg_scale": 2.0}, OptionError, "the negative prompt holds ids outside 0 to 4095"),
        ({"speculation": "draft"}, OptionError, "speculation is 'draft' and the model has no draft model; load it with draft="),
        ({"negative_ids": (5,) * 5000, "cfg_scale": 2.0}, ContextOverflow, "the negative prompt has 5000 tokens"),
    ],
)
def test_refusals(running, options, error, message):
    with pytest.raises(error, match=message):
        running().submit(fakes.request([5], **options))


def mixed(rng: random.Random, number: int) -> Request:
    """One of many kinds of request, on one of two long prompts or a short one."""
    prefix = fakes.prompt(rng.choice([100, 101]), 300) if rng.random() < 0.7 else []
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
    return fakes.request([*prefix, *fakes.prompt(number, rng.randint(1, 40))], max_tokens=rng.randint(1, 24), **kinds[number % len(kinds)])


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
        assert fakes.bare(got) == fakes.bare(want)
        assert got.rewinds == want.rewinds
    assert max(sequences for sequences, _ in engine.model.steps) > 4


# ---- on the demo model

STORY = "The old man went down to the harbour in the evening and looked at the boats that had come in with the tide. " * 10
LIST = "Apples, pears and plums; bread, salt and oil; a lamp, a rope and a knife. " * 11
KINDS = [
    {"temperature": 0},
    {"temperature": 0, "stop": [" the", "."]},
    {"temperature": 0, "repetition_penalty": 1.2, "top_logprobs": 3},
    {"seed": 1},
    {"seed": 2, "temperature": 0.8, "top_p": 0.9},
    {"seed": 3, "top_k": 40, "min_p": 0.05, "temperature": 1.3},
    {"seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"seed": 5, "mirostat": True},
    {"seed": 6, "typical_p": 0.9, "min_tokens": 5},
    {"seed": 7, "dry_multiplier": 0.8},
    {"temperature": 0, "banned_strings": [" the", " a"]},
    {"seed": 8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 0, "token_healing": True},
    {"temperature": 0, "speculation": "ngram"},
    {"seed": 9, "regex": "[a-z ]{5,20}\\."},
    {"temperature": 0, "schema": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}},
    {"seed": 10, "choice": [" cat", " dog", " horse"], "min_p": 0.02},
    {"seed": 11, "grammar": 'root ::= ("ab" | "cd")+ "!"', "repetition_penalty": 1.1},
    {"seed": 12, "negative_prompt": "He", "cfg_scale": 1.5},
    {"beams": 3},
]


def told(completion):
    """The tokens, whoever proposed them: how many draft tokens are proposed depends on the time that steps take."""
    return [token._replace(source=token.source.replace("ngram", "target")) for token in completion.tokens]


def test_together_as_alone():
    """Requests of every kind, together in a cache too small for them."""
    pytest.importorskip("llguidance")
    requests = [
        {"prompt": f"{(STORY, LIST)[i % 2]}Then number {i} said", "max_tokens": 6 + i % 5 * 4, **KINDS[i // 2]}
        for i in range(2 * len(KINDS))
    ]
    with ex.demo(progress=None, context=768, cache_tokens=2048) as llm:
        llm.cache.reuse = False
        alone = [llm.generate(**one) for one in requests]
        llm.cache.reuse = True
        job = llm.batch(requests)
        together = job.run()
        assert not job.errors
        for i, one in enumerate(alone):
            assert together[i].text == one.text, KINDS[i // 2]
            assert told(together[i]) == told(one), KINDS[i // 2]
            assert together[i].finish_reason == one.finish_reason
        assert sum(one.timings.reused_tokens for one in together.values()) > 10 * 200
        assert llm.engine.pages.num_free == llm.engine.pages.num_pages


PROMPTS = ["It was", "The cat sat. The cat sat. The", "Once upon a time there lived " * 12, "x", "He said that the " * 30]
ANYTHING = {
    "temperature": [0, 0.5, 1.7], "top_k": [1, 5, 50], "top_p": [0.5, 0.95], "min_p": [0.05], "typical_p": [0.9], "tfs": [0.9],
    "stop": [".", [" the", ","], 264], "banned_strings": [" a", [" the", "was"]], "token_healing": [True], "top_logprobs": [3],
    "return_logits": [True], "repetition_penalty": [1.2], "presence_penalty": [0.5], "penalty_range": [20], "dry_multiplier": [0.8],
    "xtc_probability": [0.5], "mirostat": [True], "smoothing_factor": [0.3], "temperature_last": [True], "skew": [0.3],
    "logit_bias": [{264: 2.0}], "banned_tokens": [[13]], "allowed_tokens": [list(range(100, 900))], "negative_prompt": ["He"],
    "speculation": ["ngram", {"kind": "ngram", "adaptive": False}], "regex": ["[a-z ]{2,20}"], "choice": [[" yes", " no way"]],
    "schema": [{"type": "integer"}], "ignore_eos": [True], "min_tokens": [1], "priority": [-2, 2], "max_temp": [1.5], "top_a": [0.2],
    "cfg_scale": [1.4], "beams": [3],
}  # fmt: skip


def started(llm, prompt, options):
    """A handle, or the error that refuses the request."""
    try:
        return llm.stream(prompt, **options)
    except Exl2Error as error:
        return error


def outcome(found):
    """Tokens of a handle and how it ended, or the kind of error."""
    try:
        done = found.result() if not isinstance(found, Exl2Error) else None
    except Exl2Error as error:
        found, done = error, None
    return type(found).__name__ if done is None else (done.text, told(done), done.finish_reason, done.stopped_by)


@pytest.mark.filterwarnings("error")
def test_any_options_together_as_alone():
    """Random options: contradicting ones are a named error, alone and beside others; the rest gives the same tokens both ways."""
    pytest.importorskip("llguidance")
    chance, refused = random.Random(0), 0
    with ex.demo(progress=None, cache_tokens=2048, context=512) as llm:
        for _ in range(10):
            some = [
                (chance.choice(PROMPTS), {name: chance.choice(values) for name, values in ANYTHING.items() if chance.random() < 0.14})
                for _ in range(6)
            ]
            some = [(prompt, {"max_tokens": chance.randrange(1, 14), "seed": chance.randrange(5), **options}) for prompt, options in some]
            alone = [outcome(started(llm, *one)) for one in some]
            together = [started(llm, *one) for one in some]
            for one, want, found in zip(some, alone, together):
                assert outcome(found) == want, one
            refused += sum(isinstance(one, str) for one in alone)
        assert 5 < refused < 50
        assert llm.engine.wait_idle(5)
        assert llm.engine.pages.num_free == llm.engine.pages.num_pages
