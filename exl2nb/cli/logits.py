"""`exl2nb logits`: logits of given token ids, for comparison with other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from exl2nb.cli.console import Console, mega
from exl2nb.cli.models import add_cache_option, loaded, locate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="model directory, hub id, or `demo`")
    parser.add_argument(
        "--ids", type=Path, required=True, metavar="FILE", help="safetensors file with `input_ids` (rows, T), int32 or int64"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write: `logits` (rows, T, vocab) fp32")
    add_cache_option(parser, "fp32")


def run(args: argparse.Namespace, console: Console) -> int:
    """Read ids, run the model, write logits."""
    from exl2nb.core.errors import FormatError
    from exl2nb.eval.logits import logits
    from exl2nb.io import safetensors

    source = safetensors.SafetensorsFile(args.ids)
    if "input_ids" not in source.names():
        found = ", ".join(source.names()) or "no tensor"
        raise FormatError(f"{args.ids}: found {found}; expected a tensor `input_ids` (rows, T); save the ids under that name")
    ids = source.read("input_ids")
    with loaded(locate(args.model, console.sink), console.sink) as model:
        values = logits(model, ids, console.sink, cache=args.cache)
    safetensors.save(args.out, {"logits": values})
    shape = list(values.shape)
    console.result(
        {"out": str(args.out), "shape": shape, "bytes": args.out.stat().st_size}, f"{args.out}: logits {shape} fp32, {mega(values.nbytes)}"
    )
    return 0
