"""Residual streams too large for memory: rows in files of the work folder. Knows nothing of models."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl2nb.core.errors import ConversionError
from exl2nb.io.atomic import check_free, write_errors

STREAM_BYTES = 2 << 30  # of streams that a stage works on, and of those that it keeps: what is more goes to files


class DiskStream:
    """A stream f32 `(rows, S, H)` in a file without a name, which is gone with the process however that ends.

    Slices of rows are read and written as those of a tensor are; what is read is a copy on `device`.

    Args:
        shape: `(rows, S, H)`.

    Raises:
        ConversionError: the disk has too little free space.
    """

    def __init__(self, shape: tuple[int, ...], directory: Path, device: torch.device) -> None:
        self.shape, self.device = torch.Size(shape), device
        self.nbytes = 4 * self.shape.numel()
        self._path, self._row = directory / "stream", 4 * self.shape[1:].numel()
        check_free(self._path, self.nbytes)
        with write_errors(self._path, needed_bytes=self.nbytes):
            self.file: Any = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115

    @property
    def is_cuda(self) -> bool:
        """Whether its rows are wanted on a GPU."""
        return self.device.type == "cuda"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Tensor:
        first, last, _ = rows.indices(len(self))
        found = torch.empty(max(0, last - first), *self.shape[1:])
        if not found.numel():
            return found.to(self.device)
        space, got = found.view(-1).numpy().data.cast("B"), 0
        self.file.seek(first * self._row)
        while got < len(space) and (count := self.file.readinto(space[got:])):
            got += count
        if got < len(space):
            raise ConversionError(f"{self._path}: found {got} bytes of rows {first} to {last}, expected {len(space)}; convert again")
        return found.to(self.device)

    def __setitem__(self, rows: slice, values: Tensor) -> None:
        first, _, _ = rows.indices(len(self))
        data, put = values.detach().cpu().contiguous().view(-1).numpy().data.cast("B"), 0
        with write_errors(self._path, needed_bytes=self.nbytes):
            self.file.seek(first * self._row)
            while put < len(data):
                put += self.file.write(data[put:])


Stream = Tensor | DiskStream


def new_stream(shape: tuple[int, ...], device: torch.device, *, beside: int, directory: Path | None) -> Stream:
    """A stream that nothing has been written to.

    Args:
        shape: `(rows, S, H)`.
        device: where its rows are used.
        beside: how many streams of its size exist at the same time, this one included.
        directory: for files; None: memory has room.
    """
    if directory is None or fits_in_memory(shape, beside):
        return torch.empty(shape, device=device)
    return DiskStream(shape, directory, device)


def fits_in_memory(shape: tuple[int, ...], count: int) -> bool:
    """Whether `count` f32 streams of a shape, which a stage works on, are kept in memory."""
    return 4 * torch.Size(shape).numel() * count <= STREAM_BYTES


def copy_to_disk(x: Stream, directory: Path) -> DiskStream:
    """A copy of a stream in a file; itself where it is one."""
    if isinstance(x, DiskStream):
        return x
    made = DiskStream(tuple(x.shape), directory, x.device)
    made[:] = x
    return made
