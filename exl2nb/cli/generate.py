"""`exl2nb generate` and `chat`: stream a continuation, or hold a conversation, in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.cli.console import Console
from exl2nb.cli.models import add_generation_config_option, add_load_options, add_lora_option, add_model, lora_options, open_llm
from exl2nb.cli.sampling import add_options, facts, given_options

if TYPE_CHECKING:
    from exl2nb.generator.handle import Handle
    from exl2nb.generator.request import Completion


LORA_HELP = "LoRA adapter in PEFT's format, with its weight; given again: several at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model(parser, cache="fp16")
    parser.add_argument("--prompt", help="text to continue; `-` or nothing reads standard input")
    parser.add_argument(
        "--template",
        metavar="NAME|FILE",
        help="chat template (chatml, llama2 ..., or a Jinja file): the prompt is what the user says; `model` = the model's own",
    )
    parser.add_argument("--context", type=int, help="tokens of prompt and answer together")
    add_load_options(parser)
    add_lora_option(parser, LORA_HELP)
    add_options(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Load, stream, say how fast it was."""
    prompt = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    template = read_template(args.template)
    with open_llm(args, console.sink, context=args.context, cache=args.cache) as llm:
        if args.template:
            prompt = llm.render_chat(prompt, template=template)
        console.say(console.bold(prompt)) if prompt.endswith("\n") else _show(console, console.bold(prompt))
        completion = stream_text(llm.stream(prompt, **lora_options(llm), **given_options(args)), console)
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


def read_template(name: str | None) -> str | None:
    """What --template names: the source in a file, the name of an instruct format as it is; None where the model's own is meant."""
    from exl2nb.eval.rows import read_text
    from exl2nb.tokenizer.template import INSTRUCT_TEMPLATES

    if name in (None, "model"):
        return None
    return name if name in INSTRUCT_TEMPLATES and not Path(name).is_file() else read_text(name)


def _show(console: Console, text: str) -> None:
    if not console.json_mode:
        console.write(text)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_model(parser, cache="fp16")
    add_load_options(parser)
    add_lora_option(parser, LORA_HELP)
    parser.add_argument("--system", help="system message")
    parser.add_argument("--message", action="append", metavar="TEXT", help="say this instead of reading lines; may be given again")
    parser.add_argument(
        "--template", metavar="NAME|FILE", help="chat template in place of the model's own: chatml, llama2 ..., or Jinja file"
    )
    parser.add_argument("--context", type=int, help="tokens of the whole conversation")
    add_generation_config_option(parser)
    add_options(parser)


def run_chat(args: argparse.Namespace, console: Console) -> int:
    """Answer each message until the input ends; `--json` prints one object per answer."""
    template = read_template(args.template)
    own = {} if template is None else {"template": template}
    messages: list[dict[str, Any]] = [{"role": "system", "content": args.system}] if args.system else []
    lines = iter(args.message) if args.message else _lines(console)
    options = given_options(args)
    wanted = args.generation_config is not False
    with open_llm(args, console.sink, context=args.context, cache=args.cache, generation_config=wanted) as llm:
        llm.render_chat(
            [*messages, {"role": "user", "content": ""}], template=template
        )  # a model without a template says so before anybody types
        if (added := llm.sampling_defaults.beside(options)) and not console.quiet:
            console.err.write(f"[sampling] {added}\n")
        for line in lines:
            messages.append({"role": "user", "content": line})
            completion = stream_text(llm.chat(messages, stream=True, **own, **lora_options(llm), **options), console)
            messages.append({"role": "assistant", "content": completion.text})
            console.say()
            if console.json_mode:
                console.result({"message": line, **facts(completion)}, "")
    return 0


def _lines(console: Console) -> Iterator[str]:
    """Lines of standard input; a prompt sign on a terminal. Ends at end of file."""
    live = sys.stdin.isatty() and not console.json_mode
    while True:
        if live:
            console.write(console.bold("> "))
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
