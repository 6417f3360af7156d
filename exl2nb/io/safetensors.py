"""Safetensors files: reading with a checked header, writing whole or not at all. Knows nothing of models.

A file is: 8 bytes, the header's length (little-endian u64); the header, a JSON object `{name: {"dtype", "shape", "data_offsets"}}` padded
with spaces; the data, tensors side by side without gaps, little-endian, row-major. `__metadata__` may hold a string-to-string object.

The reader is ours although the safetensors library (0.8) takes half the time, 16 against 33 ms for the demo model in the page cache
(benchmarks/libraries.py, 2 busy cores, 2026-11): the library maps the file, so a file that is cut short while it is open ends the process
with SIGBUS, here with a FormatError; it accepts a name that stands twice in the header; it cannot read into memory that is already there.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from exl2nb.core.errors import FormatError, ModelNotFound
from exl2nb.core.files import placeholder
from exl2nb.io.atomic import atomic_write

# In the order in which writers sort tensors (last first): wide types come first in the data, so everything stays aligned.
DTYPE_OF_TAG: dict[str, torch.dtype] = {
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
MAX_TENSORS = 200_000  # of one file; the largest published models have some 100,000 in all their files
# Bytes of a header that open an object or an array, and that separate values. Counting them bounds the memory that parsing takes: a
# Python object takes 50 times the byte that stands for it. A tensor has three of the first kind and at most six of the second at rank 4.
_MAX_OPENED, _MAX_COMMAS = 4 * MAX_TENSORS, 32 * MAX_TENSORS
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True)
class TensorInfo:
    """Position of one tensor. `start` and `end` are byte offsets from the start of the file `path`; `shape` is the tensor's."""

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
    if (found := placeholder(_pread(descriptor, min(size, 512), 0))) is not None:
        raise FormatError(f"{path}: found {found}")
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
    opened = raw.count(b"{") + raw.count(b"[")
    if opened > _MAX_OPENED or raw.count(b",") > _MAX_COMMAS:
        fail(path, None, f"{opened} objects and arrays and {raw.count(b',')} commas", f"at most {_MAX_OPENED} and {_MAX_COMMAS}")
    entries = parse_header(path, raw)
    if len(entries) > MAX_TENSORS + 1:
        fail(path, None, f"{len(entries)} tensors", f"at most {MAX_TENSORS}")
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


def parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    """Parse the JSON header. A key that occurs twice is a FormatError."""

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
    if not isinstance(tag, str) or tag not in DTYPE_OF_TAG:
        fail(path, name, f"dtype {str(tag)[:40]!r}", f"one of {', '.join(DTYPE_OF_TAG)}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(_natural(n) for n in shape):
        fail(path, name, f"shape {str(shape)[:120]}", "a list of non-negative integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_natural(n) for n in offsets) or offsets[0] > offsets[1]:
        fail(path, name, f"data_offsets {str(offsets)[:120]}", "[begin, end], non-negative integers, begin <= end")
    dtype, needed = DTYPE_OF_TAG[tag], DTYPE_OF_TAG[tag].itemsize
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


TAG_OF_DTYPE = {dtype: tag for tag, dtype in DTYPE_OF_TAG.items()}
_DTYPE_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_OF_TAG.values())}
_PIECE_BYTES = 1 << 30  # one read call moves at most 2 GiB on Linux
_COPY_BYTES = 1 << 22


