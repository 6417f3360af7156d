"""`exl2nb inspect`, `plan`, `revisions`: what a model holds, what it takes in memory, its branches on the hub; headers alone."""

from __future__ import annotations

import argparse

from exl2nb.cli.console import Console
from exl2nb.cli.models import add_devices_options, add_lora_option, add_model, locate, locate_demo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model(parser, revision=True)


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the table and the map."""
    from exl2nb.llm.functions import inspect

    place = args.model if args.revision else locate_demo(args.model)
    found = inspect(place, revision=args.revision)
    console.result(found.to_dict(), str(found))
    return 0


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model(parser, cache="fp16", revision=True)
    parser.add_argument("--context", type=int, help="tokens of prompt and answer (default: what the model allows, at most 4096)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of that length (default 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose free memory it is compared with (default cpu)")
    parser.add_argument("--free", help="memory to compare with instead, such as 24GiB")
    add_devices_options(parser)
    add_lora_option(parser, "LoRA adapter that will be loaded; again for more")
    parser.add_argument("--draft", help="draft model that will be loaded: a directory or hub id")


def run_plan(args: argparse.Namespace, console: Console) -> int:
    """Print the parts and the verdict; exit code 0 whether it fits or not."""
    from exl2nb.converter.sizes import parse_bytes
    from exl2nb.llm.plan import gpu_layers, plan

    free = None if args.free is None else parse_bytes(args.free, where="--free")
    directory = locate(args.model, console.sink, revision=args.revision)
    sizes = {"context": args.context, "cache": args.cache, "batch": args.batch, "draft": args.draft}
    devices = args.devices if args.gpu_layers is None else gpu_layers(args.gpu_layers)
    loras = [path for path, _ in args.lora or ()]
    found = (
        plan(directory, device=args.device, parallel=args.parallel or "layers", free=free, loras=loras, **sizes)
        if devices is None
        else plan(directory, devices=devices, parallel=args.parallel or "layers", loras=loras, **sizes)
    )
    console.result(found.to_dict(), str(found))
    return 0


def add_revisions_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="hub id, such as owner/name")


def run_revisions(args: argparse.Namespace, console: Console) -> int:
    """Print the table."""
    from exl2nb.io.metadata import revisions

    found = revisions(args.model)
    console.result(found.to_dict(), repr(found))
    return 0
