"""What a model is made of, before anything of it is loaded or downloaded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from exl2nb.core.errors import Exl2Error
from exl2nb.io.peek import peek
from exl2nb.model.inspect import Inspection
from exl2nb.model.inspect import inspect as inspect_directory


def inspect(path: str | os.PathLike[str], *, revision: str | None = None) -> Inspection:
    """Bits per matrix of a model directory, or of a hub id without its weights.

    Args:
        path: a folder, or "owner/name".
        revision: branch, tag or commit on the hub.

    Returns:
        As `model.inspect.inspect`; of a hub id with the id as path.

    Raises:
        ModelNotFound, OptionError: as `io.peek.peek`. ConfigError, FormatError: as `model.inspect.inspect`.
    """
    with peek(path, revision) as folder:
        if Path(path).expanduser().exists():
            return inspect_directory(folder)
        try:
            return replace(inspect_directory(folder), path=Path(path))
        except Exl2Error as error:  # the folder is none of the caller's
            raise type(error)(str(error).replace(str(folder), os.fspath(path))) from None
