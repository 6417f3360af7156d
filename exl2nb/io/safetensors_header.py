"""The header of a safetensors file: parsed and checked to the last offset before a byte of data is used.

A file is: 8 bytes, the header's length (little-endian u64); the header, a JSON object `{name: {"dtype", "shape", "data_offsets"}}` padded
with spaces; the data, tensors side by side without gaps, little-endian, row-major. `__metadata__` may hold a string-to-string object.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from exl2nb.core.errors import FormatError, ModelNotFound

# In the order in which writers sort tensors (last first): wide types come first in the data, so everything stays aligned.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
HEADER_LIMIT_BYTES = 100_000_000
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `start` and `end` are byte offsets from the start of the file `path`; `shape` is the tensor's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    path: Path

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.end - self.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.nbytes // self.dtype.itemsize


def fail(path: Path, tensor: str | None, found: str, expected: str) -> NoReturn:
    """Raise the FormatError of one violated rule; `tensor` None means the header as a whole."""
    where = f"{path}: header" if tensor is None else f"{path}: tensor {tensor!r}"
    raise FormatError(f"{where}: found {found}, expected {expected}")


def open_file(path: Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        ModelNotFound: there is none. FormatError: it is something else, or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # non-blocking: a pipe by this name must not hang us
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file; expected a .safetensors file") from None
    except OSError as error:
        raise FormatError(f"{path}: file: found one that cannot be opened ({error.strerror}), expected a readable one") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FormatError(f"{path}: file: found a directory, pipe or device, expected a regular file")
    return descriptor


def read_header(path: Path, descriptor: int) -> tuple[dict[str, TensorInfo], dict[str, str], int]:
    """Read and check the header of an open file.

    Returns:
        The entries in the order of their data, `__metadata__`, and the byte at which the data begins.

    Raises:
        FormatError: a rule is broken. Names file, tensor, found and expected.
    """
    size = os.fstat(descriptor).st_size
    if size < 8:
        fail(path, None, f"a file of {size} bytes", "at least the 8 bytes of the header's length")
    length = int.from_bytes(_pread(descriptor, 8, 0), "little")
    if length > size - 8:
        fail(
            path,
            None,
            f"a length of {length} bytes in a file of {size}",
            "a header that ends inside the file: it is cut short or not safetensors",
        )
    if length > HEADER_LIMIT_BYTES:
        fail(path, None, f"a length of {length} bytes", f"at most {HEADER_LIMIT_BYTES}")
    raw = _pread(descriptor, length, 8)
    if len(raw) != length:
        fail(path, None, f"{len(raw)} bytes before the end of the file", f"{length}")
    if not raw.startswith(b"{"):
        fail(path, None, f"first bytes {raw[:8]!r}", "a JSON object: this is not a safetensors file")
    entries = _parse(path, raw)
    metadata = _metadata(path, entries.pop("__metadata__", {}))
    infos = [_entry(path, name, value, 8 + length) for name, value in entries.items()]
    infos.sort(key=lambda info: (info.start, info.end))
    _check_layout(path, infos, 8 + length, size)
    return {info.name: info for info in infos}, metadata, 8 + length


def _pread(descriptor: int, count: int, offset: int) -> bytes:
    parts = []
    while count > 0 and (part := os.pread(descriptor, count, offset)):
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                fail(path, key[:200], "the key twice in one object", "each key once")
            seen[key] = value
        return seen

    def constant(text: str) -> Any:
        fail(path, None, f"the constant {text}", "strict JSON")

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        fail(path, None, f"invalid JSON ({str(error)[:120]})", "a JSON object in UTF-8")
    assert isinstance(value, dict)  # it starts with a brace
    return value


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        fail(path, "__metadata__", f"{type(value).__name__} with values that are not all strings", "an object of strings")
    return value


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_BYTES


def _entry(path: Path, name: str, value: Any, base: int) -> TensorInfo:
    """Check one header entry by itself and turn it into a TensorInfo."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        found = f"keys {sorted(value)}"[:200] if isinstance(value, dict) else type(value).__name__
        fail(path, name, found, "an object with dtype, shape and data_offsets")
    tag, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(tag, str) or tag not in DTYPES:
        fail(path, name, f"dtype {str(tag)[:40]!r}", f"one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(_natural(n) for n in shape):
        fail(path, name, f"shape {str(shape)[:120]}", "a list of non-negative integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_natural(n) for n in offsets) or offsets[0] > offsets[1]:
        fail(path, name, f"data_offsets {str(offsets)[:120]}", "[begin, end], non-negative integers, begin <= end")
    dtype, needed = DTYPES[tag], DTYPES[tag].itemsize
    for extent in shape:
        needed *= extent
        if needed > _MAX_BYTES:
            fail(path, name, f"shape {str(shape)[:120]}, which overflows", "fewer than 2**63 bytes")
    if offsets[1] - offsets[0] != needed:
        fail(path, name, f"{offsets[1] - offsets[0]} bytes in data_offsets", f"{needed} bytes, shape {shape} of {tag}")
    return TensorInfo(name, dtype, tuple(shape), base + offsets[0], base + offsets[1], path)


def _check_layout(path: Path, infos: list[TensorInfo], base: int, size: int) -> None:
    """The data must be the tensors side by side: no overlap, no gap, nothing after the last one. `infos` are sorted by start."""
    position, before = base, "the header"
    for info in infos:
        if info.end > size:
            fail(
                path,
                info.name,
                f"data up to byte {info.end} in a file of {size}",
                "data inside the file: it is cut short, download it again",
            )
        if info.start < position:
            fail(path, info.name, f"data at byte {info.start}, inside {before}", f"byte {position}: tensors must not overlap")
        if info.start > position:
            fail(path, info.name, f"data at byte {info.start} after {before}", f"byte {position}: no gaps")
        position, before = info.end, repr(info.name)
    if size != position:
        fail(path, None, f"{size - position} bytes after the last tensor", f"a file of {position} bytes")
