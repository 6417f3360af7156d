"""MemoryPlan's Python half: every kind of source, traits in range, the static twin."""

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
    assert data["image/png"]
    shown.to_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size < 200_000
