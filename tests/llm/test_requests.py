"""Generation features through the public API, on the demo model."""

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import exl2nb as ex
from exl2nb.core.errors import ContextOverflow, OptionError, TokenizerError
from exl2nb.generator.speculation import Speculation

DEMO = Path(ex.__file__).parent / "demo_model"
EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
PROMPT = "It was a dark and stormy night"


@pytest.fixture(scope="module")
def llm():
    with ex.demo(progress=None, cache_tokens=8192) as model:
        yield model
        assert model.engine.wait_idle(5)
        assert model.engine.pages.num_free == model.engine.pages.num_pages


def test_samples(llm):
    five = llm.generate(PROMPT, n=5, seed=7, max_tokens=12)
    assert [one.seed for one in five] == [7, 8, 9, 10, 11]
    assert len({one.text for one in five}) > 3
    assert five[3].text == llm.generate(PROMPT, seed=10, max_tokens=12).text
    assert all(one.prompt == PROMPT for one in five)
    many = llm.stream(PROMPT, n=3, seed=7, max_tokens=12)
    texts = ["", "", ""]
    for number, chunk in many.chunks():
        texts[number] += chunk.text
    assert texts == [one.text for one in five[:3]] == [one.text for one in many.results()]
    assert many.done and len(many) == 3 and repr(many) == "Handles(3 requests, 3 done)"


def test_streams_of_several_prompts_in_an_event_loop(llm):
    async def run():
        texts = ["", ""]
        handles = llm.stream([PROMPT, "The old man"], temperature=0, max_tokens=10)
        async for number, chunk in handles.achunks():
            texts[number] += chunk.text
        return texts, [one.text for one in await handles.aresults()]

    shown, whole = asyncio.run(run())
    assert shown == whole


def test_leaving_a_loop_over_many_cancels_all(llm):
    handles = llm.stream(PROMPT, n=3, max_tokens=500, ignore_eos=True)
    for _ in handles.chunks():
        break
    assert {one.finish_reason for one in handles.results(5)} == {"cancelled"}


def test_beams_and_guidance_are_those_of_transformers(llm):
    reference = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = torch.tensor([llm.tokenizer.encode(PROMPT)])
    mine = llm.generate(PROMPT, beams=4, n=2, max_tokens=12)
    with torch.no_grad():
        theirs = reference.generate(ids, num_beams=4, num_return_sequences=2, max_new_tokens=12, do_sample=False)
    assert [one.text for one in mine] == [llm.tokenizer.decode(row[ids.shape[1] :].tolist()) for row in theirs]
    assert mine[0].score >= mine[1].score
    negative = "He was"
    guided = llm.generate(PROMPT, negative_prompt=negative, cfg_scale=1.6, temperature=0, max_tokens=12)
    with torch.no_grad():
        theirs = reference.generate(
            ids, guidance_scale=1.6, negative_prompt_ids=torch.tensor([llm.tokenizer.encode(negative)]), max_new_tokens=12, do_sample=False
        )
    assert guided.text == llm.tokenizer.decode(theirs[0, ids.shape[1] :].tolist())


def test_ngram_speculation_repeats_a_text(llm):
    text = "The quick brown fox jumps over the lazy dog near the bank of the river. "
    options = {"temperature": 0, "max_tokens": 60}
    plain = llm.generate(text * 3, **options)
    done = llm.generate(text * 3, speculation={"kind": "ngram", "adaptive": False}, **options)
    assert llm.generate(text * 3, speculation="ngram", **options).text == plain.text
    assert done.tokens != () and done.text == plain.text
    assert done.speculation.tokens_per_step > 2
    assert {token.source for token in done.tokens} == {"target", "ngram"}
    assert "tokens per step" in repr(done)


def test_a_draft_model(llm):
    """The fp16 model verifies what its own 4-bit version guesses."""
    for draft in (EXL2, ex.load(EXL2, progress=None)):
        with ex.load(DEMO, draft=draft, progress=None) as fast:
            for options in ({"temperature": 0}, {"seed": 3, "top_p": 0.9, "stop": ["\n"]}):
                plain = llm.generate(PROMPT, max_tokens=40, **options)
                done = fast.generate(PROMPT, max_tokens=40, speculation=Speculation(kind="draft", adaptive=False), **options)
                assert done.text == plain.text
                assert done.speculation.accepted > 10
            assert fast.generate(PROMPT, max_tokens=4, speculation="off").speculation is None
        if isinstance(draft, ex.LLM):
            draft.close()


def test_a_draft_with_another_tokenizer(tmp_path):
    for path in EXL2.iterdir():
        (tmp_path / path.name).symlink_to(path)
    target = tmp_path / "tokenizer.json"
    value = json.loads(target.read_text())
    target.unlink()
    vocabulary = value["model"]["vocab"]
    one, two = [text for text, i in vocabulary.items() if i in (1000, 1001)]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    target.write_text(json.dumps(value))
    with pytest.raises(TokenizerError, match="token 1000 is"):
        ex.load(DEMO, draft=tmp_path, progress=None)


