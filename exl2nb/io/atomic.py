"""Files that appear complete or not at all: write to a temporary file, fsync, rename. Knows nothing of their content."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from exl2nb.core.errors import ConversionError

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_write(path: str | os.PathLike[str], *, needed_bytes: int = 0) -> Iterator[BinaryIO]:
    """Open a file that takes its final name only when the block ends without an error.

    The bytes go to a hidden temporary file in the same directory; at the end it is flushed to the disk, renamed over `path`, and the
    directory entry is flushed too. On any error (an interrupt included) the temporary file is removed and `path` is what it was before.
    A symbolic link stays one: what it points to is written.

    Args:
        path: the final name; its directory must exist.
        needed_bytes: what will be written, where known: refused at once when the disk has less.

    Raises:
        ConversionError: the disk is full, or the directory cannot be written; names path, needed and free bytes. Or `path` is a directory,
        a device or a pipe, which a rename would destroy.
    """
    path = check_writable(path)
    temporary = sibling(path)
    with write_errors(path, needed_bytes=needed_bytes):
        check_free(path, needed_bytes)
        descriptor = _create(path, temporary)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_directory(path.parent)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def check_writable(path: str | os.PathLike[str]) -> Path:
    """What `atomic_write` would write, links followed; refuses at once what it would refuse at the end of long work."""
    path = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    if not path.name or path.is_dir():
        raise ConversionError(f"{str(path)!r} is a directory; expected the name of a file to write")
    if path.exists() and not path.is_file():
        raise ConversionError(f"{str(path)!r} is a device or a pipe; expected the name of a file to write")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConversionError(f"{path}: cannot be written; make {path.parent} a directory you may write to")
    return path


def _create(path: Path, temporary: Path) -> int:
    try:
        return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _DISK_FULL_ERRORS:
            raise
        raise ConversionError(f"{path}: cannot be written ({error.strerror}); make {path.parent} a directory you may write to") from error


def sibling(path: Path) -> Path:
    """A hidden, unused name next to `path`; ends in `.tmp`, so no reader mistakes it for a model file."""
    return path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.tmp")


def sync_file(path: Path) -> None:
    """Flush a file's bytes to the disk: a rename may reach it before them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(directory: Path) -> None:
    """Make a directory and those above it; their entries reach the disk."""
    if directory.is_dir():
        return
    make_directories(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to the disk, where the file system can."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Bytes free on the file system that will hold `path`; -1 where the system does not say."""
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:
        return -1


def check_free(path: Path, needed_bytes: int) -> None:
    """Raise ConversionError when `needed_bytes` do not fit on the disk of `path`."""
    free = free_bytes(path) if needed_bytes else -1
    if 0 <= free < needed_bytes:
        raise ConversionError(_full(path, needed_bytes, free))


@contextmanager
def write_errors(path: Path, *, needed_bytes: int = 0) -> Iterator[None]:
    """Turn the system's "disk full" into a ConversionError that names `path`, needed and free bytes."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ConversionError(
                f"{path}: the file is larger than this process (ulimit -f) or file system may write; nothing was left under this name; "
                "raise the limit or write elsewhere"
            ) from error
        if error.errno in _DISK_FULL_ERRORS:
            raise ConversionError(_full(path, needed_bytes, free_bytes(path))) from error
        raise


def _full(path: Path, needed: int, free: int) -> str:
    amount = f"{needed} bytes needed, " if needed else ""
    return f"{path}: the disk is full ({amount}{free} bytes free); nothing was left under this name; free some space or write elsewhere"
