"""`exl2nb inspect`, `plan`, `revisions`, `pull`, `push`: models as files, on this machine and on the hub. No model is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

from exl2nb.cli.console import Console
from exl2nb.cli.models import add_devices_options, add_lora_option, add_model, file_bytes, locate, locate_demo
from exl2nb.core.show import size_text


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
