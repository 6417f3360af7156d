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


def placeholder(beginning: bytes) -> str | None:
    """Say what a file is where a failed download has left something else in its place, or None.

    Args:
        beginning: at least the first 512 bytes of the file, or all of it.

    Returns:
        A phrase for messages that says what was found and what to do.
    """
    if beginning.startswith(b"version https://git-lfs.github.com/spec/"):
        return "a Git LFS pointer, expected the file itself; run `git lfs pull` in its folder, or download it again"
    text = beginning[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml", b"<error>")):
        return "a web page, as servers send with errors and logins, expected the file itself; download it again, logged in if needed"
    if not beginning:
        return "an empty file, expected the whole one; download it again"
    return None
