"""Finds and loads the compiled libraries. Knows nothing about what the ops do."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from exl2nb.core import env
from exl2nb.ops import nvidia


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
    def cuda_obstacle(self) -> nvidia.Obstacle | None:
        """The same in parts; None where the CUDA engine can be used. Asks the GPU, where there is one."""
        if "cpu" not in self.loaded:
            return nvidia.Obstacle("the compiled library is not in use", self.note, gpu=False)
        return nvidia.obstacle(self.cuda, loaded="cuda" in self.loaded)

    def best_device(self) -> str:
        """The device: "cuda" where it can be used, else "cpu"; one warning where there is a GPU all the same, saying why."""
        found = self.cuda_obstacle
        if found is None:
            return "cuda"
        if found.gpu:
            _warn(f"the GPU is not used, models run on the CPU: {found}. `exl2nb doctor` says more; device='cpu' says that this is meant")
        return "cpu"


def _find(name: str) -> Path | None:
    import exl2nb  # editable installs split the package: sources in one folder of __path__, the library in another

    return next((p for root in exl2nb.__path__ if (p := Path(root) / name).exists()), None)


@cache
def _warn(text: str) -> None:
    """Once a process."""
    warnings.warn(text, RuntimeWarning, stacklevel=5)


@cache
def load() -> Libraries:
    """Load `libexl2nb_cpu.so`, and `libexl2nb_cuda.so` where torch can use a GPU; idempotent.

    Without the CPU library the torch reference ops answer: slow, and right.
    """
    import torch

    cpu, cuda = _find("libexl2nb_cpu.so"), _find("libexl2nb_cuda.so")
    if env.get("EXL2NB_ENGINE", "compiled") == "reference":
        return Libraries(cpu, cuda, (), "reference", "EXL2NB_ENGINE=reference")
    if cpu is None:
        note = "libexl2nb_cpu.so was not built: run `make build` or `pip install --no-build-isolation .`"
        return Libraries(None, cuda, (), "reference", note)
    torch.ops.load_library(cpu)
    isa = ("base", "avx2", "avx512")[torch.ops.exl2nb.isa(torch.empty(0))]
    loaded, note = ["cpu"], ""
    if cuda is not None and (torch.cuda.is_available() or env.get("EXL2NB_FORCE_CUDA_LIB", "0") == "1"):
        torch.ops.load_library(cuda)
        loaded.append("cuda")
    elif cuda is not None:
        note = "the CUDA library is built but torch sees no GPU"
    return Libraries(cpu, cuda, tuple(loaded), isa, note)
