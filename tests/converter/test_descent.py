"""Coordinate descent after GPTQ: a loss that never rises, on a real matrix too; files that load and are scored."""

import json
from pathlib import Path

import pytest
import torch

import exl2nb
from exl2nb.converter import descent, memory_estimate, rounding
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.hessian import couple_outputs, factorize
from exl2nb.converter.sensitivity import sweep_layers
from exl2nb.converter.tuning import Tuning
from exl2nb.converter.weights import DenseWeights
from exl2nb.core.errors import OptionError
from exl2nb.model.loader import read_model_config
from exl2nb.model.store import open_store
from exl2nb.quant.exl2 import encode
from exl2nb.tokenizer.tokenizer import Tokenizer

from .test_conversion_job import convert
from .test_memory_estimate import Live
from .test_rounding import LAYOUTS, coupled_problem, loss_of, problem

pytestmark = pytest.mark.usefixtures("short_second_text")
DEMO = Path(exl2nb.__file__).parent / "demo_model"
NOTHING_LEARNS = {"codes": False, "scales": False, "vectors": False, "embedding": False}
TEXT = [" ".join(f"w{(i * i + 7 * i + i // 90) % 90}" for i in range(5000))]
DESCENT = {"bpw": 3.0, "calibration": TEXT, "rows": 12, "length": 32, "tuning": Tuning(descent=2, rows=12, **NOTHING_LEARNS)}


@pytest.fixture(scope="module")
def real():
    """Weights, Hessians and couplings of the demo model's last layer, of 6 rows of 64 tokens."""
    config = read_model_config(DEMO)
    ids = Tokenizer.load(DEMO).encode((DEMO / "evaluation.txt").read_text()[:4000])[: 6 * 64]
    with open_store(config, DEMO) as store, torch.no_grad():
        weights = DenseWeights(config, store)
        found = sweep_layers(weights, torch.tensor(ids, dtype=torch.int32).view(6, 64), used=6, seed=0, step=lambda detail: None)
        next(found)  # the head's
        last = next(found)
        found.close()
        return weights.layer(last.layer), last


def rounded(weight, factor, groups, coupling=None, sweeps=0):
    return rounding.quantize_stored(factor.stored(weight), factor, groups, coupling=coupling, sweeps=sweeps)


