"""The course's notebooks in a folder of the reader's own: found, copied, kept up to date where nobody edited them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import exl2nb
from exl2nb.core.errors import ModelNotFound, OptionError
from exl2nb.io.atomic import atomic_write

RECORD = ".exl2nb-course.json"
"""In the folder: name -> SHA-256 of the notebook as it was copied, which tells edited ones from old ones."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """What `copy_course` did, names of notebooks. kept: edited by the reader, so left alone. same: as the package has them."""

    new: tuple[str, ...]
    updated: tuple[str, ...]
    kept: tuple[str, ...]
    same: tuple[str, ...]


def course_folder() -> Path:
    """Where the notebooks are: beside the package in a checkout, inside it in a wheel.

    Raises:
        ModelNotFound: in neither place.
    """
    places = [Path(path) for path in exl2nb.__path__]
    candidates = [*(place.parent / "notebooks" for place in places), *(place / "notebooks" for place in places)]
    for folder in candidates:
        if (folder / "01_quickstart.ipynb").is_file():
            return folder
    raise ModelNotFound(f"the course's notebooks are in none of {', '.join(map(str, candidates))}; install exl2nb anew")


def copy_course(target: Path, source: Path | None = None) -> Copied:
    """Copy the notebooks into `target`, made if missing. A notebook that was edited there is never overwritten.

    Raises:
        OptionError: `target` is no folder. OSError: it cannot be written.
    """
    source = course_folder() if source is None else source
    if target.exists() and not target.is_dir():
        raise OptionError(f"lab: {target} is a file; expected a folder for the notebooks, or a name that is free")
    target.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[str]] = {"new": [], "updated": [], "kept": [], "same": []}
    if target.resolve() == source.resolve():
        return Copied(new=(), updated=(), kept=(), same=tuple(path.name for path in _notebooks(source)))
    record = _read_record(target / RECORD)
    for path in _notebooks(source):
        state = _copy_one(path, target / path.name, record.get(path.name))
        found[state].append(path.name)
        if state != "kept":
            record[path.name] = _digest(path.read_bytes())
    with atomic_write(target / RECORD) as file:
        file.write(json.dumps(record, indent=1, sort_keys=True).encode())
    return Copied(**{state: tuple(names) for state, names in found.items()})


def _copy_one(path: Path, to: Path, recorded: str | None) -> str:
    data = path.read_bytes()
    state = "new"
    if to.exists() or to.is_symlink():
        here = to.read_bytes() if to.is_file() else b""
        if here == data:
            return "same"
        if recorded is None or _digest(here) != recorded:
            return "kept"
        state = "updated"
    with atomic_write(to) as file:
        file.write(data)
    return state


def _notebooks(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_record(path: Path) -> dict[str, str]:
    """An unreadable record only means that every notebook counts as edited."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(digest) for name, digest in data.items()} if isinstance(data, dict) else {}
