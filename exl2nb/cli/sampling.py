"""Generation options on the command line: the same names and meanings as in Python."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.cli.models import add_flag
from exl2nb.core.options import options_of
from exl2nb.generator.request import Request
from exl2nb.sampling.defaults import NEUTRAL_VALUES
from exl2nb.sampling.params import SAMPLING_PRESETS, SamplingParams

if TYPE_CHECKING:
    from exl2nb.generator.request import Completion

SAMPLING_FLAGS = {
    name: one for cls in (Request, SamplingParams) for name, one in options_of(cls).items() if one.flag is not None and one.kind is not None
}
FILE_OPTIONS = ("schema", "grammar")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--max-tokens`, `--temperature` and so on, `--stop`, and the options for structured answers."""
    for one in SAMPLING_FLAGS.values():
        if one.common:
            add_flag(parser, one)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given again")
    parser.add_argument(
        "--preset", choices=sorted(SAMPLING_PRESETS), help="a whole set of sampling options; options given with it override it"
    )
    more = parser.add_argument_group("more sampling", "the definitions stand in exl2nb.sampling")
    for one in SAMPLING_FLAGS.values():
        if not one.common:
            add_flag(more, one)
    more.add_argument("--ban", action="append", type=int, metavar="ID", help="never choose this token; may be given again")
    shape = parser.add_argument_group("structured output", "needs pip install 'exl2nb[structured]'; at most one of them")
    shape.add_argument("--schema", metavar="FILE", help="JSON schema that the answer fits")
    shape.add_argument("--grammar", metavar="FILE", help="grammar of the answer, Lark or EBNF")
    shape.add_argument("--regex", help="regular expression that all of the answer matches")
    shape.add_argument("--choice", action="append", metavar="TEXT", help="the answer is one of these; given once for each")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `LLM.stream` for the options that were given."""
    from exl2nb.eval.rows import read_text

    options = (
        {**NEUTRAL_VALUES, **SAMPLING_PRESETS[args.preset]} if args.preset else {}
    )  # a preset is whole: no default of the model adds to it
    options |= {name: value for name in (*SAMPLING_FLAGS, "stop", "regex", "choice") if (value := getattr(args, name)) is not None}
    options |= {name: read_text(Path(path)) for name in FILE_OPTIONS if (path := getattr(args, name)) is not None}
    if args.ban:
        options["banned_tokens"] = args.ban
    if "mirostat_tau" in options:
        options["mirostat"] = True
    return options


def facts(completion: Completion) -> dict[str, Any]:
    """A completion as plain values."""
    timings = completion.timings
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "sampling": completion.sampling.changed,
        "sampling_defaults": {**completion.sampling_defaults.values, "source": completion.sampling_defaults.source},
        "prompt_tokens": timings.prompt_tokens,
        "new_tokens": timings.new_tokens,
        "first_token_s": timings.first_token_s,
        "prefill_tok_s": timings.prefill_tok_s,
        "decode_tok_s": timings.decode_tok_s,
        "ids": [token.id for token in completion.tokens],
        "logprobs": [token.logprob for token in completion.tokens],
    }