def test_raw_logits_and_where_tokens_come_from(llm):
    done = llm.generate(PROMPT, max_tokens=6, temperature=0, return_logits=True)
    assert done.logits.shape == (6, llm.config.vocab_size)
    assert done.logits.argmax(axis=1).tolist() == [token.id for token in done.tokens]
    forced = llm.generate("Yes or no?", choice=["maybe"], temperature=0)
    assert forced.text == "maybe" and "forced" in {token.source for token in forced.tokens}


def mixed(number: int) -> tuple[str, dict]:
    rng = random.Random(number)
    prefix = ["The rain fell. " * 40, "The old man had a boat and a dog. " * 30, ""][number % 3]
    kinds = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"speculation": "ngram", "top_k": 40, "repetition_penalty": 1.2},
        {"speculation": "ngram", "temperature": 0},
        {"stop": [".", "the"], "min_tokens": 5},
        {"banned_strings": ["the", "and"], "temperature": 0.7},
        {"negative_prompt": "He", "cfg_scale": 1.5},
        {"beams": 3},
        {"token_healing": True, "min_p": 0.05},
        {"regex": "[a-z ]{5,20}\\."},
        {"choice": [" cat", " dog", " horse"]},
    ]
    options = {"max_tokens": rng.randint(3, 20), **kinds[number % len(kinds)]}
    if "beams" not in options:
        options["seed"] = number
    return prefix + f"Number {number} said", options


def test_32_mixed_requests_together_are_each_alone(llm):
    requests = [mixed(number) for number in range(32)]
    alone = [llm.generate(prompt, **options) for prompt, options in requests]
    handles = [llm.stream(prompt, **options) for prompt, options in requests]
    for want, handle in zip(alone, handles):
        got = handle.result(60)
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
        assert [(t.id, t.logprob, t.rank) for t in got.tokens] == [(t.id, t.logprob, t.rank) for t in want.tokens]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda m: m.generate(["a", "b"], n=2), "generate: n is 2 and there are 2 prompts"),
        (lambda m: m.generate("a", n=0), "generate: n is 0"),
        (lambda m: m.stream("a", n=2, beams=2), "stream: n is 2; expected one prompt and no beams"),
        (lambda m: m.generate("a", beams=2, n=3), "n is 3 and beams 2; expected at most as many"),
        (lambda m: m.astream("a", n=2), "n is 2 and beams 1; .*; samples of one prompt: generate or stream with n="),
        (lambda m: asyncio.run(m.agenerate(["a", "b"], n=2)), "agenerate: n is 2 and there are 2 prompts"),
        (lambda m: setattr(m.cache, "reuse", "no"), "cache.reuse is 'no'; expected True or False"),
        (lambda m: m.batch(5), "batch: prompts is '5'; expected several"),
        (lambda m: ex.Job(5), "Job: '5' runs no requests; expected a loaded model"),
        (lambda m: ex.demo(draft=5, progress=None), "draft is '5'; expected a directory, a hub id or a loaded model"),
        (lambda m: m.generate("a", negative_prompt=3.5), "negative_prompt is '3.5'"),
        (lambda m: m.generate("a", speculation="draft"), "the model has no draft model; load it with draft="),
        (lambda m: m.generate("a", n=2, seed=-1), "seed is -1"),
    ],
)
def test_refusals(llm, ask, words):
    with pytest.raises(OptionError, match=words):
        ask(llm)


def test_what_is_larger_than_the_cache_is_refused_with_what_is_shared_counted_once():
    with ex.demo(context=512, cache_tokens=1024, progress=None) as small:
        ids = small.tokenizer.encode("The rain fell. ")[:1] + [5] * 259  # a page and four tokens
        assert len(small.generate(ids, beams=3, max_tokens=20).tokens) == 20  # 1 page of all, 3 of their own
        words = r"needs 348 tokens in the cache \(272 of the prompt and up to 80 new of 4 texts in step\), 5 pages of 256; .* or beams"
        with pytest.raises(ContextOverflow, match=words):
            small.generate(ids, beams=4, max_tokens=20)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}])
def test_structure_with_guesses_and_bans(llm, options):
    """Every verified row goes through the grammar's mask, and a rewind takes the grammar back too."""
    ask = {"max_tokens": 40, "regex": "([a-z]{2,6} ){3,8}end", **options}
    prompt = "the cat and the dog and the cat and the dog and"
    with ex.load(DEMO, draft=EXL2, progress=None) as fast:
        for more in ({}, {"banned_strings": ["the", "an"]}):
            plain = llm.generate(prompt, **ask, **more)
            for kind in ("ngram", "draft"):
                done = fast.generate(prompt, **ask, **more, speculation=Speculation(kind=kind, adaptive=False))
                assert (done.text, done.finish_reason, done.rewinds) == (plain.text, plain.finish_reason, plain.rewinds)
                assert done.speculation.proposed > 0 or kind == "ngram"
            assert not more or not any(text in plain.text for text in ("the", "an"))
