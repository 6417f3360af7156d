"""The parser of all commands, and what happens around a command: errors, interrupts, closed pipes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import exl2nb
from exl2nb.cli.console import Console
from exl2nb.core import errors

COMMAND_HELP = {
    "demo": "quantise the packaged model, stream from it, measure it, write a report: start here",
    "convert": "quantise a model directory to EXL2",
    "measure": "measure what every width costs each matrix, for any bitrate to be solved from",
    "generate": "continue a prompt, streaming",
    "chat": "chat with a model in the terminal",
    "serve": "serve a model over HTTP: OpenAI's, Anthropic's and TabbyAPI's routes",
    "eval": "perplexity of a model, and how far it is from another",
    "logits": "logits of given token ids",
    "bench": "how fast a model runs here: load, prefill, decode",
    "inspect": "bits per matrix, from the headers alone",
    "plan": "what a model will take in memory, from the headers alone",
    "revisions": "the branches of a model on the hub, with their bitrates",
    "pull": "download one revision of a model from the hub",
    "push": "upload converted models to the hub, each as a revision of one repository",
    "lab": "the course in JupyterLab: copies of the notebooks in a folder of yours",
    "doctor": "check this installation and say what to do",
}
COMMAND_MODULES = {
    "measure": "convert",
    "chat": "generate",
    "logits": "eval",
    "plan": "inspect",
    "revisions": "inspect",
    "pull": "inspect",
    "push": "inspect",
}
"""Commands defined in another command's module, as `run_NAME` and `add_NAME_arguments`."""
REPORTED_ERRORS = (errors.GenerationError, errors.ConversionError, errors.EngineClosed, errors.OutOfPages, errors.Interrupted)
INTERRUPTED_STATUS = 130


class UsageError(Exception):
    """The command line itself is wrong."""


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of ending the process, and takes no abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise with the command's name."""
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build_parser(command: str | None = None) -> Parser:
    """The parser; only `command`'s own options are filled in when it is given, so that `--help` loads nothing heavy."""
    parser = Parser(prog="exl2nb", description="EXL2-quantised language models: quantise, run, measure.")
    parser.add_argument("--version", action="version", version=f"exl2nb {exl2nb.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, summary in COMMAND_HELP.items():
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        sub.add_argument("--quiet", action="store_true", help="no progress on stderr")
        sub.add_argument("--traceback", action="store_true", help="show where an error came from")
        if command in (None, name):
            home = COMMAND_MODULES.get(name)
            module = import_module(f"exl2nb.cli.{home or name}")
            getattr(module, f"add_{name}_arguments" if home else "add_arguments")(sub)
            sub.set_defaults(run=getattr(module, f"run_{name}" if home else "run"))
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """See `exl2nb.cli.main`."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if word in COMMAND_HELP), None)
    console = Console(json_mode="--json" in words, quiet="--quiet" in words)
    try:
        args = build_parser(name or "").parse_args(words)
        if args.command is None:
            build_parser("").print_help(sys.stderr)
            return 2
        return args.run(args, console)
    except SystemExit as stop:  # argparse after --help or --version
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return console.fail("Interrupted", "interrupted", INTERRUPTED_STATUS)
    except UsageError as error:
        return console.fail("UsageError", str(error), 2)
    except BrokenPipeError:  # `exl2nb inspect | head`: the reader closed the pipe, which is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if "--traceback" in words:
            traceback.print_exc(file=sys.stderr)
        return report(error, console)


def report(error: Exception, console: Console) -> int:
    """Say what went wrong; returns the exit code."""
    kind = type(error).__name__
    if isinstance(error, errors.Exl2Error):
        return console.fail(kind, str(error), 1 if isinstance(error, REPORTED_ERRORS) else 2)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return console.fail(kind, f"{where}{error.strerror or error}", 1)
    return console.fail(kind, f"unexpected {kind}: {error} (add --traceback to see where)", 1)
