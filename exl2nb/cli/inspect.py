"""`exl2nb inspect`: what a model directory holds, from headers and group tables alone."""

from __future__ import annotations

import argparse

from exl2nb.cli.console import Console
from exl2nb.cli.models import locate_demo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="model directory, hub id, or `demo`")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the table and the map."""
    from exl2nb.llm.functions import inspect

    place = args.model if args.revision else locate_demo(args.model)
    found = inspect(place, revision=args.revision)
    console.result(found.to_dict(), str(found))
    return 0
