"""A loaded model on the real demo weights, measured against Transformers running the same weights."""

import asyncio
import gc
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

import exl2nb as ex
from exl2nb.core.errors import EngineClosed, GenerationError, OptionError, TokenizerError
from exl2nb.llm import functions
from exl2nb.sampling.explanation import Explanation

DEMO = Path(ex.__file__).parent / "demo_model"
EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
PROMPTS = ["It was a dark and stormy night", "The old man", "“My dear,” said she,", "In the year 1805", "He opened the door and"]


@pytest.fixture(scope="module")
def exact():
    with ex.load(DEMO, cache="fp32", progress=None) as llm:
        yield llm


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(prompt, exact, reference, near):
    """Teacher-forced: after the tokens before it, every token is their best one too, but for a tie, and as probable."""
    tokens = exact.generate(prompt, max_tokens=48, temperature=0).tokens
    ids = exact.tokenizer.encode(prompt)
    with torch.no_grad():
        logits = reference(torch.tensor([[*ids, *(token.id for token in tokens)]])).logits[0, len(ids) - 1 : -1]
    assert len(tokens) > 20
    for token, row, logprobs in zip(tokens, logits, logits.log_softmax(-1)):
        assert float(row.max() - row[token.id]) < 3 * near
        assert abs(token.logprob - float(logprobs[token.id])) < near
        assert math.isclose(token.prob, math.exp(token.logprob))


def test_alone_or_together_the_same_bits(llm):
    options = {"seed": 11, "temperature": 0.9, "top_p": 0.95, "max_tokens": 30, "ignore_eos": True}
    alone = [llm.generate(prompt, **options) for prompt in PROMPTS]
    together = llm.generate(PROMPTS, **options)
    long = "The rain fell. " * 100
    crowd = llm.generate([long, PROMPTS[0], long[:500]], **options)
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert crowd[1].tokens == alone[0].tokens
    assert len({c.text for c in alone}) == len(PROMPTS)
    assert [c.prompt for c in together] == PROMPTS


@pytest.mark.parametrize("cache", ["q4", "k8v4", "fp8", "k4v16"])
def test_quantised_cache_alone_or_together_the_same_bits(cache):
    with ex.load(EXL2, cache=cache) as llm:
        per_number = {"q4": 4.5, "k8v4": 6.5, "fp8": 8.5, "k4v16": 10.25}[cache]
        assert llm.cache_bytes == 4096 * 12 * 2 * 2 * 64 * per_number / 8
        assert f"MiB of {'q6' if cache == 'k8v4' else cache} cache" in repr(llm)
        options = {"seed": 5, "max_tokens": 40, "ignore_eos": True}
        alone = [llm.generate(prompt, **options).tokens for prompt in PROMPTS[:3]]
        together = llm.generate([*PROMPTS[:3], "The rain fell. " * 60], **options)
        assert [c.tokens for c in together[:3]] == alone
    with ex.load(EXL2) as plain:
        assert plain.generate(PROMPTS[0], **options).tokens != alone[0]


def test_compare_shows_what_a_cache_costs(llm):
    options = {"rows": 2, "length": 128, "progress": None}
    losses = [ex.compare(llm, llm, cache=mode, **options).kl_mean for mode in ("fp32", "q8", "q4")]
    assert losses[0] == 0 < losses[1] < losses[2] < 0.05


def test_stream_is_generate(llm):
    options = {"temperature": 0, "max_tokens": 40, "stop": ["\n\n", "zzz"]}
    handle = llm.stream(PROMPTS[1], **options)
    text = "".join(chunk.text for chunk in handle)
    assert text == llm.generate(PROMPTS[1], **options).text == handle.completion.text


def test_seed_is_reported(llm):
    first = llm.generate(PROMPTS[0], max_tokens=20)
    assert llm.generate(PROMPTS[0], max_tokens=20, seed=first.seed).tokens == first.tokens


