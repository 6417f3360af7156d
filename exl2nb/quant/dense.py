"""Plain fp16, bf16 and fp32 tensors: which dtypes they may have. Knows nothing of models."""

from __future__ import annotations

import torch

from exl2nb.quant.base import Header, broken

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_dense(info: Header, name: str, shape: tuple[int, ...], *, file: object = "") -> None:
    """Check a norm, a bias, an embedding or an unquantised matrix before it is read.

    Args:
        info: anything with dtype and shape.
        name: full tensor name, for the message.
        shape: what the architecture wants.
        file: for the message.

    Raises:
        FormatError: another shape or dtype. Names file, tensor, found and expected.
    """
    if tuple(info.shape) != shape:
        raise broken(file, name, f"shape {tuple(info.shape)}", f"{shape} from config.json")
    if info.dtype not in DTYPES:
        raise broken(file, name, f"dtype {info.dtype}", "float16, bfloat16 or float32")
