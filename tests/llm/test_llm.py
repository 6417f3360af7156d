"""A loaded model on the real demo weights, measured against Transformers running the same weights."""

import asyncio
import gc
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import exl2nb as ex
from exl2nb.core.errors import (
    ContextOverflow,
    DeviceError,
    EngineClosed,
    ModelNotFound,
    OptionError,
    TokenizerError,
)
from exl2nb.llm import functions

DEMO = Path(ex.__file__).parent / "demo_model"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
PROMPTS = ["It was a dark and stormy night", "The old man", "“My dear,” said she,", "In the year 1805", "He opened the door and"]


@pytest.fixture(scope="module")
def llm():
    with ex.demo() as model:
        yield model
        assert model.engine.wait_idle(5)
        assert model.engine.pages.num_free == model.engine.pages.num_pages


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


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
    with pytest.raises(OptionError, match="compare: unknown cache mode 'q2'"):
        ex.compare(llm, llm, cache="q2")


def test_stream_is_generate(llm):
    options = {"temperature": 0, "max_tokens": 40, "stop": ["\n\n", "zzz"]}
    handle = llm.stream(PROMPTS[1], **options)
    text = "".join(chunk.text for chunk in handle)
    assert text == llm.generate(PROMPTS[1], **options).text == handle.completion.text


def test_seed_is_told(llm):
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
    with pytest.raises(TokenizerError, match="no chat template"):
        llm.chat("Hello")
    talk = [{"role": "user", "content": "Hello"}]
    assert llm.render_chat(talk, template=TEMPLATE) == "<s>user: Hello\nnarrator:"
    answer = llm.chat(talk, template=TEMPLATE, max_tokens=8, temperature=0)
    ids = llm.tokenizer.encode("user: Hello\nnarrator:")  # with BOS, once
    assert answer.timings.prompt_tokens == len(ids)
    assert answer.text == llm.generate(ids, max_tokens=8, temperature=0).text
    streamed = llm.chat("Hello", stream=True, template=TEMPLATE, max_tokens=8, temperature=0)
    assert "".join(chunk.text for chunk in streamed) == answer.text
    assert asyncio.run(llm.achat(talk, template=TEMPLATE, max_tokens=8, temperature=0)).text == answer.text


