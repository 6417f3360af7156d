"""Comparing models: the numbers against the definition, and how the result reads."""

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import torch

from exl2nb.core.errors import OptionError
from exl2nb.eval import rows as rows_module
from exl2nb.eval.comparison import KL_BIN_EDGES_NATS, Comparison, compare_many, compare_models, perplexity

from .fakes import TableModel, random_table


def make(kl=None, **changes):
    kl = torch.tensor([[0.0, 0.5, 0.002], [4.0, 0.05, 0.00005]]) if kl is None else kl
    rows, length = kl.shape
    values = {
        "reference": "a <b>",
        "other": "c & d",
        "ids": torch.arange(rows * length, dtype=torch.int32).view(rows, length),
        "kl": kl,
        "same_top1": kl < 0.1,
        "reference_logprob": torch.full((rows, length - 1), -1.0),
        "logprob": torch.full((rows, length - 1), -2.0),
    }
    return Comparison(**{**values, **changes})


def test_frame():
    frame = make().to_frame(tokens=[f"<{i}>" for i in range(6)])
    assert list(frame.columns) == ["row", "position", "id", "text", "kl", "same_top1", "reference_logprob", "logprob"]
    assert frame.row.tolist() == [0, 0, 0, 1, 1, 1]
    assert frame.text[4] == "<4>"
    assert frame.logprob.isna().tolist() == [False, False, True] * 2
    assert frame.kl.mean() == pytest.approx(make().kl_mean)


def test_histogram_counts_every_token_once():
    bins = make().histogram()
    assert [low for low, _, _ in bins] == list(KL_BIN_EDGES_NATS)
    assert bins[-1][1] == math.inf
    assert sum(share for _, _, share in bins) == pytest.approx(1)
    assert bins[0][2] == pytest.approx(2 / 6), "0 and 0.00005"
    assert bins[-1][2] == pytest.approx(1 / 6), "4.0 is in the open bin"


def test_plain_text_has_the_numbers():
    result = make()
    text = str(result)
    for number in (f"{math.e**2:.4f}", f"{math.e:.4f}", f"{result.kl_mean:.5f}", f"{result.top1:.2%}"):
        assert number in text
    assert "kl_mean" in repr(result)
    assert result.summary()["rows"] == 2


@pytest.mark.parametrize("result", [make(), make(torch.zeros(2, 3))], ids=["different", "identical"])
def test_html_is_well_formed_and_escaped(result):
    html = result._repr_html_()
    root = ET.fromstring(html)
    assert "c & d against a <b>: 2 rows of 3 tokens" in "".join(root.itertext())
    assert root.find(".//svg").get("role") == "img"
    assert "nan" not in html and "nan" not in str(result)
    assert (result.kl_p99 == 0) == (result.kl_mean == 0)


def test_by_position():
    assert make().by_position(3) == pytest.approx([2.0, 0.275, 0.001025])
    assert len(make().by_position()) == 3


IDS = torch.randint(11, (3, 37), generator=torch.Generator().manual_seed(5))


def table_models():
    reference = random_table(0)
    return TableModel(reference), TableModel(reference + 0.3 * random_table(1))


def by_hand(reference, other):
    """KL and agreement from the definition, in doubles, without a log-softmax."""
    p, q = reference.table.double().exp(), other.table.double().exp()
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    kl = (p * (p / q).log()).sum(1)
    return kl[IDS], (p.argmax(1) == q.argmax(1))[IDS], p, q


def test_against_the_definition():
    reference, other = table_models()
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


def test_kl_of_known_pairs():
    """Zero of a model with itself; the direction is reference to other."""
    reference, _ = table_models()
    result = compare_models(reference, reference, IDS)
    assert result.kl.max() == 0
    assert result.top1 == 1
    sure, unsure = TableModel(torch.eye(11) * 20), TableModel(torch.zeros(11, 11))
    assert compare_models(sure, unsure, IDS).kl_mean == pytest.approx(math.log(11), rel=1e-5)
    assert compare_models(unsure, sure, IDS).kl_mean == pytest.approx(20 * 10 / 11 - math.log(11), rel=1e-3)


def test_several_at_once_run_the_reference_once(monkeypatch):
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 1)
    reference, other = table_models()
    third = TableModel(random_table(9))
    both = compare_many(reference, {"a": other, "b": third}, IDS)
    assert list(both) == ["a", "b"]
    assert len(reference.calls) == len(other.calls) == 9
    for name, model in (("a", other), ("b", third)):
        alone = compare_models(reference, model, IDS)
        assert torch.equal(both[name].kl, alone.kl)
        assert torch.equal(both[name].logprob, alone.logprob)


def test_models_and_rows_that_cannot_be_compared():
    reference, other = table_models()
    with pytest.raises(OptionError, match="vocabulary of other is 7, of reference 11"):
        compare_models(reference, TableModel(random_table(0, 7)), IDS)
    with pytest.raises(OptionError, match="at least 2"):
        compare_models(reference, other, IDS[:, :1])


def test_perplexity_by_row():
    reference, _ = table_models()
    result = perplexity(reference, IDS)
    assert len(result.row_ppl) == 3
    assert math.prod(result.row_ppl) ** (1 / 3) == pytest.approx(result.ppl, rel=1e-9)
    assert "3 rows of 37 tokens" in repr(result)
