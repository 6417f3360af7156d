"""Warnings that point at the caller's own line, however deep in the package they are raised."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning for the first line outside this package that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
