"""Plans tried before one is carried out: true KL, corrected prices, the budget kept, the same after a kill, off unless asked for."""

import dataclasses
from contextlib import closing

import pytest
import torch

from exl2nb.converter import polish as stage
from exl2nb.converter.calibration import Rows
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.polish import corrections_of, polish, true_kl
from exl2nb.converter.work import Context, Work
from exl2nb.core.errors import Interrupted, OptionError

from .test_conversion_job import OPTIONS, convert, output, write_model


@pytest.fixture(scope="module")
def measurement(source, tmp_path_factory):
    return ConversionJob(source, tmp_path_factory.mktemp("measure") / "none", bpw=4.0, **OPTIONS).measure()


def rows(judged=4):
    ids = torch.randint(3, 90, (8, 32), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    return Rows(ids[:4], ids[4 : 4 + judged], ids[:0], "x")


def test_true_kl_ranks_plans_and_is_independent_of_others(weights, measurement):
    few, many = measurement.solve(3.0), measurement.solve(6.0)
    mixed = few.groups() | {key: many.groups()[key] for key in few.groups() if ".layers.2." in key}
    allocations = [few.groups(), mixed, many.groups(), few.groups()]
    found = true_kl(weights, rows().hessians, rows().sensitivity, allocations)
    assert found.shape == (4, 4)
    low, middle, high, again = found.mean(1).tolist()
    assert low > middle > 4 * high > 0
    assert again == low
    alone = true_kl(weights, rows().hessians, rows().sensitivity, [mixed])
    assert torch.equal(alone[0], found[1])


def test_corrections_follow_the_truth_as_far_as_it_is_sure():
    base, predicted = torch.full((4,), 0.1), [0.01, 0.01, 0.01]
    sure = torch.stack([base, base + 0.02, base + 0.005, base + 0.01]).double()
    first, second, third = corrections_of(sure, predicted)
    assert first == pytest.approx(2, rel=1e-3)
    assert second == pytest.approx(0.5, rel=1e-3)
    assert third == pytest.approx(1, rel=1e-3)
    noisy = sure + 0.2 * torch.tensor([1.0, -1.0, 1.0, -1.0])[None] * torch.tensor([0.0, 1.0, -1.0, 1.0])[:, None]
    assert corrections_of(noisy, predicted) == pytest.approx([1, 1, 1], abs=0.01)
    assert corrections_of(sure[:, :1], predicted) == [1, 1, 1]  # one row says nothing of its noise


def tried(weights, work, measurement, sink=None, check=lambda: None, judged=4):
    allocation = measurement.solve(4.5)
    with closing(work):
        return allocation, polish(
            Context(weights=weights, work=work, sink=sink, check=check), rows(judged), measurement, allocation, {"bpw": 4.5}
        )


def test_the_best_plan_within_the_budget_wins_and_is_found_again(weights, measurement, tmp_path, monkeypatch):
    events = []
    allocation, found = tried(weights, Work(tmp_path), measurement, events.append)
    assert found.allocation.bpw <= 4.5
    assert 1 <= len(found.kl) <= 1 + len(stage.CORRECTION_STRENGTHS)
    assert found.swapped == (found.allocation.groups() != allocation.groups())
    assert set(found.corrections) >= {"v", "o", "gate", "up", "down", "head"}
    assert all(0.2 < value < 5 for value in found.corrections.values())
    assert (events[-1].stage, events[-1].done, events[-1].state) == ("polish", events[-1].total, "done")
    fresh = tried(weights, Work(tmp_path / "other"), measurement)[1]
    assert (fresh.allocation.groups(), fresh.kl, fresh.corrections) == (found.allocation.groups(), found.kl, found.corrections)
    with monkeypatch.context() as patched:
        patched.setattr(stage, "true_kl", None)  # everything is read from the work folder
        again = tried(weights, Work(tmp_path), measurement, events.append)[1]
    assert (again.allocation.groups(), again.kl) == (found.allocation.groups(), found.kl)
    assert events[-1].done == events[-1].total
    for path in tmp_path.glob("trial-*"):
        path.write_bytes(b"damaged")
    assert tried(weights, Work(tmp_path), measurement)[1].kl == found.kl


@pytest.mark.parametrize("winner", [0, 1, 2])
def test_only_a_lower_true_kl_changes_the_plan(weights, measurement, tmp_path, monkeypatch, winner):
    passes = []

    def preset(weights, ids, judged, allocations, step):
        passes.append(allocations)
        kl = torch.full((len(allocations), len(judged)), 0.5, dtype=torch.float64)
        if len(passes) == 1:
            kl[1::2] += 10  # far more than was predicted, and the others far less
        else:
            kl[winner] = 0.4
        return kl

    monkeypatch.setattr(stage, "true_kl", preset)
    allocation, found = tried(weights, Work(tmp_path), measurement)
    assert found.allocation.groups() == passes[1][winner]
    assert found.swapped == (winner > 0)
    assert passes[1][0] == allocation.groups()


def test_cancelled_between_layers(weights, measurement, tmp_path):
    def stop():
        raise Interrupted("stop")

    with pytest.raises(Interrupted):
        tried(weights, Work(tmp_path), measurement, check=stop)
    assert not list(tmp_path.glob("trial-*"))


def test_in_a_conversion(source, tmp_path):
    done = convert(source, tmp_path / "a", bpw=3.0, polish=True)
    assert done.polished is not None
    assert done.seconds["polish"] > 0
    assert done.to_dict()["polished"]["kl"] == list(done.polished.kl)
    assert done.bpw <= 3.0
    plain = convert(source, tmp_path / "b", bpw=3.0)
    assert plain.polished is None
    assert plain.to_dict()["polished"] is None
    frozen = convert(source, tmp_path / "c", bpw=3.0, polish=True, frozen={m.key: m.groups for m in done.matrices})
    assert output(frozen.path) == output(done.path)
    with pytest.raises(OptionError, match="polish is 'yes'"):
        ConversionJob(source, tmp_path / "d", bpw=3.0, polish="yes")
    with pytest.raises(OptionError, match="rows is 1; expected 2 rows or more"):
        ConversionJob(source, tmp_path / "d", bpw=3.0, polish=True, rows=1)
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    sparse = write_model(tmp_path / "sparse", **mixtral, attention_bias=False)
    with pytest.raises(OptionError, match="polish is True and the model has experts"):
        convert(sparse, tmp_path / "d", bpw=3.0, polish=True)


def test_rows_are_divided_without_a_token_in_common():
    ids = torch.arange(40 * 3, dtype=torch.int32).view(40, 3)
    found = Rows.of(ids, ids[:0], "x")
    assert (found.used, len(found.sensitivity)) == (34, 6)
    assert sorted(found.calibrating.flatten().tolist()) == ids.flatten().tolist()
    assert found.split() == {"hessians": 34, "sensitivity": 6, "report": 0}
    assert dataclasses.replace(found, name="y").facts() == {"rows": 40, "length": 3, "dataset": "y"}
    alone = Rows.of(ids[:1], ids[:0], "x")
    assert (alone.used, alone.sensitivity.shape) == (1, (0, 3))
