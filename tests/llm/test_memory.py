"""The plan before loading is what loading then takes."""

import json
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.cli import main
from exl2nb.core.errors import DeviceError, OptionError

DEMO = Path(ex.__file__).parent / "demo_model"


@pytest.mark.parametrize(("cache", "context"), [("fp16", 1000), ("q4", 4096)])
def test_plan_is_what_load_uses(cache, context):
    planned = ex.plan(DEMO, context=context, cache=cache, batch=5)
    with ex.load(DEMO, context=context, cache=cache, cache_tokens=5 * context, progress=None) as llm:
        assert planned.weights == pytest.approx(llm.weight_bytes, rel=0.02)
        page = 256 * planned.token_bytes
        assert abs(planned.cache - llm.cache_bytes) <= 5 * page, "each text rounds up to whole pages"


def test_fits_and_says_what_to_do():
    roomy = ex.plan(DEMO, free=10**10)
    assert roomy.fits
    assert "fits" in str(roomy)
    small = ex.plan(DEMO, context=4096, batch=4, free=100 * 2**20)
    assert not small.fits
    assert 0 < small.longest < 4096
    assert f"try context={small.longest} or cache='q4'" in str(small)
    assert ex.plan(DEMO, context=small.longest, batch=4, free=100 * 2**20).fits, "the advice works"
    assert "take fewer bits" in ex.plan(DEMO, free=1000).verdict()


def test_repr_is_safe_and_complete():
    planned = ex.plan(DEMO)
    text = planned._repr_html_()
    assert all(name in text for name in ("weights", "cache", "work", "logits"))
    assert sum(planned.parts.values()) == planned.total


@pytest.mark.parametrize("bad", [{"context": 0}, {"batch": True}, {"cache": "q5"}, {"device": "tpu"}, {"free": -1}])
def test_bad_options(bad):
    with pytest.raises(OptionError):
        ex.plan(DEMO, **bad)


def test_no_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no GPU"):
        ex.plan(DEMO, device="cuda")


def test_command(capsys):
    assert main(["plan", "demo", "--batch", "2", "--cache", "q8", "--free", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"], found["cache_mode"], found["free"], found["fits"]) == (2, "q8", 2**30, True)
    assert main(["plan", "demo", "--free", "1GiB"]) == 0
    assert "weights" in capsys.readouterr().out
    assert main(["plan", "demo", "--batch", "0"]) == 2
