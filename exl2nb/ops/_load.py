"""Finds and loads the compiled libraries, and says what keeps the CUDA engine from running and what to do about it."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from exl2nb.core import env

MIN_COMPUTE_CAPABILITY = (7, 5)  # compute capability that the kernels need: T4
MISSING_LIBRARY = "libexl2nb_cuda.so is missing"


@dataclass(frozen=True)
class Obstacle:
    """found: why the CUDA engine cannot be used. todo: how to change that. gpu: whether there is an NVIDIA GPU that could be used."""

    found: str
    todo: str
    gpu: bool = True

    def __str__(self) -> str:
        return f"{self.found}: {self.todo}"


def has_nvidia_gpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether an NVIDIA GPU is plugged in, with a driver or without."""
    if Path("/dev/nvidia0").exists() or (Path("/dev/dxg").exists() and shutil.which("nvidia-smi")):
        return True
    try:
        cards = [card for card in devices.iterdir() if (card / "vendor").read_text().strip() == "0x10de"]
        return any((card / "class").read_text().startswith("0x03") for card in cards)
    except OSError:
        return False


def driver_cuda_version() -> tuple[int, int] | None:
    """CUDA version that the NVIDIA driver supports; (0, 0) where it does not answer, None without one."""
    try:
        library = ctypes.CDLL(ctypes.util.find_library("cuda") or "libcuda.so.1")
        version = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return 0, 0
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def cuda_obstacle(library: Path | None, *, loaded: bool) -> Obstacle | None:
    """Why the CUDA engine cannot be used here; None where it can.

    Args:
        library: libexl2nb_cuda.so, None where it was not built. loaded: whether torch has it. Then the GPU itself is asked, which makes a
            CUDA context where there is none.
    """
    if loaded:
        return _kernel_code_obstacle()
    here, gpu = driver_cuda_version(), has_nvidia_gpu()
    gpu = gpu or here is not None
    if library is None:
        return Obstacle(MISSING_LIBRARY, "install exl2nb again, or run `make build`", gpu)
    return _torch_obstacle(here) or Obstacle("torch sees no GPU", _visible_devices_hint() if gpu else "this machine has no NVIDIA GPU", gpu)


def _torch_obstacle(here: tuple[int, int] | None) -> Obstacle | None:
    """What driver and torch say about one another."""
    import torch

    wanted = torch.version.cuda
    if here is None:
        gpu = has_nvidia_gpu()
        return Obstacle("no NVIDIA driver was found", "install NVIDIA's driver" if gpu else "this machine has no NVIDIA GPU", gpu)
    if wanted is None:
        return Obstacle(f"torch {torch.__version__} is a build without CUDA", "install a torch with CUDA: pip install -U torch")
    if here == (0, 0):
        return Obstacle(
            "the NVIDIA driver does not answer", "see what `nvidia-smi` says; after an update of the driver restart the machine"
        )
    if here[0] < int(wanted.split(".")[0]):
        return Obstacle(
            f"the NVIDIA driver is too old: it supports CUDA {here[0]}.{here[1]}, torch {torch.__version__} needs {wanted}",
            f"install a newer driver, or a torch for CUDA {here[0]}",
        )
    return None


def _visible_devices_hint() -> str:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "see what `nvidia-smi` says" if shown is None else f"CUDA_VISIBLE_DEVICES is {shown!r}: unset it, or name a GPU that is there"


def _kernel_code_obstacle() -> Obstacle | None:
    """Whether kernels can be compiled for the GPU, or are in the cache."""
    import torch

    if not torch.cuda.is_available():
        return Obstacle(
            "torch sees no GPU", f"{_visible_devices_hint()}; the library was loaded because of EXL2NB_FORCE_CUDA_LIB", has_nvidia_gpu()
        )
    from exl2nb.ops import gpu

    major, minor = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    if (major, minor) < MIN_COMPUTE_CAPABILITY:
        return Obstacle(
            f"the GPU is too old: {name}",
            f"the CUDA engine needs {MIN_COMPUTE_CAPABILITY[0]}.{MIN_COMPUTE_CAPABILITY[1]} or newer; the CPU engine runs everywhere",
        )
    problem = gpu.device_error()
    if not problem:
        return None
    return Obstacle(f"kernels cannot be compiled for the {name}: {problem}", "see `exl2nb doctor`, or use device='cpu'")


