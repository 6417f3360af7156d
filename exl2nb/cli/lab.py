"""`exl2nb lab`: the course in JupyterLab."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from exl2nb.cli.console import Console
from exl2nb.cli.course import copy_course
from exl2nb.core.errors import MissingDependency

FOLDER = "exl2nb-course"
FIRST = "01_quickstart.ipynb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("folder", nargs="?", default=FOLDER, help=f"where your copies of the notebooks go (default ./{FOLDER})")
    parser.add_argument("--open", default=FIRST, metavar="NOTEBOOK", help=f"the notebook to open (default {FIRST})")
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


def lab_command(folder: Path, *, first: str = FIRST, port: int | None = None, browser: bool = True) -> list[str]:
    """The command line that opens `first` of `folder`."""
    command = [sys.executable, "-m", "jupyter", "lab", f"--ServerApp.root_dir={folder.resolve()}"]
    command += [f"--LabApp.default_url=/lab/tree/{first}"] if (folder / first).is_file() else []
    command += [f"--port={port}"] if port is not None else []
    command += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # containers: JupyterLab would end with a hint
    return command if browser else [*command, "--no-browser"]


def _until_it_ends(command: list[str], folder: Path) -> int:
    """Ctrl-C reaches JupyterLab as well, which asks whether it is meant; so this only waits."""
    process = subprocess.Popen(command, cwd=folder)
    while process.poll() is None:
        with suppress(KeyboardInterrupt):
            process.wait()
    return process.returncode
