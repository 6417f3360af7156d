"""`exl2nb lab`: the course in JupyterLab; notebooks are copied, and updated where the reader has not edited them."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import exl2nb
from exl2nb.cli.console import Console
from exl2nb.core.errors import MissingDependency, ModelNotFound, OptionError
from exl2nb.io.atomic import atomic_write

RECORD_FILE = ".exl2nb-course.json"
"""In the folder: name -> SHA-256 of the notebook as it was copied, to tell edited ones from old ones."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """What `copy_course` did, names of notebooks. kept: edited by the reader, so left alone. same: as the package has them."""

    new: tuple[str, ...]
    updated: tuple[str, ...]
    kept: tuple[str, ...]
    same: tuple[str, ...]


def course_folder() -> Path:
    """Where the notebooks are: next to the package in a checkout, inside it in a wheel.

    Raises:
        ModelNotFound: in neither place.
    """
    places = [Path(path) for path in exl2nb.__path__]
    candidates = [*(place.parent / "notebooks" for place in places), *(place / "notebooks" for place in places)]
    for folder in candidates:
        if (folder / "01_quickstart.ipynb").is_file():
            return folder
    raise ModelNotFound(f"the course's notebooks are in none of {', '.join(map(str, candidates))}; reinstall exl2nb")


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
    record = _read_record(target / RECORD_FILE)
    for path in _notebooks(source):
        state = _copy_one(path, target / path.name, record.get(path.name))
        found[state].append(path.name)
        if state != "kept":
            record[path.name] = _digest(path.read_bytes())
    with atomic_write(target / RECORD_FILE) as file:
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


COURSE_FOLDER = "exl2nb-course"
FIRST_NOTEBOOK = "01_quickstart.ipynb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "folder", nargs="?", default=COURSE_FOLDER, help=f"where your copies of the notebooks go (default ./{COURSE_FOLDER})"
    )
    parser.add_argument("--open", default=FIRST_NOTEBOOK, metavar="NOTEBOOK", help=f"the notebook to open (default {FIRST_NOTEBOOK})")
    parser.add_argument("--port", type=int, help="port of the server (default: the first free one from 8888)")
    parser.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    parser.add_argument("--copy-only", action="store_true", help="copy the notebooks and start nothing")


def run(args: argparse.Namespace, console: Console) -> int:
    """Copy what is missing, then run JupyterLab until it ends; its exit code."""
    folder = Path(args.folder)
    copied = copy_course(folder)
    command = lab_command(folder, first=args.open, port=args.port, browser=not args.no_browser)
    facts = {"folder": str(folder.resolve()), **{state: list(getattr(copied, state)) for state in ("new", "updated", "kept", "same")}}
    lines = [f"the course is in {folder.resolve()}"]
    for state, words in (("new", "copied"), ("updated", "brought up to date"), ("kept", "edited by you, so left alone")):
        names = getattr(copied, state)
        lines += [f"  {words}: {', '.join(names)}"] if names else []
    if args.copy_only:
        console.result(facts, "\n".join(lines))
        return 0
    if importlib.util.find_spec("jupyterlab") is None:
        raise MissingDependency("lab: JupyterLab is not installed; pip install jupyterlab, or open the folder with another Jupyter")
    console.result({**facts, "command": command}, "\n".join([*lines, "starting JupyterLab; Ctrl-C ends it"]))
    return _until_it_ends(command, folder)


def lab_command(folder: Path, *, first: str = FIRST_NOTEBOOK, port: int | None = None, browser: bool = True) -> list[str]:
    """The command line that opens `first` of `folder`."""
    command = [sys.executable, "-m", "jupyter", "lab", f"--ServerApp.root_dir={folder.resolve()}"]
    command += [f"--LabApp.default_url=/lab/tree/{first}"] if (folder / first).is_file() else []
    command += [f"--port={port}"] if port is not None else []
    command += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # containers: JupyterLab would end with a hint
    return command if browser else [*command, "--no-browser"]


def _until_it_ends(command: list[str], folder: Path) -> int:
    """Ctrl-C reaches JupyterLab as well, which asks for confirmation; so this only waits."""
    process = subprocess.Popen(command, cwd=folder)
    while process.poll() is None:
        with suppress(KeyboardInterrupt):
            process.wait()
    return process.returncode