@dataclass(frozen=True)
class Libraries:
    """What was found: paths are None where a library was not built; `loaded` names those in use; `note` says why one is not."""

    cpu: Path | None
    cuda: Path | None
    loaded: tuple[str, ...]
    isa: str
    note: str

    @property
    def cuda_problem(self) -> str:
        """Why the CUDA engine cannot be used, and what to do; empty where it can."""
        found = self.cuda_obstacle
        return "" if found is None else str(found)

    @property
    def cuda_obstacle(self) -> Obstacle | None:
        """The same in parts; None where the CUDA engine can be used. Makes a CUDA context where there is a GPU."""
        if "cpu" not in self.loaded:
            return Obstacle("the compiled library is not in use", self.note, gpu=False)
        return cuda_obstacle(self.cuda, loaded="cuda" in self.loaded)

    def best_device(self) -> str:
        """The device: "cuda" where it can be used, else "cpu"; one warning where there is a GPU all the same, saying why."""
        found = self.cuda_obstacle
        if found is None:
            return "cuda"
        if found.gpu:
            warn_once(
                f"the GPU is not used, models run on the CPU: {found}. `exl2nb doctor` says more; device='cpu' says that this is meant"
            )
        return "cpu"


def find_library(name: str) -> Path | None:
    """Path of a compiled library, None where it was not built."""
    import exl2nb  # editable installs split the package: sources in one folder of __path__, the library in another

    return next((p for root in exl2nb.__path__ if (p := Path(root) / name).exists()), None)


def on_device(device: str) -> AbstractContextManager[object]:
    """Make "cuda:N" this thread's current device for the length of a `with`; "cuda" and "cpu" change nothing."""
    if ":" not in device:
        return nullcontext()
    import torch

    return torch.cuda.device(device)


@cache
def warn_once(text: str) -> None:
    """Once a process."""
    warnings.warn(text, RuntimeWarning, stacklevel=5)


@cache
def load_libraries() -> Libraries:
    """Load `libexl2nb_cpu.so`, and `libexl2nb_cuda.so` where torch can use a GPU; idempotent.

    Without the CPU library the torch reference ops answer: slow, and right.

    Raises:
        FormatError: the library's program schema is not this package's.
    """
    import torch

    from exl2nb.ops import kernel_code
    from exl2nb.ops.records import check_schema

    cpu, cuda = find_library("libexl2nb_cpu.so"), find_library("libexl2nb_cuda.so")
    if env.get("EXL2NB_ENGINE", "compiled") == "reference":
        return Libraries(cpu, cuda, (), "reference", "EXL2NB_ENGINE=reference")
    if cpu is None:
        note = "libexl2nb_cpu.so was not built: run `make build` or `pip install --no-build-isolation .`"
        return Libraries(None, cuda, (), "reference", note)
    torch.ops.load_library(cpu)
    isa = ("base", "avx2", "avx512")[torch.ops.exl2nb.isa(torch.empty(0))]
    check_schema(bytes(torch.ops.exl2nb.program_schema(torch.empty(0)).tolist()).decode())
    loaded, note = ["cpu"], ""
    if cuda is not None and (torch.cuda.is_available() or env.get("EXL2NB_FORCE_CUDA_LIB", "0") == "1"):
        torch.ops.load_library(cuda)
        kernel_code.connect_library(cuda)
        loaded.append("cuda")
    elif cuda is not None:
        note = "torch sees no GPU"
    return Libraries(cpu, cuda, tuple(loaded), isa, note)
