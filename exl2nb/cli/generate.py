"""`exl2nb generate`: continue a prompt, streaming to the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from exl2nb.cli.console import Console
from exl2nb.cli.models import add_cache_option, locate
from exl2nb.cli.sampling import add_options, facts, given_options

if TYPE_CHECKING:
    from exl2nb.generator.handle import Handle
    from exl2nb.generator.request import Completion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="model directory, hub id, or `demo`")
    parser.add_argument("--prompt", help="text to continue; `-` or nothing reads standard input")
    parser.add_argument("--context", type=int, help="tokens of prompt and answer together")
    add_cache_option(parser, "fp16")
    add_options(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Load, stream, say how fast it was."""
    from exl2nb.llm.load import load

    prompt = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    with load(locate(args.model, console.sink), context=args.context, cache=args.cache, progress=console.sink) as llm:
        console.say(console.bold(prompt)) if prompt.endswith("\n") else _show(console, console.bold(prompt))
        completion = stream_text(llm.stream(prompt, **given_options(args)), console)
    console.result({"prompt": prompt, **facts(completion)}, "")
    if not console.quiet:
        console.err.write(f"[{completion.finish_reason}] {completion.timings}\n")
    return 0


def stream_text(handle: Handle, console: Console) -> Completion:
    """Write chunks as they come; returns the completion."""
    with handle:
        for chunk in handle:
            _show(console, chunk.text)
        return handle.result()


def _show(console: Console, text: str) -> None:
    if not console.json_mode:
        console.write(text)