def test_token_ids_as_prompt(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    text = llm.generate(PROMPTS[0], max_tokens=5, temperature=0).text
    for form in (ids, tuple(ids), np.array(ids), torch.tensor(ids)):
        assert llm.generate(form, max_tokens=5, temperature=0).text == text


def test_async(llm):
    async def work():
        streamed = "".join([chunk.text async for chunk in llm.astream(PROMPTS[0], max_tokens=10, temperature=0)])
        both = await asyncio.gather(*(llm.agenerate(p, max_tokens=10, temperature=0) for p in PROMPTS[:2]))
        return streamed, both

    async def several():
        options = {"max_tokens": 6, "seed": 4}
        return await llm.agenerate(PROMPTS[:2], **options), await llm.agenerate(PROMPTS[0], n=3, **options)

    streamed, both = asyncio.run(work())
    assert streamed == both[0].text
    pair, samples = asyncio.run(several())
    assert [one.text for one in pair] == [llm.generate(p, max_tokens=6, seed=4).text for p in PROMPTS[:2]]
    assert [one.text for one in samples] == [one.text for one in llm.generate(PROMPTS[0], n=3, max_tokens=6, seed=4)]
    assert [c.text for c in both] == [c.text for c in llm.generate(PROMPTS[:2], max_tokens=10, temperature=0)]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}narrator:{% endif %}"
)


def test_chat(llm):
    assert llm.chat("a", template="{{ x }}", template_options={"x": "It was"}, max_tokens=1).tokens
    talk = [{"role": "user", "content": "Hello"}]
    assert llm.render_chat(talk, template=TEMPLATE) == "<s>user: Hello\nnarrator:"
    answer = llm.chat(talk, template=TEMPLATE, max_tokens=8, temperature=0)
    ids = llm.tokenizer.encode("user: Hello\nnarrator:")  # with BOS, once
    assert answer.timings.prompt_tokens == len(ids)
    assert answer.text == llm.generate(ids, max_tokens=8, temperature=0).text
    streamed = llm.chat("Hello", stream=True, template=TEMPLATE, max_tokens=8, temperature=0)
    assert "".join(chunk.text for chunk in streamed) == answer.text
    assert asyncio.run(llm.achat(talk, template=TEMPLATE, max_tokens=8, temperature=0)).text == answer.text


def test_repr_and_properties(llm):
    assert repr(llm).startswith("LLM(demo_model: LlamaForCausalLM, 12 layers, ")
    assert "<table>" in llm._repr_html_()
    assert (llm.bpw, llm.context, llm.name) == (16.0, 1024, "demo_model")
    assert llm.weight_bytes > 20e6
    assert llm.cache_bytes == 4096 * 12 * 2 * 2 * 64 * 2


def copy_of(source, folder):
    folder.mkdir(exist_ok=True)
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def test_tokenizer_missing_or_of_another_model(tmp_path):
    folder = copy_of(DEMO, tmp_path / "model")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        ex.load(folder)
    larger = json.loads(text)
    larger["model"]["vocab"]["extra"] = 4096
    (folder / "tokenizer.json").write_text(json.dumps(larger))
    with pytest.raises(TokenizerError, match="token 4096, the model's vocabulary ends at 4095"):
        ex.load(folder)


def test_added_tokens_beyond_the_embedding(tmp_path):
    """A text model may keep the image token of its family, which no row of the embedding belongs to."""
    folder = copy_of(DEMO, tmp_path / "model")
    other = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text())
    other.add_special_tokens(["<image_soft_token>"])
    for name, text in (("tokenizer.json", other.to_str()), ("generation_config.json", json.dumps({"eos_token_id": [2, 4096]}))):
        (folder / name).unlink()
        (folder / name).write_text(text)
    with ex.load(folder, progress=None) as llm:
        assert llm.tokenizer.eos_ids == {2}
        assert llm.generate("It was", max_tokens=3, min_tokens=2, temperature=0).text
        with pytest.raises(OptionError, match="the prompt holds ids outside 0 to 4095"):
            llm.generate("a <image_soft_token>", max_tokens=1)
        assert llm.chat("a <image_soft_token>", template="chatml", max_tokens=1).tokens, "the words of a user are text"
        assert llm.generate("It was", choice=["<image_soft_token>"], max_tokens=20).text == "<image_soft_token>"


def test_two_models_at_once_and_close():
    threads = set(threading.enumerate())
    with ex.demo() as one, ex.load(EXL2, context=512, cache_tokens=600) as two:
        handles = [m.stream(PROMPTS[0], max_tokens=40, temperature=0, ignore_eos=True) for m in (one, two)]
        texts = ["".join(chunk.text for chunk in handle) for handle in handles]
        assert texts[0] == one.generate(PROMPTS[0], max_tokens=40, temperature=0, ignore_eos=True).text
        assert texts[1] == two.generate(PROMPTS[0], max_tokens=40, temperature=0, ignore_eos=True).text
        assert two.context == 512
        assert 3.9 < two.bpw < 4.2
    with pytest.raises(EngineClosed, match="load it again"):
        one.generate("x")
    one.close()
    assert "closed" in repr(one)
    assert set(threading.enumerate()) <= threads  # the idle threads of other models may have ended


