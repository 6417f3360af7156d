"""Scores, choices and activations of the demo model, against Transformers on the same weights."""

import math

import pytest
import torch

from exl2nb.eval.score import choice_of

TEXT = "It was a dark and stormy night; “naïve café”, said the old man."


def logprobs(reference, ids):
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_score(llm, reference, near):
    found = llm.score(TEXT)
    ids = llm.tokenizer.encode(TEXT)
    rows = logprobs(reference, ids)
    wanted = [float(rows[at, i]) for at, i in enumerate(ids[1:])]
    assert [token.id for token in found.tokens] == ids
    assert "".join(token.text for token in found.tokens) == TEXT
    assert found.logprobs == pytest.approx(wanted, abs=near)
    ranks = [int((rows[at] > rows[at, i]).sum()) + 1 for at, i in enumerate(ids[1:])]
    assert sum(a != b for a, b in zip(found.ranks, ranks)) <= (1 if near < 0.01 else len(ids) // 4)
    assert found.total == pytest.approx(sum(wanted), abs=10 * near)
    assert found.perplexity == pytest.approx(math.exp(-sum(wanted) / len(wanted)), rel=near)
    assert llm.score(ids).logprobs == found.logprobs
    assert list(found.to_frame().columns) == ["id", "text", "logprob", "prob", "rank"]
    assert "perplexity" in str(found) and "<span" in found._repr_html_()


def test_score_is_what_generation_reports(llm, near):
    done = llm.generate("The old man", max_tokens=8, temperature=0)
    ids = llm.tokenizer.encode("The old man") + [token.id for token in done.tokens]
    assert llm.score(ids).logprobs[-8:] == pytest.approx(done.logprobs, abs=max(5e-3, near))  # the engine's cache is fp16


def test_choose(llm, reference, near):
    options = [" man", " the", " woman was", " xylophone"]
    choice = llm.choose("The old", options)
    for option in choice.options:
        whole = llm.tokenizer.encode("The old" + option.text)
        start = len(whole) - option.tokens
        rows = logprobs(reference, whole)
        assert option.logprob == pytest.approx(sum(float(rows[at - 1, whole[at]]) for at in range(start, len(whole))), abs=2 * near)
    assert sum(choice.probs.values()) == pytest.approx(1.0)
    assert choice.best == str(choice) == max(choice.probs, key=choice.probs.get)
    ratio = choice.options[0].prob / choice.options[1].prob
    assert math.log(ratio) == pytest.approx(choice.options[0].logprob - choice.options[1].logprob, abs=1e-6)
    assert "<table>" in choice._repr_html_()
    again = llm.choose(llm.tokenizer.encode("The old"), options)
    assert again.probs == pytest.approx(choice.probs, abs=1e-6)


def test_options_may_begin_inside_a_token_and_contain_each_other(llm, near):
    choice = llm.choose("The old m", ["an", "an was", "ouse"])
    totals = {text: llm.score("The old m" + text).total for text in choice.probs}
    found = {option.text: option.logprob for option in choice.options}
    assert found["an was"] - found["ouse"] == pytest.approx(totals["an was"] - totals["ouse"], abs=2 * near)
    assert choice.probs["an"] > choice.probs["an was"]
    by_token = choice_of("", ["a", "b"], [(-4.0, 4), (-2.0, 1)], normalise="mean")
    assert by_token.best == "a"


def test_hidden(llm, reference, near):
    ids = llm.tokenizer.encode(TEXT)
    found = llm.hidden(TEXT, ["embedding", "layers.*.output", "layers.3.middle", "layers.0.attention", "logits"])
    with torch.no_grad():
        theirs = reference(torch.tensor([ids]), output_hidden_states=True)
    assert torch.allclose(found["embedding"], theirs.hidden_states[0][0], atol=1e-5)
    for layer in range(11):  # the last one of theirs is behind the final norm
        mine, wanted = found[f"layers.{layer}.output"], theirs.hidden_states[layer + 1][0]
        assert float((mine - wanted).norm() / wanted.norm()) < near
    assert float((found["logits"] - theirs.logits[0]).abs().max()) < max(0.02, 3 * near)
    assert found["layers.0.attention"].shape == (len(ids), 256)
    assert list(found)[:2] == ["embedding", "layers.0.attention"]
    assert "".join(found.texts) == TEXT
    assert len(found) == 16 and "16 points" in repr(found) and "layers.3.middle" in found._repr_html_()
    assert set(llm.hidden("a b", "logits")) == {"logits"}
    assert len(llm.points) == 1 + 3 * 12 + 1
