"""Where a model runs: the device that was asked for, and the device of every layer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from exl2nb.core import env
from exl2nb.core.errors import DeviceError, OptionError
from exl2nb.core.options import shown
from exl2nb.ops._load import load_libraries

_DEVICE_NAME = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True)
class Placement:
    """The device of every layer.

    Attributes:
        layers: "cpu", "cuda" or "cuda:1" for each layer, in running order.
    """

    layers: tuple[str, ...]

    @classmethod
    def on(cls, device: str, num_layers: int) -> Placement:
        """All layers on one device."""
        return cls((device,) * num_layers)

    @property
    def devices(self) -> tuple[str, ...]:
        """Each device once, in the order in which the layers first use it."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Each kind of device once: "cpu", "cuda"."""
        return tuple(dict.fromkeys(device.partition(":")[0] for device in self.layers))

    def __str__(self) -> str:
        return "+".join(self.devices)


def pick_device(device: str | torch.device | None, *, where: str = "load", needs_engine: bool = True) -> str:
    """Check a device that the caller asked for, or choose one.

    Args:
        device: "cpu", "cuda" (the current GPU), "cuda:1", or "auto" (the GPU if the CUDA engine can use it, else the CPU). None: the
            variable EXL2NB_DEVICE, or "auto".
        where: the caller, for messages.
        needs_engine: the CUDA engine must be able to use the GPU. False: it is enough that torch can use it.

    Returns:
        "cpu", "cuda" or "cuda:N".

    Raises:
        OptionError: the name is not one of these.
        DeviceError: there is no such GPU, or it cannot be used. The message says why.
    """
    wanted = env.get("EXL2NB_DEVICE", "auto") if device is None else str(device) if isinstance(device, torch.device) else device
    if not isinstance(wanted, str) or not _DEVICE_NAME.fullmatch(wanted):
        raise OptionError(f"{where}: device is {shown(wanted)}; expected one of auto, cpu, cuda, cuda:<number>")
    if wanted == "cpu":
        return wanted
    libraries = load_libraries()
    if wanted == "auto":
        return libraries.best_device()
    advice = "`exl2nb doctor` says more"
    if needs_engine and (problem := libraries.cuda_problem):
        raise DeviceError(f"device {wanted!r} cannot be used: {problem}; use device='cpu', or leave it at 'auto'; {advice}")
    kind, _, number = wanted.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= count:
        found = f"{count} GPUs, cuda:0 to cuda:{count - 1}" if count else "no GPU"
        raise DeviceError(f"device {wanted!r} is not there: torch sees {found}; {advice}")
    return f"{kind}:{int(number)}" if number else kind
