"""Where a conversion runs. Knows nothing of what it does there."""

from __future__ import annotations

import torch

from exl2nb.core import env
from exl2nb.core.errors import DeviceError, OptionError
from exl2nb.ops import libraries

_EXPECTED = "expected 'auto', 'cpu', 'cuda' or 'cuda:<number>'"


def pick(device: str | torch.device | None) -> torch.device:
    """The device that was asked for.

    Args:
        device: "cpu"; "cuda" or "cuda:1"; "auto": the GPU where torch sees one and the CUDA library was built, else the CPU; None: what the
            variable EXL2NB_DEVICE says, or "auto".

    Raises:
        OptionError: it is none of these. DeviceError: there is no such GPU.
    """
    asked = env.get("EXL2NB_DEVICE", "auto") if device is None else device
    if asked == "auto":
        return torch.device(libraries().best_device())
    try:
        found = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"convert: device is {device!r}; {_EXPECTED}") from error
    if found.type not in ("cpu", "cuda"):
        raise OptionError(f"convert: device is {device!r}; {_EXPECTED}")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise DeviceError(f"convert: device is {device!r}; found {count} CUDA GPUs that can be used here, expected 'cpu' or 'auto'")
    return found


def describe(device: torch.device) -> str:
    """For people: "the CPU", or the GPU's name and number."""
    return "the CPU" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)} ({device})"
