"""`exl2nb plan`: what a model will take in memory, from headers alone."""

from __future__ import annotations

import argparse

from exl2nb.cli.console import Console
from exl2nb.cli.models import add_cache_option, locate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="model directory, hub id, or `demo`")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--context", type=int, help="tokens of prompt and answer (default: what the model allows, at most 4096)")
    parser.add_argument("--batch", type=int, default=1, help="texts of that length at once (default 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose free memory it is held against (default cpu)")
    parser.add_argument("--free", help="memory to hold it against instead, such as 24GiB")
    add_cache_option(parser, "fp16")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the parts and the verdict; exit code 0 whether it fits or not."""
    from exl2nb.converter.sizes import parse_bytes
    from exl2nb.llm.memory import plan

    free = None if args.free is None else parse_bytes(args.free, where="--free")
    directory = locate(args.model, console.sink, revision=args.revision)
    found = plan(directory, context=args.context, cache=args.cache, batch=args.batch, device=args.device, free=free)
    console.result(found.to_dict(), str(found))
    return 0
