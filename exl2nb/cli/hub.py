"""`exl2nb pull` and `push`: one revision from the hub, converted models to it."""

from __future__ import annotations

import argparse
from pathlib import Path

from exl2nb.cli.console import Console
from exl2nb.cli.models import file_bytes
from exl2nb.core.show import size_text


def add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="hub id, such as owner/name")
    parser.add_argument("--revision", help="branch, tag or commit; EXL2 models often have one branch per bitrate")


def run_pull(args: argparse.Namespace, console: Console) -> int:
    """Download, and print the folder."""
    from exl2nb.converter.publish import pull
    from exl2nb.io.hub import check_id, display_name

    folder = pull(check_id(args.model), args.revision, progress=console.sink)
    size = file_bytes(folder)
    data = {"path": str(folder), "name": display_name(folder, args.revision), "revision": args.revision or "main", "bytes": size}
    console.result(data, f"{data['name']}: {size_text(size)} of weights in\n{folder}")
    return 0


def add_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("directories", nargs="+", metavar="DIR", help="directories that `exl2nb convert` made")
    parser.add_argument(
        "repository", metavar="REPO", help="owner/name on the hub; made where it does not exist. Log in first: hf auth login"
    )
    parser.add_argument("--revision", action="append", help="branch of a directory, once for each (default: by bitrate, such as 4.0bpw)")
    parser.add_argument("--source", metavar="ID", help="hub id of the model that was converted, for the model card")
    parser.add_argument("--private", action="store_true", help="make the repository a private one")


def run_push(args: argparse.Namespace, console: Console) -> int:
    """Upload, and print what is where."""
    from exl2nb.converter.publish import push

    folders = [Path(directory) for directory in args.directories]
    options = {"revisions": args.revision, "source": args.source, "private": args.private}
    made = push(folders, args.repository, progress=console.sink, **options)
    data = [{"repo_id": one.repo_id, "revision": one.revision, "url": one.url} for one in made]
    console.result({"published": data}, "\n".join(f"{one.repo_id}@{one.revision}  {one.url}" for one in made))
    return 0
