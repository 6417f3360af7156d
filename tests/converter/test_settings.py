"""Where a conversion runs: what is asked for, what is picked where nothing is, and that files from a GPU are as good."""

import pytest
import torch

from exl2nb.converter import settings as module
from exl2nb.converter.settings import describe_device, pick_device
from exl2nb.core.errors import DeviceError, OptionError


@pytest.fixture
def usable(monkeypatch):
    """A machine with a GPU that can be used, or without one."""

    def set_to(found: bool):
        best = "cuda" if found else "cpu"
        monkeypatch.setattr(module, "libraries", lambda: type("Found", (), {"best_device": lambda self: best})())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(found))

    return set_to


def test_auto_takes_the_gpu_where_there_is_one(usable, monkeypatch):
    monkeypatch.delenv("EXL2NB_DEVICE", raising=False)
    usable(True)
    assert pick_device(None) == pick_device("auto") == pick_device("cuda") == torch.device("cuda")
    assert pick_device("cpu") == torch.device("cpu")
    usable(False)
    assert pick_device(None) == pick_device("auto") == torch.device("cpu")


def test_the_variable_answers_for_nothing(usable, monkeypatch):
    usable(True)
    monkeypatch.setenv("EXL2NB_DEVICE", "cpu")
    assert pick_device(None) == torch.device("cpu")
    assert pick_device("auto") == torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "gpu", "error"), [("abacus", True, OptionError), ("meta", True, OptionError), ("cuda", False, DeviceError)]
)
def test_what_cannot_be_is_named(usable, name, gpu, error):
    usable(gpu)
    with pytest.raises(error, match=f"'{name}'.*expected"):
        pick_device(name)


def test_a_gpu_that_is_not_there(usable):
    usable(True)
    with pytest.raises(DeviceError, match="found 1 CUDA"):
        pick_device("cuda:1")


def test_the_cpu_has_a_name():
    assert describe_device(torch.device("cpu")) == "the CPU"
