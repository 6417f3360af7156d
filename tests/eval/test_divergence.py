import importlib.util
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from exl2nb.core.errors import OptionError
from exl2nb.eval import logits as logits_module
from exl2nb.eval.divergence import compare_many, compare_models
from exl2nb.eval.perplexity import perplexity

_spec = importlib.util.spec_from_file_location("fakes", Path(__file__).with_name("fakes.py"))
fakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fakes)
IDS = torch.randint(11, (3, 37), generator=torch.Generator().manual_seed(5))


def models():
    reference = fakes.random_table(0)
    return fakes.TableModel(reference), fakes.TableModel(reference + 0.3 * fakes.random_table(1))


def by_hand(reference, other):
    """KL and agreement from the definition, in doubles, without a log-softmax."""
    p, q = reference.table.double().exp(), other.table.double().exp()
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    kl = (p * (p / q).log()).sum(1)
    return kl[IDS], (p.argmax(1) == q.argmax(1))[IDS], p, q


def test_against_the_definition():
    reference, other = models()
    result = compare_models(reference, other, IDS)
    kl, same, p, q = by_hand(reference, other)
    assert torch.allclose(result.kl.double(), kl, atol=1e-6)
    assert torch.equal(result.same_top1, same)
    assert result.kl_mean == pytest.approx(kl.mean().item(), rel=1e-6)
    assert result.kl_p99 == pytest.approx(torch.quantile(kl.flatten(), 0.99).item(), rel=1e-5)
    assert result.top1 == pytest.approx(same.double().mean().item())
    for got, probs in ((result.reference_ppl, p), (result.ppl, q)):
        nats = [-probs[a, b].log().item() for row in IDS.tolist() for a, b in pairwise(row)]
        assert got == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-6)
    assert result.ppl == pytest.approx(perplexity(other, IDS).ppl, rel=1e-9)


def test_a_model_does_not_diverge_from_itself():
    reference, _ = models()
    result = compare_models(reference, reference, IDS)
    assert result.kl.max() == 0
    assert result.top1 == 1


def test_direction_is_reference_to_other():
    sure, unsure = fakes.TableModel(torch.eye(11) * 20), fakes.TableModel(torch.zeros(11, 11))
    assert compare_models(sure, unsure, IDS).kl_mean == pytest.approx(math.log(11), rel=1e-5)
    assert compare_models(unsure, sure, IDS).kl_mean == pytest.approx(20 * 10 / 11 - math.log(11), rel=1e-3)


def test_several_at_once_run_the_reference_once(monkeypatch):
    monkeypatch.setattr(logits_module, "PIECE_BYTES", 1)
    reference, other = models()
    third = fakes.TableModel(fakes.random_table(9))
    both = compare_many(reference, {"a": other, "b": third}, IDS)
    assert list(both) == ["a", "b"]
    assert len(reference.calls) == len(other.calls) == 9
    for name, model in (("a", other), ("b", third)):
        alone = compare_models(reference, model, IDS)
        assert torch.equal(both[name].kl, alone.kl)
        assert torch.equal(both[name].logprob, alone.logprob)


def test_vocabularies_must_agree():
    reference, _ = models()
    with pytest.raises(OptionError, match="vocabulary of other is 7, of reference 11"):
        compare_models(reference, fakes.TableModel(fakes.random_table(0, 7)), IDS)


def test_rows_of_one_token():
    reference, other = models()
    with pytest.raises(OptionError, match="at least 2"):
        compare_models(reference, other, IDS[:, :1])


def test_perplexity_by_row():
    reference, _ = models()
    result = perplexity(reference, IDS)
    assert len(result.row_ppl) == 3
    assert math.prod(result.row_ppl) ** (1 / 3) == pytest.approx(result.ppl, rel=1e-9)
    assert "3 rows of 37 tokens" in repr(result)
