"""The packaged model and an EXL2 model another program made of it: numbers pinned, computed independently with Transformers' arithmetic."""

from pathlib import Path

import pytest

import exl2nb
from exl2nb.eval.comparison import compare_models
from exl2nb.eval.rows import read_text, token_rows
from exl2nb.model.loader import load_model
from exl2nb.tokenizer.tokenizer import Tokenizer

DEMO = Path(exl2nb.__file__).parent / "demo_model"
QUANTISED = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"


@pytest.fixture(scope="module")
def comparison():
    ids = token_rows(Tokenizer.load(DEMO), read_text(DEMO / "evaluation.txt"), rows=8, length=256)
    return compare_models(load_model(DEMO), load_model(QUANTISED), ids)


def test_numbers_are_what_they_were(comparison):
    """The reference's perplexity is Transformers' on the same ids; the others may move by the rounding of activations, not more."""
    assert comparison.reference_ppl == pytest.approx(27.4542, abs=0.005)
    assert comparison.ppl == pytest.approx(30.932, abs=0.15)
    assert comparison.kl_mean == pytest.approx(0.1161, abs=0.0025)
    assert comparison.kl_p99 == pytest.approx(0.941, abs=0.05)
    assert comparison.top1 == pytest.approx(0.791, abs=0.01)


@pytest.mark.parametrize(
    ("mode", "kl"), [("fp16", 1e-6), ("q8", 0.00026), ("fp8", 0.003), ("q6", 0.0147), ("k4v8", 0.02), ("q4", 0.0348)], ids=lambda x: str(x)
)
def test_a_quantised_cache_costs_no_more_than_it_may(mode, kl):
    """KL against the FP32 cache; where exllamav2 has a mode, the bound is what it costs there, on another text of the same kind."""
    ids = token_rows(Tokenizer.load(DEMO), read_text(DEMO / "evaluation.txt"), rows=2, length=256)
    model = load_model(QUANTISED)
    comparison = compare_models(model, model, ids, cache=mode)
    assert kl / 20 < comparison.kl_mean < kl or mode == "fp16"
    assert comparison.kl_mean < kl


@pytest.mark.parametrize("name", ["calibration.txt", "evaluation.txt"])
def test_packaged_texts_are_plain_and_large_enough(name):
    text = read_text(DEMO / name)
    rows = {"calibration.txt": 180, "evaluation.txt": 60}[name]
    assert token_rows(Tokenizer.load(DEMO), text, rows=rows, length=512).shape == (rows, 512)
    assert "\ufffd" not in text
    assert "<s>" not in text


def test_packaged_texts_do_not_overlap():
    calibration, evaluation = (read_text(DEMO / name) for name in ("calibration.txt", "evaluation.txt"))
    lines = {line for line in evaluation.splitlines() if len(line) > 80}
    assert not lines & set(calibration.splitlines())