def test_a_real_matrix_comes_closer(real):
    tensors, statistics = real
    key = f"model.layers.{statistics.layer}.self_attn.k_proj"
    weight, factor, coupling = tensors[f"{key}.weight"], factorize(statistics.hessians["q"]), couple_outputs(statistics.couplings[key])
    groups = [(3, 64), (3, 64), (2, 64), (2, 64)]
    losses = [rounded(weight, factor, groups, coupling, sweeps)[1] for sweeps in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < 0.96 * losses[0]
    packed, loss = rounded(weight, factor, groups, coupling, 2)
    assert loss == losses[2], "the same every time"
    d = (weight - rounding.dense_weight(packed, len(weight))).double()
    g, h = statistics.couplings[key][0].double(), statistics.hessians["q"].double()
    g, h = (x + share * x.diagonal().mean() * torch.eye(len(x)) for x, share in ((g, 0.2), (h, 0.03)))
    assert loss == pytest.approx(float(((g @ d @ h) * d).sum()), rel=1e-2), "of what is stored"
    assert packed.groups == groups
    before = rounded(weight, factor, groups, coupling)[0]
    assert {name: (x.shape, x.dtype) for name, x in packed.tensors("m").items()} == {
        name: (x.shape, x.dtype) for name, x in before.tensors("m").items()
    }


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_uncoupled_columns(groups, monkeypatch):
    weight, hessian = problem()
    factor = factorize(hessian)
    packed, loss = rounded(weight, factor, groups, sweeps=2)
    damped = hessian + 0.03 * hessian.diagonal().mean() * torch.eye(96, dtype=torch.float64)
    assert loss < rounded(weight, factor, groups)[1]
    assert loss == pytest.approx(float(loss_of(weight, rounding.dense_weight(packed, 40), damped)), rel=1e-2)
    monkeypatch.setattr(descent, "AT_ONCE", 96 * 7)  # 7 columns at a time, the last 5
    pieces, found = rounded(weight, factor, groups, sweeps=2)
    assert found == pytest.approx(float(loss_of(weight, rounding.dense_weight(pieces, 40), damped)), rel=1e-2)
    assert torch.equal(pieces.q_scale_max, rounded(weight, factor, groups)[0].q_scale_max)
    assert found < rounded(weight, factor, groups)[1]


@pytest.mark.parametrize("damping", [1e-6, 0.2])
def test_strongly_coupled_columns(damping):
    """Where columns change together without regard for one another, this loss rises without bound."""
    weight, h, g = coupled_problem(96, 64)
    factor, coupling = factorize(h), couple_outputs(torch.stack([g[:32, :32], g[32:, 32:]]), damping=damping)
    losses = [rounded(weight, factor, [(3, 32), (2, 64)], coupling, sweeps)[1] for sweeps in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("coupled", [False, True])
def test_what_is_alive_at_once_is_below_the_stated_bound(coupled, monkeypatch):
    weight, h, g = coupled_problem(128, 512)
    factor, coupling = factorize(h), couple_outputs(torch.stack([g[:64, :64]] * 8)) if coupled else None
    stored, groups = factor.stored(weight), [(3, 64), (2, 64)]
    made = rounding.run_rounding(weight, factor, groups, coupling=coupling)
    monkeypatch.setattr(descent, "AT_ONCE", 128 * 64)
    with Live() as live:
        descent.descend(stored, made, factor, groups, coupling, 1)
    numbers = stored.numel() if coupled else 2 * 128 * 64
    assert (
        0.3 * memory_estimate.PER_DESCENT * numbers
        < live.peak
        < memory_estimate.PER_DESCENT * numbers + memory_estimate.FACTOR_BYTES * 128**2 + 24 * 512 * 64
    )


def test_nothing_is_better_than_no_error():
    weight, hessian = problem()
    factor, groups = factorize(hessian), [(4, 96)]
    made = rounding.run_rounding(weight, factor, groups)
    exact = rounding.dense_weight(encode(made.codes, made.scale_index, made.scale_max, groups, factor.perm), 40)
    again = descent.descend(factor.stored(exact), made, factor, groups, None, 2)
    assert float(again.loss) == 0
    for name in ("codes", "scale_index", "scale_max"):
        assert torch.equal(getattr(again, name), getattr(made, name)), name
    nothing, loss = rounded(torch.zeros_like(weight), factor, groups, sweeps=2)
    assert not rounding.dense_weight(nothing, 40).any()
    assert loss == 0


def test_files_load_and_are_scored(source, tmp_path):
    done = convert(source, tmp_path / "descent", **DESCENT, work_dir=tmp_path / "work")
    plain = convert(
        source, tmp_path / "plain", **{**DESCENT, "tuning": Tuning(descent=0, rows=12, **NOTHING_LEARNS)}, work_dir=tmp_path / "work"
    )
    assert done.tuned is plain.tuned is None
    assert "tune" not in done.seconds
    before, after = (sum(m.loss for m in found.matrices if m.layer == 0) for found in (plain, done))
    assert after < before
    assert [m.mix for m in done.matrices] == [m.mix for m in plain.matrices]
    assert done.nbytes == plain.nbytes
    assert json.loads((done.path / "conversion.json").read_text())["descent"] == 2
    assert "descent" not in json.loads((plain.path / "conversion.json").read_text())
    with exl2nb.load(done.path, context=128, device="cpu") as llm:
        assert llm.score(" ".join(f"w{i % 90}" for i in range(40))).perplexity > 1


def test_descent_before_learning(source, tmp_path):
    tuned = convert(source, tmp_path / "out", **{**DESCENT, "tuning": Tuning(descent=1, rows=32, passes=1, written=0)})
    assert tuned.tuned.options.descent == 1
    assert tuned.descent == 1


def test_memory_and_wrong_options(source, tmp_path):
    job = ConversionJob(source, tmp_path / "never", **DESCENT)
    plain = ConversionJob(source, tmp_path / "never", **{**DESCENT, "tuning": None})
    assert job.memory().tune == job.gpu_memory().tune == 0
    assert job.memory().quantize >= plain.memory().quantize
    assert job.gpu_memory().quantize >= plain.gpu_memory().quantize
    for value in (-1, 65, True, 1.0):
        with pytest.raises(OptionError, match="descent is"):
            Tuning(descent=value)