def test_it_says_what_it_is(llm):
    assert repr(llm).startswith("LLM(demo_model: LlamaForCausalLM, 12 layers, ")
    assert "<table>" in llm._repr_html_()
    assert (llm.bpw, llm.context, llm.name) == (16.0, 1024, "demo_model")
    assert llm.weight_bytes > 20e6
    assert llm.cache_bytes == 4096 * 12 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda m: m.generate("x", temprature=1), OptionError, "generate: unknown keyword 'temprature'; did you mean 'temperature'"),
        (lambda m: m.stream("x", max_tokens=0), OptionError, "max_tokens"),
        (lambda m: m.generate(5), OptionError, "prompt is '5'"),
        (lambda m: m.generate([]), OptionError, "no tokens"),
        (lambda m: m.generate("word " * 3000), ContextOverflow, "the prompt has .* tokens and the context 1024"),
        (lambda m: m.generate([99999]), OptionError, "0 to 4095"),
        (lambda m: m.chat([], template="x"), OptionError, "messages"),
        (lambda m: m.chat("x", template=5), OptionError, "template is '5'; expected a text"),
        (lambda m: m.chat("x", template="x", template_options=5), OptionError, "template_options is 5; expected a dict"),
        (lambda m: m.chat("x", template="x", tools="look"), OptionError, "tools is 'look'; expected a list of JSON schemas"),
        (lambda m: m.generate("x", beams=2, return_logits=True), OptionError, "beams=2 and return_logits exclude each other"),
        (lambda m: m.generate(b"It was"), OptionError, "expected a text or a list of token ids"),
        (lambda m: m.generate([[5, 6], [7]]), OptionError, "several prompts of ids run together in llm.batch"),
        (lambda m: m.generate(torch.tensor([[5, 6]])), OptionError, "expected a text or a list of token ids"),
        (lambda m: m.generate(torch.tensor([0.5])), OptionError, "expected a text or a list of token ids"),
        (lambda m: m.batch("It was"), OptionError, "batch: prompts is 'It was'; expected several"),
        (lambda m: m.generate("x", on_chunk=5), OptionError, "on_chunk is 5; expected a function"),
        (lambda m: m.generate("x", allowed_tokens=[]), OptionError, "allowed_tokens is empty"),
        (lambda m: m.generate("x", token_healing="no"), OptionError, "token_healing is 'no'; expected True or False"),
        (lambda m: m.generate("x", ignore_eos="no"), OptionError, "ignore_eos is 'no'; expected True or False"),
        (lambda m: m.generate("x", return_logits=1), OptionError, "return_logits is 1; expected True or False"),
    ],
)
def test_bad_requests_leave_it_usable(llm, call, error, match):
    with pytest.raises(error, match=match):
        call(llm)
    assert llm.generate("It was", max_tokens=2, temperature=0).text


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"cach": "fp16"}, OptionError, "load: unknown keyword 'cach'; did you mean 'cache'"),
        ({"cache": "q3"}, OptionError, "load: unknown cache mode 'q3'; known: fp32, fp16, fp8, q8, q6, q4, or bits"),
        pytest.param({"device": "cuda"}, DeviceError, "cannot be used: .*use device='cpu'", marks=NO_GPU),
        ({"device": "tpu"}, OptionError, "device is 'tpu'"),
        ({"context": 0}, OptionError, "context"),
        ({"max_sequences": True}, OptionError, "max_sequences"),
        ({"revision": "main"}, OptionError, "revision"),
    ],
)
def test_bad_load(kwargs, error, match):
    with pytest.raises(error, match=match):
        ex.load(DEMO, **kwargs)


def test_what_is_no_model(tmp_path):
    with pytest.raises(ModelNotFound):
        ex.load(tmp_path / "nothing")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        ex.load(tmp_path)


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
    import tokenizers

    other = tokenizers.Tokenizer.from_str(text)
    other.add_tokens(["<extra>"])
    (folder / "tokenizer.json").write_text(other.to_str())
    with pytest.raises(TokenizerError, match="token 4096, the model's vocabulary ends at 4095"):
        ex.load(folder)


def test_two_models_at_once_and_close():
    threads = set(threading.enumerate())
    with ex.demo() as one, ex.load(EXL2, context=512, cache_tokens=600) as two:
        handles = [m.stream(PROMPTS[0], max_tokens=40, temperature=0, ignore_eos=True) for m in (one, two)]
        texts = ["".join(chunk.text for chunk in handle) for handle in handles]
        assert texts[0] == one.generate(PROMPTS[0], max_tokens=40, temperature=0, ignore_eos=True).text
        assert texts[1] == two.generate(PROMPTS[0], max_tokens=40, temperature=0, ignore_eos=True).text
        assert two.context == 512
        assert 3.9 < two.bpw < 4.2
    with pytest.raises(EngineClosed):
        one.generate("x")
    one.close()
    assert "closed" in repr(one)
    assert set(threading.enumerate()) <= threads  # the idle threads of other models may have ended


def test_dropping_it_gives_everything_back():
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
    with pytest.raises(OptionError, match="expected a text or a list of token ids"):
        ex.compare(llm, EXL2, 7)
    assert llm.generate("It was", max_tokens=2, temperature=0).text


def test_inspect():
    assert ex.inspect(EXL2).architecture == "LlamaForCausalLM"


def test_convert_checks_its_keywords(tmp_path):
    with pytest.raises(OptionError, match="convert: unknown keyword 'head_bit'; did you mean 'head_bits'"):
        ex.convert(DEMO, tmp_path / "x", bpw=4, head_bit=6)
    with pytest.raises(OptionError, match="bpw"):
        ex.convert(DEMO, tmp_path / "x", bpw=9)
    with pytest.raises(OptionError, match="bpw"):
        ex.demo(bpw=1.5)


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
