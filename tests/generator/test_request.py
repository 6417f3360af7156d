from dataclasses import replace

import pytest

from exl2nb.core.errors import OptionError
from exl2nb.generator.request import Completion, Request, Timings, Token, TokenAlternative

TIMINGS = Timings(prompt_tokens=10, new_tokens=5, queue_s=0.0, first_token_s=0.5, prefill_s=0.5, decode_s=0.02)


def test_flat_keywords():
    request = Request.of([1, 2], where="generate", stop="END", temperature=0.5, max_tokens=3)
    assert (request.prompt_ids, request.stop, request.sampling.temperature, request.max_tokens) == ((1, 2), ("END",), 0.5, 3)
    assert Request.of([1], where="x", stop=["a", "b"]).stop == ("a", "b")
    mixed = Request.of([1], where="x", stop=["a", 7])
    assert (mixed.stop_texts, mixed.stop_ids) == (("a",), {7})
    assert Request.of([1], where="x", stop=7).stop_ids == {7}


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_token": 3}, "did you mean 'max_tokens'"),
        ({"temprature": 3}, "did you mean 'temperature'"),
        ({"sampling": None}, "unknown keyword 'sampling'"),
        ({"xyzzy": 3}, "known: "),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 101}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": 7.5}, "stop is '7.5'; expected a text or a token id"),
        ({"stop": [7.5]}, "stop"),
        ({"stop": [-1]}, "stop"),
        ({"stop": True}, "stop"),
        ({"min_tokens": 300}, "min_tokens is 300; expected at most max_tokens, which is 256"),
        ({"banned_strings": [""]}, "banned_strings"),
        ({"banned_strings": [7]}, "banned_strings"),
        ({"cfg_scale": 2.0}, "no negative_prompt"),
        ({"cfg_scale": -1.0}, "cfg_scale"),
        ({"beams": 0}, "beams is 0"),
        ({"beams": 2, "n": 3}, "n is 3 and beams 2"),
        ({"beams": 2, "temperature": 1.0}, "beams=2 and a sampler other than temperature=0 exclude each other"),
        ({"beams": 2, "banned_strings": "x"}, "beams=2 and banned_strings exclude each other"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"length_penalty": 99}, "length_penalty"),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_bad_options(kwargs, match):
    with pytest.raises(OptionError, match=match):
        Request.of([1], where="generate", **kwargs)


def test_no_tokens():
    with pytest.raises(OptionError, match="no tokens"):
        Request.of([], where="generate")


def test_completion_reads_as_text_and_as_a_table():
    tokens = (Token(1, "a<", -0.1, 0.9, 1), Token(2, "b", -2.0, 0.135, 3))
    completion = Completion(text="a<b", tokens=tokens, finish_reason="length", timings=TIMINGS, seed=7, prompt="<p>")
    assert str(completion) == "a<b"
    assert repr(completion) == "Completion('a<b', 2 tokens, length, 200 tok/s)"
    assert completion.logprobs == (-0.1, -2.0)
    page = completion._repr_html_()
    assert "a&lt;" in page
    assert "&lt;p&gt;" in page
    assert "<script" not in page
    assert list(completion.to_frame().columns) == ["id", "text", "logprob", "prob", "rank", "source"]
    asked = replace(
        completion, tokens=(tokens[0]._replace(top=(TokenAlternative(1, "a<", -0.1, 0.9), TokenAlternative(5, "c", -3.0, 0.05))), tokens[1])
    )
    assert list(asked.to_frame().top) == [(("a<", 0.9), ("c", 0.05)), ()]
    assert (completion.tokens_per_second, completion.ttft_s) == (200.0, 0.5)
    assert "20 tok/s" in str(TIMINGS)
