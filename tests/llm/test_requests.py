"""Generation features through the public API, on the demo model."""

import asyncio
import gc
import json
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import ContextOverflow, TokenizerError
from exl2nb.generator.speculation import Speculation

DEMO = Path(ex.__file__).parent / "demo_model"
EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
PROMPT = "It was a dark and stormy night"


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


def test_beams_and_guidance_are_those_of_transformers(llm, reference):
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
    """The fp16 model verifies draft tokens of its own 4-bit version."""
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


def test_a_request_larger_than_the_cache_counts_shared_pages_once():
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


def test_beams_cut_short_say_so(llm):
    found = llm.generate("It was", beams=6, n=6, max_tokens=400, stop=["sky"], early_stopping="never", length_penalty=10.0, timeout_s=0.1)
    assert [one.finish_reason for one in found] == ["timeout"] * 6


def test_a_draft_model_is_kept_alive():
    with ex.demo(progress=None, draft=ex.demo(progress=None)) as llm:
        gc.collect()
        found = llm.generate("It was", max_tokens=30, temperature=0, speculation={"kind": "draft", "adaptive": False}).speculation
        assert found.accepted > 0
