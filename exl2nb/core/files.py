"""Reading a stranger's file: only a regular one, and no more of it than is wanted. Knows no formats."""

from __future__ import annotations

import errno
import os
import stat


def read_regular(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """The content of a regular file; of a larger one the first `limit_bytes` + 1 bytes, so that the caller can tell.

    A pipe by this name is not waited for, and a device such as /dev/zero not read.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "found a directory, pipe or device; expected a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes + 1)
    finally:
        os.close(descriptor)
