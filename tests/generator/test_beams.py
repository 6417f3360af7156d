"""Beam search and guidance against Transformers, on a tiny model and on a rule."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from exl2nb.core.errors import OptionError
from exl2nb.generator.beams import Beams, Guided, mix_guidance
from exl2nb.generator.request import Request

from . import fakes

EOS = 2


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, eos_token_id=EOS, bos_token_id=1,
        pad_token_id=0, initializer_range=0.25,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def rule_of(model):
    def rule(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, -1].float().numpy()

    return rule


def search(prompt, rule=fakes.RULE, **options):
    return fakes.run(Beams.of(fakes.request(prompt, **options), fakes.TOKENIZER, context=1000), rule)


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.7, 2.0])
@pytest.mark.parametrize(("beams", "count"), [(2, 9), (4, 12)])
def test_beams_are_those_of_transformers(tiny, early, penalty, beams, count):
    prompt = [5, 9, 33]
    theirs = tiny.generate(
        torch.tensor([prompt]), num_beams=beams, num_return_sequences=beams, max_new_tokens=count, do_sample=False,
        early_stopping=early, length_penalty=penalty, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    options = {"n": beams, "max_tokens": count, "length_penalty": penalty, "early_stopping": early, "ignore_eos": False, "stream": False}
    done = search(prompt, rule_of(tiny), beams=beams, **options)
    assert len(done.beams) == beams
    for mine, ids, score in zip(done.beams, theirs.sequences.tolist(), theirs.sequences_scores.tolist()):
        new = [i for i in ids[len(prompt) :] if i not in (0, EOS)]
        assert [t.id for t in mine.tokens] == new
        assert mine.score == pytest.approx(score, abs=2e-4)
        assert mine.finish_reason == ("eos" if EOS in ids[len(prompt) :] else "length")
        assert sum(t.logprob for t in mine.tokens) <= 0.0
    assert done.text == done.beams[0].text


def test_one_beam_is_greedy_and_many_find_more():
    totals = []
    for beams in (2, 4, 8):
        done = search([5, 6], beams=beams, max_tokens=6)
        totals.append(sum(done.logprobs))
        assert done.score == pytest.approx(totals[-1] / 6, abs=1e-4)
    greedy = sum(fakes.complete([5, 6], fakes.RULE, max_tokens=6, temperature=0).logprobs)
    assert totals[0] >= greedy - 1e-4
    assert totals == sorted(totals)


def test_stop_texts_end_beams():
    free = search([5, 6], beams=3, max_tokens=8)
    stop = free.text[4:7]
    done = search([5, 6], beams=3, n=3, max_tokens=8, stop=[stop])
    assert all(stop not in one.text for one in done.beams)


def test_guidance_is_that_of_transformers():
    from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor as Theirs

    rng = np.random.default_rng(0)
    p, n = (rng.normal(size=50).astype(np.float32) * 4 for _ in range(2))
    for scale in (0.0, 0.5, 1.0, 1.5, 3.0):
        theirs = Theirs(scale, model=None)
        theirs.get_unconditional_logits = lambda _: torch.from_numpy(n)[None, None]
        assert np.allclose(mix_guidance(p, n, scale), theirs(None, torch.from_numpy(p)[None])[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("banned", [(), ("e",)])
def test_two_prompts_in_step(banned):
    """Both see the same new tokens, also after a rewind."""
    prompt, negative = [5, 6, 7], [9, 8]
    request = fakes.request(prompt, negative_ids=tuple(negative), cfg_scale=1.7, max_tokens=12, temperature=0, banned_strings=banned)
    leader = Guided.of(request, fakes.TOKENIZER, context=1000)
    done = fakes.run(leader, fakes.RULE)
    assert len(done.tokens) == 12
    new = []
    for token in done.tokens:
        row = mix_guidance(fakes.RULE(prompt + new), fakes.RULE(negative + new), 1.7)
        if not banned:
            assert token.id == int(row.argmax())
        new.append(token.id)
    if banned:
        assert "e" not in done.text
    assert leader.members[1].ids[len(negative) : len(negative) + 11] == new[:11]


def test_guidance_keeps_both_in_the_context():
    request = fakes.request([5, 6], negative_ids=tuple(range(3, 23)), cfg_scale=2.0, max_tokens=50, temperature=0)
    done = fakes.run(Guided.of(request, fakes.TOKENIZER, context=30), fakes.RULE)
    assert (len(done.tokens), done.finish_reason) == (10, "context")


def test_refusals():
    with pytest.raises(OptionError, match="beams=2 and cfg_scale exclude each other"):
        Request.of([1], where="test", beams=2, negative_ids=(3,), cfg_scale=2.0)
