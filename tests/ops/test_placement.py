"""Which device is picked, and how the device of every layer is written."""

import pytest
import torch

from exl2nb.core.errors import DeviceError, OptionError
from exl2nb.ops import placement
from exl2nb.ops.placement import Placement, pick_device


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs that the CUDA engine can use, or that torch alone can use."""

    def set_to(count, problem=""):
        best = "cuda" if count and not problem else "cpu"
        found = type("Found", (), {"best_device": lambda self: best, "cuda_problem": problem if count else "no GPU"})()
        monkeypatch.setattr(placement, "load_libraries", lambda: found)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.delenv("EXL2NB_DEVICE", raising=False)
    return set_to


def test_auto_takes_the_gpu_where_there_is_one(gpus):
    gpus(1)
    assert [pick_device(name) for name in (None, "auto", "cuda", "cuda:0", "cpu")] == ["cuda", "cuda", "cuda", "cuda:0", "cpu"]
    assert pick_device(torch.device("cuda", 0)) == "cuda:0"
    gpus(0)
    assert [pick_device(name) for name in (None, "auto", torch.device("cpu"))] == ["cpu"] * 3


def test_the_variable_replaces_a_device_of_none(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setenv("EXL2NB_DEVICE", "cpu")
    assert pick_device(None) == "cpu"
    assert pick_device("auto") == "cuda"


@pytest.mark.parametrize("name", ["abacus", "cuda:one", "cuda:1000", "meta", 0])
def test_names_of_no_device_are_refused(gpus, name):
    gpus(2)
    with pytest.raises(OptionError, match="convert: device is .*; expected one of auto, cpu, cuda, cuda:<number>"):
        pick_device(name, where="convert")


def test_a_gpu_that_cannot_be_used_is_refused(gpus):
    gpus(2)
    assert pick_device("cuda:1") == "cuda:1"
    with pytest.raises(DeviceError, match="device 'cuda:2' is not there: torch sees 2 GPUs, cuda:0 to cuda:1"):
        pick_device("cuda:2")
    gpus(1, problem="too old")
    with pytest.raises(DeviceError, match="device 'cuda' cannot be used: too old; use device='cpu'"):
        pick_device("cuda")
    assert pick_device("cuda", needs_engine=False) == "cuda"
    gpus(0)
    with pytest.raises(DeviceError, match="device 'cuda' is not there: torch sees no GPU"):
        pick_device("cuda", needs_engine=False)


def test_a_placement_names_each_device_once():
    split = Placement(("cpu", "cuda:1", "cpu", "cuda:0"))
    assert str(split) == "cpu+cuda:1+cuda:0"
    assert split.kinds == ("cpu", "cuda")
    assert str(Placement.on("cuda", 3)) == "cuda"
