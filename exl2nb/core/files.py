"""Read untrusted files: only regular ones, and no more of them than is wanted; those of a tokenizer as text or as a JSON object."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from exl2nb.core.errors import TokenizerError


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


LIMIT_BYTES = 256 << 20  # a tokenizer.json of 250 000 tokens has 30 MB


def read_text(path: Path, limit_bytes: int = LIMIT_BYTES) -> str:
    """The file as UTF-8 text.

    Raises:
        TokenizerError: not a regular file, not readable, not UTF-8, too large, or what a failed download leaves in its place.
    """
    try:
        raw = read_regular(path, limit_bytes)
        if len(raw) > limit_bytes:
            raise TokenizerError(f"{path}: more than {limit_bytes} bytes; expected at most as many: this is no tokenizer file")
        if (raw or path.suffix != ".jinja") and (found := placeholder(raw)) is not None:  # a template may be empty
            raise TokenizerError(f"{path}: found {found}")
        return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")  # as text mode reads it
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read as UTF-8 text ({error}); download the file again") from error


def read_object(path: Path) -> dict[str, Any]:
    """The file as a JSON object; an empty one where the file is missing.

    Raises:
        TokenizerError: the file is there and is something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value