class SafetensorsFile:
    """One open file with a validated header. Threads may read at the same time; `close` (or garbage collection) gives the file back.

    Args:
        path: the file.

    Raises:
        FormatError: the header breaks a rule. Names file, tensor, found and expected.
        ModelNotFound: there is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = open_file(self.path)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            self._infos, self.metadata, self.header_bytes = read_header(self.path, self._descriptor)
        except BaseException:
            self._close()
            raise

    def names(self) -> list[str]:
        """Tensor names in the order of their data."""
        return list(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """The header's entry.

        Raises:
            FormatError: the file has no such tensor.
        """
        if name not in self._infos:
            raise FormatError(f"{self.path}: tensor {name!r}: found none of that name among {len(self._infos)}, expected one")
        return self._infos[name]

    def read(self, name: str, *, rows: tuple[int, int] | None = None, into: Tensor | None = None) -> Tensor:
        """Copy one tensor into memory: a contiguous CPU tensor of the file's dtype and shape.

        Args:
            name: of the tensor.
            rows: first and last + 1 of the rows (of the first dimension) wanted; None for all.
            into: uint8 `(n,)` on the CPU; where it has room the result is a view of it, so that memory need not be made for every tensor.

        The data is read, not mapped: a file cut short while it is open gives a FormatError, where a map would end the process.

        Raises:
            FormatError: no such tensor, or the file has become shorter than its header says.
        """
        info = self.info(name)
        if not self._close.alive:
            raise FormatError(f"{self.path}: tensor {name!r}: found a closed file, expected an open one")
        start, shape = info.start, info.shape
        if rows is not None:
            assert 0 <= rows[0] <= rows[1] <= shape[0], (name, rows, shape)
            start += rows[0] * (info.nbytes // max(shape[0], 1))
            shape = (rows[1] - rows[0], *shape[1:])
        nbytes = math.prod(shape) * info.dtype.itemsize
        raw = torch.empty(nbytes, dtype=torch.uint8) if into is None or into.shape[0] < nbytes else into[:nbytes]
        view, done = raw.numpy().data, 0
        while done < nbytes:
            count = os.preadv(self._descriptor, [view[done : done + _PIECE_BYTES]], start + done)
            if count == 0:
                fail(self.path, name, f"the file ends after {done} of the tensor's bytes", f"{nbytes} bytes: download the file again")
            done += count
        return raw.view(info.dtype).reshape(shape)

    def close(self) -> None:
        """Close the file; reading afterwards is an error. Harmless when repeated."""
        self._close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SafetensorsFile({str(self.path)!r}, {len(self._infos)} tensors)"


# --- writing ------------------------------------------------------------------------------------------------------------------------------


def save(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a whole file, which appears under its name only when it is complete.

    Args:
        path: the file; an existing one is replaced.
        tensors: name -> tensor, any device and strides; tensors are stored by falling element width, then name.
        metadata: strings for `__metadata__`; none is written without it.

    Raises:
        FormatError: a dtype or a name the format does not have.
        ConversionError: the disk is full or the directory cannot be written.
    """
    order = _sorted([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    header = _header(order, metadata)
    with atomic_write(path, needed_bytes=len(header) + sum(tensor.nbytes for tensor in tensors.values())) as file:
        file.write(header)
        for name, _, _ in order:
            file.write(_bytes(tensors[name]))


def header_bytes(parts: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> int:
    """Bytes that a file of these tensors (name, dtype, shape) has before its data."""
    return len(_header(_sorted(parts), None))


class Writer:
    """Takes tensors one by one, so that memory holds one of them, and writes the same bytes as `save`.

    Data goes to a temporary file as it comes; `finish` writes the header and lets the operating system append the data.
    Use `stream`, which makes the two files and cleans them up.
    """

    def __init__(self, data: BinaryIO, metadata: Mapping[str, str] | None = None) -> None:
        self._data, self._metadata = data, metadata
        self._parts: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
        self.nbytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor.

        Raises:
            FormatError: the name was added before, or the dtype is not one of the format's.
        """
        if name in self._parts:
            raise FormatError(f"tensor {name!r}: found it twice, expected each name once")
        _check_entry(name, tensor.dtype)
        self._data.write(_bytes(tensor))
        self._parts[name] = (tensor.dtype, tuple(tensor.shape), self.nbytes)
        self.nbytes += tensor.nbytes

    def finish(self, file: BinaryIO) -> None:
        """Write header and data to `file`."""
        order = _sorted([(name, dtype, shape) for name, (dtype, shape, _) in self._parts.items()])
        file.write(_header(order, self._metadata))
        file.flush()
        self._data.flush()
        for name, dtype, shape in order:
            _copy(self._data, file, self._parts[name][2], _nbytes(dtype, shape))


@contextmanager
def stream(path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> Iterator[Writer]:
    """A Writer for `path`; the file appears under its name when the block ends without an error, and never otherwise.

    Cost: twice the file's size on the disk while it is being finished; one tensor in memory.

    Raises:
        FormatError: see Writer.add.
        ConversionError: the disk is full or the directory cannot be written.
    """
    path = Path(path)
    with atomic_write(path) as file, tempfile.TemporaryFile(dir=path.parent) as data:
        writer = Writer(data, metadata)
        yield writer
        writer.finish(file)


def _check_entry(name: str, dtype: torch.dtype) -> None:
    if dtype not in TAG_OF_DTYPE or not name or name == "__metadata__":
        raise FormatError(f"tensor {name!r}: found {dtype}, expected a name and one of {', '.join(str(d) for d in TAG_OF_DTYPE)}")


def _sorted(parts: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    parts = list(parts)
    for name, dtype, _ in parts:
        _check_entry(name, dtype)
    return sorted(parts, key=lambda part: (-_DTYPE_RANK[part[1]], part[0]))


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def _header(parts: list[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in parts:
        end = offset + _nbytes(dtype, shape)
        entries[name] = {"dtype": TAG_OF_DTYPE[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _copy(source: BinaryIO, target: BinaryIO, offset: int, count: int) -> None:
    """Append `count` bytes of `source` from `offset` to `target`, without passing them through Python where the system can."""
    try:
        while count > 0 and (moved := os.sendfile(target.fileno(), source.fileno(), offset, min(count, _PIECE_BYTES))):
            offset, count = offset + moved, count - moved
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    target.seek(0, os.SEEK_END)
    while count > 0:
        part = os.pread(source.fileno(), min(count, _COPY_BYTES), offset)
        if not part:
            raise OSError(errno.EIO, "the temporary data file is shorter than what was written to it")
        target.write(part)
        offset, count = offset + len(part), count - len(part)
    target.flush()
