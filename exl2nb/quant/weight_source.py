"""What weight formats share: where tensors come from, how a broken rule is reported, and the dtypes of plain tensors."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from exl2nb.core.errors import FormatError


class Header(Protocol):
    """A tensor's dtype and shape: a TensorInfo, or a tensor itself."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        ...

    @property
    def shape(self) -> Any:
        """Extents."""
        ...


class Store(Protocol):
    """Where tensors come from, by name: an `io.shards.TensorStore`, an `io.safetensors.SafetensorsFile`, or anything alike."""

    def __contains__(self, name: object, /) -> bool: ...

    def info(self, name: str, /) -> Any:
        """Anything with dtype and shape, perhaps with the `path` of the file for messages."""
        ...

    def read(self, name: str, /) -> Tensor:
        """The tensor itself, on the CPU, with the dtype and shape that `info` says."""
        ...


def broken(file: object, tensor: str, found: str, expected: str) -> FormatError:
    """The error for one violated rule. `file` may be empty where the tensors come from memory."""
    return FormatError(f"{f'{file}: ' if file else ''}tensor {tensor!r}: found {found}, expected {expected}")


DENSE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_dense(info: Header, name: str, shape: tuple[int, ...], *, file: object = "") -> None:
    """Check a norm, a bias, an embedding or an unquantised matrix before it is read.

    Raises:
        FormatError: another shape or dtype. Names file, tensor, found and expected.
    """
    if tuple(info.shape) != shape:
        raise broken(file, name, f"shape {tuple(info.shape)}", f"{shape} from config.json")
    if info.dtype not in DENSE_DTYPES:
        raise broken(file, name, f"dtype {info.dtype}", "float16, bfloat16 or float32")