def test_dropping_the_model_frees_everything():
    threads = set(threading.enumerate())
    stream = ex.demo().stream("It was", max_tokens=5, temperature=0)  # the stream keeps its model
    assert "".join(chunk.text for chunk in stream)
    engine = stream.owner.engine
    del stream
    gc.collect()
    assert engine.closed
    assert engine.cache.k == []
    assert set(threading.enumerate()) <= threads


def test_compare(llm):
    result = ex.compare(llm, EXL2, rows=2, length=128)
    again = ex.compare(DEMO, EXL2, (DEMO / "evaluation.txt").read_text(), rows=2, length=128)
    assert 0.01 < float(result.kl.mean()) < 0.5
    assert torch.equal(result.kl, again.kl)
    assert float(ex.compare(llm, llm, rows=1, length=64).kl.max()) == 0.0
    ids = result.ids[0].tolist()
    assert torch.equal(ex.compare(llm, EXL2, ids).kl[0], result.kl[0]), "ids are one row"


def test_demo_with_bpw_converts_once(tmp_path, monkeypatch):
    calls = []

    def fake_convert(src, dst, **kwargs):
        calls.append(kwargs["bpw"])
        copy_of(EXL2, dst)

    monkeypatch.setattr(functions.Path, "home", classmethod(lambda cls: tmp_path))
    monkeypatch.setattr(functions, "convert", fake_convert)
    for _ in range(2):
        with ex.demo(bpw=4) as llm:
            assert llm.generate("It was", max_tokens=2).text
    assert calls == [4]


def test_import_touches_no_torch():
    code = "import sys, exl2nb; assert 'torch' not in sys.modules; exl2nb.load; assert 'torch' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("error", "message"), [(SystemExit(3), "raised SystemExit: 3"), (RuntimeError("oops"), "oops")])
def test_a_function_that_exits_or_raises_ends_its_own_request(llm, error, message):
    def fail(draw):
        raise error

    other = llm.stream("It was", max_tokens=40, ignore_eos=True)
    with pytest.raises(GenerationError, match=message):
        llm.generate("He", max_tokens=4, post_sampling=fail)
    assert len(other.result().tokens) == 40


def test_an_event_function_that_fails_is_not_called_again(llm):
    handle, calls = llm.stream("It was", max_tokens=20, ignore_eos=True), []

    def tell():
        calls.append(1)
        raise ZeroDivisionError

    handle.on_event(tell)
    assert len(handle.result().tokens) == 20
    assert len(calls) <= 1
    assert len(llm.generate("He", max_tokens=2).tokens) <= 2


def test_explanations_are_not_kept(llm):
    def alive():
        gc.collect()
        return sum(type(one) is Explanation for one in gc.get_objects())

    before = alive()
    for at in range(5):
        llm.explain("It was", at=at, top_p=0.9)
    assert alive() <= before + 1


def test_explain_shows_the_tokens_of_the_answer(llm):
    """A banned text is taken back; the tokens behind it are those of the answer."""
    options = {"temperature": 0, "banned_strings": [" a very"]}
    tokens = [token.text for token in llm.generate("It was", max_tokens=3, **options).tokens]
    plain = [token.text for token in llm.generate("It was", max_tokens=3, temperature=0).tokens]
    assert tokens != plain
    for at, text in enumerate(tokens):
        assert f"drew {text!r}" in str(llm.explain("It was", at=at, **options))


def test_explain_takes_what_generate_takes(llm):
    options = {"negative_prompt": "He", "cfg_scale": 2.0, "temperature": 0}
    drawn = llm.generate("It was", max_tokens=3, **options).tokens
    for at, token in enumerate(drawn):
        assert llm.explain("It was", at=at, **options).token == token.id
    assert [token.id for token in drawn] != [token.id for token in llm.generate("It was", max_tokens=3, temperature=0).tokens]


@pytest.mark.parametrize("options", [{"tfs": 0.9}, {"mirostat": True}, {"typical_p": 0.9}, {"top_a": 0.1}])
@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 5e-324])
def test_almost_no_temperature_is_greedy(llm, temperature, options):
    want = llm.generate("It was", temperature=0, max_tokens=4).text
    assert llm.generate("It was", temperature=temperature, max_tokens=4, seed=1, **options).text == want
