import math
import xml.etree.ElementTree as ET

import pytest
import torch

from exl2nb.eval.comparison import EDGES, Comparison


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
    assert [low for low, _, _ in bins] == list(EDGES)
    assert bins[-1][1] == math.inf
    assert sum(share for _, _, share in bins) == pytest.approx(1)
    assert bins[0][2] == pytest.approx(2 / 6), "0 and 0.00005"
    assert bins[-1][2] == pytest.approx(1 / 6), "4.0 is in the open bin"


def test_text_twin_holds_the_numbers():
    result = make()
    text = str(result)
    for number in (f"{math.e**2:.4f}", f"{math.e:.4f}", f"{result.kl_mean:.5f}", f"{result.top1:.2%}"):
        assert number in text
    assert "kl_mean" in repr(result)
    assert result.summary()["rows"] == 2


def test_html_is_well_formed_and_escaped():
    html = make()._repr_html_()
    root = ET.fromstring(html)
    assert "c & d against a <b>: 2 rows of 3 tokens" in "".join(root.itertext())
    assert root.find(".//svg").get("role") == "img"
    assert "nan" not in html


def test_identical_models_render():
    result = make(torch.zeros(2, 3))
    assert result.kl_p99 == 0
    ET.fromstring(result._repr_html_())
    assert str(result)


def test_by_position():
    assert make().by_position(3) == pytest.approx([2.0, 0.275, 0.001025])
    assert len(make().by_position()) == 3
