"""The environment variables exl2nb reads: this table is all of them. A value that does not parse is an error."""

from __future__ import annotations

import os
import re

from exl2nb.core.errors import OptionError

ENV_VARIABLES: dict[str, tuple[tuple[str, ...], str]] = {
    # name: (allowed values, none: any, N: a number; meaning); the empty string means "not set"
    "EXL2NB_DEVICE": (
        ("auto", "cpu", "cuda", "cuda:N"),
        "where ex.load puts a model, and where a conversion runs, when device= is not given",
    ),
    "EXL2NB_DETERMINISTIC": (("0", "1"), "1: ex.load takes deterministic=True when it is not given"),
    "EXL2NB_ISA": (("base", "avx2", "avx512"), "upper limit of the CPU instruction set (read by the compiled library)"),
    "EXL2NB_ENGINE": (("compiled", "reference"), "reference: never load the compiled library, use the torch reference ops"),
    "EXL2NB_CUDA_PATH": (
        ("0", "1", "2"),
        "CUDA kernels as on an older GPU, its shared memory included: 1 sm_80 to 89, 2 sm_75 (tests; read there)",
    ),
    "EXL2NB_CUDA_PATIENCE": (
        ("0", "1"),
        "0: in stream-K GEMMs no CTA waits for the sums of others, the last one adds them up: the same bits (tests; read there)",
    ),
    "EXL2NB_CUDA_GRAPHS": (("0", "1"), "0: decode steps are launched kernel by kernel, not as captured graphs; slower, the same tokens"),
    "EXL2NB_LORA_INSIDE": (
        ("0", "1"),
        "0: adapters are added by launches of their own, also where products could add them themselves; slower (tests)",
    ),
    "EXL2NB_KERNEL_CACHE": ((), "folder of compiled CUDA kernels, off: none is kept; else exl2nb/kernels in the user's cache folder"),
    "EXL2NB_DRAFTS": ((), "folder of the copies that draft='self' makes; else exl2nb/drafts in the user's cache folder"),
    "EXL2NB_KERNEL_OPTIONS": ((), "more options for NVRTC, such as -DEXL2NB_EVERY_LANE_ARRIVES or -lineinfo (tools)"),
    "EXL2NB_FORCE_CUDA_LIB": (("0", "1"), "1: load the CUDA library even where torch sees no GPU (tests)"),
}


def get(name: str, default: str) -> str:
    """Value of one of ENV_VARIABLES, or `default` where it is unset or empty.

    Raises:
        OptionError: the value is not one of the allowed ones.
    """
    allowed, _ = ENV_VARIABLES[name]
    value = os.environ.get(name, "") or default
    if allowed and re.sub(r":[0-9]{1,3}$", ":N", value) not in allowed:
        raise OptionError(f"environment variable {name} is {value!r}; expected one of {', '.join(allowed)}")
    return value
