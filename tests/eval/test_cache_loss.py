"""Cache modes beside a baseline: the baseline against itself is exact, the tokens are those of generation, coarse codes cost more."""

import pytest
import torch

from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.eval.cache_loss import Baseline, Needle, find_needle
from exl2nb.eval.rows import logits


@pytest.fixture(scope="module")
def base(llm):
    base = Baseline(llm.model, llm.tokenizer.encode("It was a dark night, and the old man"), max_tokens=24)
    yield base
    base.close()


def test_the_baseline_against_itself_is_exact_and_what_generation_writes(llm, base):
    tokens = list(base.run("fp16"))
    assert all(t.kl == 0 and t.favourite == t.id and t.prob == t.baseline_prob for t in tokens)
    done = llm.generate("It was a dark night, and the old man", max_tokens=24, temperature=0, ignore_eos=True)
    assert [t.id for t in tokens] == [t.id for t in done.tokens]


@pytest.mark.parametrize("mode", ["q4", "k16v4", "fp8"])
def test_numbers_are_those_of_whole_rows(llm, base, mode):
    """Every step's KL and probability equal what two passes over the finished text say."""
    tokens = list(base.run(mode))
    ids = torch.tensor([[*base.prompt, *(t.id for t in tokens)]])
    truth, other = (logits(llm.model, ids, cache=m)[0].double().log_softmax(-1) for m in ("fp16", mode))
    rows = range(len(base.prompt) - 1, ids.shape[1] - 1)
    for token, row in zip(tokens, rows):
        assert token.kl == pytest.approx(float((truth[row].exp() * (truth[row] - other[row])).sum()), abs=1e-9)
        assert token.prob == pytest.approx(float(other[row, token.id].exp()), abs=1e-9)
        assert token.baseline_prob == pytest.approx(float(truth[row, token.id].exp()), abs=1e-9)
        assert token.favourite == int(truth[row].argmax())


def test_fewer_bits_cost_more(base):
    cost = {mode: sum(t.kl for t in base.run(mode)) for mode in ("q8", "q4")}
    assert 0 < cost["q8"] < cost["q4"]


def test_ends_at_a_stop_token(base):
    tokens = list(base.run("fp16"))
    assert list(base.run("fp16", stop_ids=[tokens[3].id]))[-1] == next(t for t in tokens if t.id == tokens[3].id)


def test_prompts_that_cannot_run(llm):
    with pytest.raises(ContextOverflow, match="shorten the prompt"):
        Baseline(llm.model, [1] * 1020, max_tokens=10)
    with pytest.raises(OptionError, match="no tokens"):
        Baseline(llm.model, [], max_tokens=10)
    with pytest.raises(OptionError, match="found id 99999"):
        Baseline(llm.model, [99999], max_tokens=10)


def test_the_fact_is_found_where_it_is_and_not_where_it_is_not(llm):
    needle = Needle(sentences=8)
    there, absent = (find_needle(llm.model, llm.tokenizer, needle, mode="fp16", depth=depth) for depth in (0.5, None))
    assert there.prob > 50 * absent.prob
    assert there.tokens > absent.tokens
    whole = llm.score(needle.text(0.5) + needle.answer)
    assert there.prob == pytest.approx(torch.tensor(whole.logprobs[there.tokens - 1 :]).double().sum().exp().item(), rel=0.02)
    assert there.rank == whole.ranks[there.tokens - 1]


@pytest.mark.parametrize(
    ("name", "values"), [("fact", [""]), ("filler", ["one", []]), ("sentences", [0, True]), ("depths", [[2], "0"]), ("answer", [3])]
)
def test_bad_needles(name, values):
    for value in values:
        with pytest.raises(OptionError, match="needle"):
            Needle(**{name: value})


def test_an_answer_must_start_a_token(llm):
    with pytest.raises(OptionError, match="begin it with a space"):
        find_needle(llm.model, llm.tokenizer, Needle(question="They went to", answer="gether"), mode="q8", depth=None)
