"""Messages where a GPU cannot be used, and one warning that the CPU is used. Machines are imitated; one test needs a GPU."""

import warnings
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb import ops
from exl2nb.cli import doctor
from exl2nb.core.errors import DeviceError
from exl2nb.ops import _load, gpu, placement

BUILT = Path("libexl2nb_cuda.so")
# machine -> words of what is found, words of what to do, whether there is a GPU
MACHINES = {
    "no gpu": ({"driver": None, "gpu": False}, "no NVIDIA driver", "has no NVIDIA GPU", False),
    "no driver": ({"driver": None}, "no NVIDIA driver", "install NVIDIA's driver", True),
    "old driver": ({"driver": (12, 2)}, "too old: it supports CUDA 12.2", "install a newer driver, or a torch for CUDA 12", True),
    "dead driver": ({"driver": (0, 0)}, "does not answer", "nvidia-smi", True),
    "torch for the cpu": ({"torch": None}, "without CUDA", "install a torch with CUDA", True),
    "hidden": ({"shown": "7"}, "torch sees no GPU", "CUDA_VISIBLE_DEVICES is '7'", True),
    "no library": ({"built": None}, "libexl2nb_cuda.so is missing", "install exl2nb again", True),
    "no compiler": (
        {"loaded": True, "error": "NoCompiler: NVRTC was not found", "capability": (12, 0)},
        "cannot be compiled for the GPU of a test (compute capability 12.0): NoCompiler: NVRTC was not found",
        "exl2nb doctor",
        True,
    ),
    "too old a gpu": ({"loaded": True, "error": "an old GPU", "capability": (6, 1)}, "too old: GPU of a test", "needs 7.5 or newer", True),
}


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine one of MACHINES, as far as `ops.libraries()` can see; returns its answer."""

    def become(name):
        how = {
            "driver": (13, 0),
            "gpu": True,
            "torch": "13.0",
            "built": BUILT,
            "loaded": False,
            **MACHINES[name][0],
        }
        monkeypatch.setattr(_load, "driver_cuda_version", lambda: how["driver"])
        monkeypatch.setattr(_load, "has_nvidia_gpu", lambda: how["gpu"])
        monkeypatch.setattr(torch.version, "cuda", how["torch"])
        if "shown" in how:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", how["shown"])
        if how["loaded"]:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: how["capability"])
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU of a test")
            monkeypatch.setattr(gpu, "device_error", lambda: how["error"])
        found = _load.Libraries(Path("cpu.so"), how["built"], ("cpu", "cuda") if how["loaded"] else ("cpu",), "avx2", "")
        monkeypatch.setattr(_load, "load_libraries", lambda: found)
        monkeypatch.setattr(ops, "libraries", lambda: found)
        monkeypatch.setattr(placement, "load_libraries", lambda: found)
        _load.warn_once.cache_clear()
        return found

    yield become
    _load.warn_once.cache_clear()


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_wrong_and_what_to_do(machine, name):
    libraries = machine(name)
    _, found, todo, there = MACHINES[name]
    problem = libraries.cuda_obstacle
    assert found in problem.found
    assert todo in problem.todo
    assert problem.gpu == there
    (check,) = doctor.diagnose("cuda")
    assert check.state == ("warning" if there else "note")
    assert not there or (todo in check.todo and found in check.found)


@pytest.mark.parametrize("name", MACHINES)
def test_the_cpu_takes_over_with_one_warning(machine, name, monkeypatch):
    monkeypatch.delenv("EXL2NB_DEVICE", raising=False)
    machine(name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with ex.demo(progress=None) as llm:
                assert llm.model.device == "cpu"
                assert llm.generate("It was", max_tokens=2, temperature=0).text
        with ex.demo(progress=None, device="cpu"):
            pass
    about = [str(w.message) for w in told if "the GPU is not used" in str(w.message)]
    assert len(about) == int(MACHINES[name][3])
    assert not about or MACHINES[name][2] in about[0]
    with pytest.raises(DeviceError, match="exl2nb doctor"):
        ex.demo(progress=None, device="cuda")


def test_a_gpu_without_a_driver_is_seen(tmp_path):
    """0x03 is a display's class, 0x0403 the sound of the same card."""
    for name, vendor, kind in (("0000:00:02.0", "0x8086", "0x030000"), ("0000:01:00.1", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    plugged = _load.has_nvidia_gpu(tmp_path)
    assert plugged == Path("/dev/nvidia0").exists()
    (tmp_path / "0000:01:00.1" / "class").write_text("0x030200\n")
    assert _load.has_nvidia_gpu(tmp_path)
    assert _load.has_nvidia_gpu(tmp_path / "nothing") == plugged


@pytest.mark.gpu
def test_this_gpu_can_be_used():
    assert _load.load_libraries().cuda_obstacle is None
    assert gpu.device_error() == ""
    assert _load.has_nvidia_gpu()
    assert (_load.driver_cuda_version() or (0, 0)) > (0, 0)
    (check,) = doctor.diagnose("cuda")
    assert check.state == "ok"
    assert torch.cuda.get_device_name(0) in check.found
