"""Safetensors files: reading with a checked header, writing whole or not at all. Knows nothing of models."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from exl2nb.core.errors import FormatError
from exl2nb.io.atomic import atomic_write
from exl2nb.io.safetensors_header import DTYPES, TensorInfo, fail, open_file, read_header

__all__ = ["DTYPES", "SafetensorsFile", "TensorInfo", "Writer", "header_bytes", "save", "stream"]

TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
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

    Data goes to a temporary file as it comes; `finish` puts the header in front and copies the data behind it inside the operating system.
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
    if dtype not in TAGS or not name or name == "__metadata__":
        raise FormatError(f"tensor {name!r}: found {dtype}, expected a name and one of {', '.join(str(d) for d in TAGS)}")


def _sorted(parts: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    parts = list(parts)
    for name, dtype, _ in parts:
        _check_entry(name, dtype)
    return sorted(parts, key=lambda part: (-_RANK[part[1]], part[0]))


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def _header(parts: list[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in parts:
        end = offset + _nbytes(dtype, shape)
        entries[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [offset, end]}
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
