"""`exl2nb revisions`: the branches and tags of a model on the hub, with the bitrates their names tell."""

from __future__ import annotations

import argparse

from exl2nb.cli.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="hub id, such as owner/name")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the table."""
    from exl2nb.io.revisions import revisions

    found = revisions(args.model)
    console.result(found.to_dict(), repr(found))
    return 0
