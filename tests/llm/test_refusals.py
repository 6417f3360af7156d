"""Calls that are refused: the error says what is wrong, and the model works on."""

import asyncio
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import ContextOverflow, DeviceError, ModelNotFound, OptionError, TokenizerError

DEMO = Path(ex.__file__).parent / "demo_model"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.generate("x", temprature=1), OptionError, "generate: unknown keyword 'temprature'; did you mean 'temperature'"),
        (lambda m: m.stream("x", max_tokens=0), OptionError, "max_tokens"),
        (lambda m: m.generate(5), OptionError, "prompt is '5'"),
        (lambda m: m.generate([]), OptionError, "no tokens"),
        (lambda m: m.generate("word " * 3000), ContextOverflow, "the prompt has .* tokens and the context 1024"),
        (lambda m: m.generate(" " * 5_000_000), ContextOverflow, r"generate: the prompt has 5000000 characters, at least \d+ tokens"),
        (lambda m: m.generate("x", negative_prompt=" " * 5_000_000), ContextOverflow, "the negative_prompt has 5000000 characters"),
        (
            lambda m: m.chat("a" * 5_000_000, template="{{ messages[0].content }}"),
            ContextOverflow,
            "chat: the prompt has 5000000 characters",
        ),
        (lambda m: m.score(" " * 5_000_000), ContextOverflow, "score: the text has 5000000 characters"),
        (lambda m: m.generate([99999]), OptionError, "0 to 4095"),
        (lambda m: ex.demo(max_sequences=None), OptionError, "max_sequences is None"),
        (lambda m: m.chat([], template="{{ 1 }}"), OptionError, "messages"),
        (lambda m: m.chat("x", template=5), OptionError, "template is '5'; expected Jinja source"),
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
        (lambda m: m.generate(["a", "b"], n=2), OptionError, "generate: n is 2 and there are 2 prompts"),
        (lambda m: m.generate("a", n=0), OptionError, "generate: n is 0"),
        (lambda m: m.stream("a", n=2, beams=2), OptionError, "stream: n is 2; expected one prompt and no beams"),
        (lambda m: m.astream("a", n=2), OptionError, "n is 2 and beams 1; .*; samples of one prompt: generate or stream with n="),
        (lambda m: asyncio.run(m.agenerate(["a", "b"], n=2)), OptionError, "agenerate: n is 2 and there are 2 prompts"),
        (lambda m: setattr(m.cache, "reuse", "no"), OptionError, "cache.reuse is 'no'; expected True or False"),
        (lambda m: m.batch(5), OptionError, "batch: prompts is '5'; expected several"),
        (lambda m: ex.Job(5), OptionError, "Job: '5' runs no requests; expected a loaded model"),
        (lambda m: ex.demo(draft=5, progress=None), OptionError, "draft is '5'; expected a directory, a hub id or a loaded model"),
        (lambda m: m.generate("a", negative_prompt=3.5), OptionError, "negative_prompt is '3.5'"),
        (lambda m: m.generate("a", n=2, seed=-1), OptionError, "seed is -1"),
        (lambda m: m.score(""), OptionError, "the text has 1 tokens; expected at least two"),
        (lambda m: m.score([1, 99999]), OptionError, "found id 99999"),
        (lambda m: m.hidden([1, 1 << 80]), OptionError, "hidden: text holds a number that is no token id"),
        (lambda m: m.score(7), OptionError, "score: text is '7'"),
        (lambda m: m.score([5] * 2000), ContextOverflow, "the model's context is 1024"),
        (lambda m: m.choose("a", ["b"]), OptionError, "expected at least two different texts"),
        (lambda m: m.choose("a", ["b", "b"]), OptionError, "expected at least two different texts"),
        (lambda m: m.choose("a", ["b", "c"], normalise="x"), OptionError, "normalise is 'x'; expected one of sum, mean"),
        (lambda m: m.choose([], ["b", "c"]), OptionError, "the prompt is empty"),
        (lambda m: m.hidden("a b", ["layers.99.output"]), OptionError, "no point 'layers.99.output'"),
        (lambda m: ex.load(None), OptionError, "the model is None; expected a directory, or a hub id"),
        (lambda m: ex.plan(5), OptionError, "the model is 5; expected a directory"),
        (lambda m: ex.inspect(b""), OptionError, "the model is b''; expected a directory"),
        (lambda m: ex.compare(5, m, "It was"), OptionError, "the model is 5"),
        (lambda m: m.choose("The", 5), OptionError, "choose: options is 5"),
        (lambda m: m.hidden("The", 5), OptionError, "hidden: no point 5"),
        (lambda m: m.hidden("The", ["logits", b"x"]), OptionError, "hidden: no point b'x'"),
        (lambda m: m.cache.save(5), OptionError, "cache.save: path is 5; expected a path"),
        (lambda m: m.cache.load(5), OptionError, "cache.load: path is 5; expected a path"),
        (lambda m: m.conversation().save(5), OptionError, "Conversation.save: path is 5; expected a path"),
        (lambda m: m.load_conversation(5), OptionError, "Conversation.load: path is 5; expected a path"),
        (lambda m: m.job().add("The", id=[1]), OptionError, r"job: id is \[1\]; expected a text"),
        (lambda m: m.generate("The", speculation={"adaptive": "no"}), OptionError, "adaptive is 'no'; expected True or False"),
        (
            lambda m: m.generate("It was", **{"stream": True}),
            OptionError,
            r"unknown keyword 'stream'; to take tokens as they come: llm\.stream",
        ),
        (lambda m: m.generate("It was", **{"where": 1}), OptionError, "unknown keyword 'where'"),
        (lambda m: m.generate("It was", **{"prompt_ids": [1]}), OptionError, "unknown keyword 'prompt_ids'"),
        (lambda m: m.generate("It was", **{"structure": 5}), OptionError, "structure is 5; expected"),
        (
            lambda m: m.generate("It was", **{"negative_ids": "abc", "cfg_scale": 2.0}),
            OptionError,
            "negative_ids is 'abc'; expected token ids",
        ),
        (lambda m: m.generate("It was", **{"banned_tokens": None}), OptionError, "banned_tokens is 'None'; expected"),
        (lambda m: m.generate("It was", **{"logit_bias": {1: 10**400}}), OptionError, "logit_bias of token 1 is 1000"),
        (lambda m: m.generate("It was", **{"seed": 10**5000}), OptionError, "seed is a int; expected"),
        (lambda m: m.generate("It was", **{"max_tokens": 10**5000}), OptionError, "max_tokens is a int; expected"),
        (lambda m: m.generate("It was", **{"early_stopping": [1]}), OptionError, r"early_stopping is \[1\]; expected"),
        (lambda m: m.generate("x", beams=4, token_healing=True), OptionError, "beams=4 and token_healing exclude each other"),
        (lambda m: m.batch(["a"], prompt="b"), OptionError, "unknown keyword 'prompt'"),
        (lambda m: m.chat("a", template="{{ 1 }}", template_options={"messages": 5}), OptionError, "template_options holds 'messages'"),
        (lambda m: m.chat("Hello", template="{{ raise_exception('no') }}"), TokenizerError, "no"),
        (lambda m: m.stream("a", max_tokens=2).result(float("nan")), OptionError, "timeout_s is nan"),
        (lambda m: m.explain("It was", post_sampling=5), OptionError, "post_sampling is 5"),
        (lambda m: ex.compare(m, m, 7), OptionError, "expected a text or a list of token ids"),
        (lambda m: ex.compare(m, m, cache="q2"), OptionError, "compare: unknown cache mode 'q2'"),
        (lambda m: ex.demo(bpw=1.5), OptionError, "bpw"),
        (lambda m: ex.demo("hearing"), OptionError, "there is no model 'hearing'; expected 'seeing'"),
    ],
)
def test_calls(llm, call, error, message):
    with pytest.raises(error, match=message):
        call(llm)
    assert llm.generate("It was", max_tokens=2, temperature=0, ignore_eos=True).text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cach": "fp16"}, OptionError, "load: unknown keyword 'cach'; did you mean 'cache'"),
        ({"cache": "q3"}, OptionError, "load: unknown cache mode 'q3'; known: fp32, fp16, fp8, q8, q6, q4, or bits"),
        pytest.param({"device": "cuda"}, DeviceError, "cannot be used: .*use device='cpu'", marks=NO_GPU),
        pytest.param({"device": "cuda:1"}, DeviceError, "device .cuda:1. cannot be used", marks=NO_GPU),
        ({"device": "cuda:one"}, OptionError, "expected one of auto, cpu, cuda, cuda:<number>"),
        ({"device": "tpu"}, OptionError, "device is 'tpu'"),
        ({"context": 0}, OptionError, "context"),
        ({"max_sequences": True}, OptionError, "max_sequences"),
        ({"revision": "main"}, OptionError, "revision"),
    ],
)
def test_load(options, error, message):
    with pytest.raises(error, match=message):
        ex.load(DEMO, **options)


def test_directories_that_hold_no_model(tmp_path):
    for folder, message in ((tmp_path / "nothing", "nothing"), (tmp_path, r"config\.json")):
        with pytest.raises(ModelNotFound, match=message):
            ex.load(folder)


@pytest.mark.parametrize(
    ("options", "message"), [({"head_bit": 6}, "convert: unknown keyword 'head_bit'; did you mean 'head_bits'"), ({"bpw": 9}, "bpw")]
)
def test_convert(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        ex.convert(DEMO, tmp_path / "x", **{"bpw": 4, **options})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("options", [{"context": 0}, {"batch": True}, {"cache": "q5"}, {"device": "tpu"}, {"free": -1}])
def test_plan(options):
    with pytest.raises(OptionError):
        ex.plan(DEMO, **options)
