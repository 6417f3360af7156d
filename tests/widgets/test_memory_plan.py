"""MemoryPlan's Python half: every kind of source, traits in range, the static twin; of one device and of several."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.core.errors import OptionError
from exl2nb.widgets import MemoryPlan

DEMO = Path(ex.__file__).parent / "demo_model"


@pytest.fixture(scope="module")
def planned():
    return ex.plan(DEMO, context=1024, batch=2, free=10**8)


def test_sources_agree(planned):
    shown = MemoryPlan(planned)
    assert shown.plan == planned
    assert MemoryPlan(planned.to_dict()).plan == planned, "the same from plain data"
    assert MemoryPlan(DEMO, context=1024, batch=2, free=10**8).plan == planned
    with ex.demo(context=512, cache="q8", cache_tokens=4096) as llm:
        loaded = MemoryPlan(llm)
        assert (loaded.context, loaded.batch, loaded.cache_mode, loaded.device) == (512, 8, "q8", "cpu")
        assert loaded.parts["cache"] == llm.cache_bytes


def test_controls_are_the_plan(planned):
    shown = MemoryPlan(planned)
    shown.context, shown.batch, shown.cache_mode = 700, 3, "k8v4"
    assert shown.cache_mode == "q6", "one name for one thing"
    assert shown.plan == ex.plan(DEMO, context=700, batch=3, cache="q6", free=10**8)
    assert shown.total == sum(shown.parts.values())
    shown.free = None
    assert shown.plan.fits is None
    assert "not known" in repr(shown)


@pytest.mark.parametrize(
    "bad", [{"context": 0}, {"batch": 1 << 20}, {"cache_mode": "q5"}, {"free": 0}, {"batch": "two"}, {"contxt": 5}, {"device": "tpu"}]
)
def test_bad_options(bad):
    with pytest.raises((OptionError, TypeError)):
        MemoryPlan(DEMO, **bad)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "got 'int'"),
        ({"name": "x"}, "has no device, context"),
        ({"name": "x", "device": "cpu", "context": 1, "batch": 1, "cache_mode": "fp16", "formula": {}}, "the formula is"),
        ({"name": 3, "device": "cpu", "context": 1, "batch": 1, "cache_mode": "fp16", "formula": {}}, "name is '3'"),
    ],
)
def test_bad_sources(source, message):
    with pytest.raises(OptionError, match=message):
        MemoryPlan(source)


@pytest.mark.parametrize("change", [{"weights": -1}, {"weights": 1.5}, {"stages": [[1, 2]]}, {"page_bytes": {}}, {"chunk": 0}, {"more": 1}])
def test_bad_formulas(planned, change):
    data = planned.to_dict()
    with pytest.raises(OptionError, match="formula"):
        MemoryPlan({**data, "formula": {**data["formula"], **change}})


def test_static_twin_and_export(planned, tmp_path):
    shown = MemoryPlan({**planned.to_dict(), "name": "<script>alert(1)</script>", "free": 10**6})
    data, _ = shown._repr_mimebundle_()
    assert "<script" not in data["text/html"]
    assert "too much" in data["text/html"]
    assert "activations" in data["text/html"]
    assert data["text/plain"].startswith("MemoryPlan(")
    shown.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size < 200_000


# ---- several devices

CARDS = {"cuda:0": "255MiB", "cuda:1": "250MiB", "cpu": "rest"}


@pytest.fixture(scope="module")
def split():
    return ex.plan(DEMO, context=1024, devices=CARDS, cache="q8").at(
        limits={"cpu": 2**30}, speeds={"cpu": 40e9, "cuda:0": 3e11, "cuda:1": 3e11}
    )


def test_sources_of_several_devices_agree(split):
    shown = MemoryPlan(split)
    assert shown.plan == split
    assert MemoryPlan(json.loads(json.dumps(split.to_dict()))).plan == split, "the same from plain data"
    again = MemoryPlan(DEMO, devices=CARDS, context=1024, cache_mode="q8", limits=shown.limits, speeds=shown.speeds)
    assert again.plan.at(borders=split.borders).shares == split.shares
    assert shown.parts == {share.device: share.total for share in split.shares}
    with ex.load(DEMO, devices=["cpu", "cpu"], progress=None) as llm:
        assert MemoryPlan(llm).plan.device == "cpu", "one memory is one device"


def test_borders_are_the_plan(split):
    shown = MemoryPlan(split)
    shown.borders, shown.context, shown.batch = [3, 3], 700, 2
    assert shown.plan == split.at(borders=[3, 3], context=700, batch=2)
    assert [share.device for share in shown.plan.shares] == ["cpu", "cuda:1"]
    assert shown.plan.tokens_per_second == pytest.approx(1 / sum(share.read / share.speed for share in shown.plan.shares))
    shown.speeds = [40e9, None, None]
    assert shown.plan.tokens_per_second is None
    shown.limits = [None, None, 1]
    assert shown.plan.fits is False and "too much for cuda:1" in repr(shown)


@pytest.mark.parametrize(
    "bad",
    [{"borders": [3]}, {"borders": [5, 3]}, {"borders": [0, 13]}, {"borders": ["a", 3]}, {"limits": [1]}, {"limits": [-1, 1, 1]},
     {"speeds": [0.0, 1.0, 1.0]}, {"speeds": [float("nan"), 1.0, 1.0]}, {"device": "cpu"}],
)  # fmt: skip
def test_bad_options_of_several_devices(bad):
    with pytest.raises(OptionError):
        MemoryPlan(DEMO, **{"devices": CARDS, **bad})


def test_plans_without_borders_are_refused(split):
    with pytest.raises(OptionError, match="borders with one device"):
        MemoryPlan(DEMO, borders=[3])
    with pytest.raises(OptionError, match="devices needs a model directory"):
        MemoryPlan(split, devices=CARDS)
    with pytest.raises(OptionError, match="parallel='tensor': no borders"):
        MemoryPlan(ex.plan(DEMO, devices=["cpu", "cpu"], parallel="tensor"))
    with pytest.raises(OptionError, match="one name for two devices: no borders"):
        MemoryPlan(ex.plan(DEMO, devices=["cpu", "cpu"]))


@pytest.mark.parametrize(
    "change",
    [{"formula": None}, {"formula": {"devices": [], "kinds": {}}}, {"name": 3}, {"devices": [1]},
     {"devices": [{"device": "cpu", "last": 99}]}, {"context": 0}, {"context": None}],
)  # fmt: skip
def test_bad_data_of_several_devices(split, change):
    with pytest.raises(OptionError, match="plan: "):
        MemoryPlan({**split.to_dict(), **change})


@pytest.mark.parametrize(
    "change", [{"parts": [1, 2]}, {"parts": [-1] * 14}, {"read": [0.5] * 14}, {"stream": "x"}, {"lent": -1}, {"formula": {}}]
)
def test_bad_formulas_of_several_devices(split, change):
    data = split.to_dict()
    data["formula"]["kinds"]["cuda"].update(change)
    with pytest.raises(OptionError, match="plan: "):
        MemoryPlan(data)


def test_static_twin_of_several_devices(split, tmp_path):
    shown = MemoryPlan(replace(split, name="<script>alert(1)</script>", path="<script>'"))
    data, _ = shown._repr_mimebundle_()
    assert "<script" not in data["text/html"]
    assert "cuda:1" in data["text/html"] and "ex.load(" in data["text/html"]
    assert data["text/plain"].startswith("MemoryPlan(cpu: layers 0 to ")
    shown.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size < 200_000
