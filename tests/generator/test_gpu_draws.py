"""Penalties, bias and banned tokens drawn on the GPU: what the host draws from the same logits, alone, together, while a text goes on."""

import pytest

import exl2nb as ex

pytestmark = pytest.mark.gpu
PROMPT = "The rain fell on the old town, and the rain fell on the new town, and the rain"
KINDS = [
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"seed": 4, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "top_p": 0.9},
    {"seed": 5, "temperature": 0.8, "frequency_penalty": -0.2, "top_k": 30},
    {"seed": 6, "min_p": 0.02},
    {"temperature": 0, "banned_tokens": [5, 13, 14, 261, 300]},
    {"seed": 7, "logit_bias": {20: 3.0, 261: -2.5, 300: 1.25}, "top_p": 0.95},
    {"seed": 8, "allowed_tokens": range(200, 900), "logit_bias": {250: 2.0}, "repetition_penalty": 1.1},
]
ON_THE_HOST = {"min_tokens": 1}  # means nothing to an answer that no token ends


@pytest.fixture(scope="module")
def llm():
    with ex.demo(progress=None, device="cuda", deterministic=True) as made:
        yield made


def ids(completion):
    return [token.id for token in completion.tokens]


@pytest.mark.parametrize("options", KINDS)
def test_as_on_the_host(llm, options):
    more = {"max_tokens": 80, "ignore_eos": True, "top_logprobs": 2}
    device, host = (llm.generate(PROMPT, **options, **more, **extra) for extra in ({}, ON_THE_HOST))
    assert ids(device) == ids(host)
    assert max(abs(a.logprob - b.logprob) for a, b in zip(device.tokens, host.tokens)) < 1e-4
    assert [t.rank for t in device.tokens] == [t.rank for t in host.tokens]


def test_alone_and_together(llm):
    """They come and go at different times, so that the counts are written anew while a token is in flight."""
    requests = [{"prompt": PROMPT[: 20 + 4 * i], "max_tokens": 10 + 8 * i, "ignore_eos": True, **KINDS[i % len(KINDS)]} for i in range(16)]
    alone = [ids(llm.generate(**one)) for one in requests]
    together = llm.batch(requests).run()
    assert [ids(together[i]) for i in range(16)] == alone


def test_they_are_drawn_on_the_gpu(llm):
    stepper = llm.engine.loop.executor
    from exl2nb.sampling.params import SamplingParams
    from exl2nb.sampling.state import SamplerState

    assert all(stepper.can_draw(SamplerState(SamplingParams(**kind))) for kind in KINDS)
    assert not stepper.can_draw(SamplerState(SamplingParams(frequency_penalty=0.5, penalty_range=64)))
    assert not stepper.can_draw(SamplerState(SamplingParams(**ON_THE_HOST)))


def test_what_no_kernel_should_see_is_refused(llm):
    """Ids beyond the vocabulary, and bans of everything, never reach the GPU; it works on."""
    size = llm.engine.vocab_size
    with pytest.raises(ex.errors.Exl2Error, match="vocabulary"):
        llm.generate(PROMPT, banned_tokens=[size])
    with pytest.raises(ex.errors.Exl2Error, match="no token is left"):
        llm.generate(PROMPT, banned_tokens=range(size))
    assert llm.generate(PROMPT, max_tokens=3, temperature=0, banned_tokens=range(10, size)).tokens[0].id < 10


def test_more_alternatives_than_the_kernel_reports(llm):
    assert len(llm.generate("It was", max_tokens=1, top_logprobs=50).tokens[0].top) == 50
