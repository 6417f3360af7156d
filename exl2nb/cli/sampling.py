"""Generation options on the command line: the same names and meanings as in Python."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2nb.sampling.defaults import NEUTRAL
from exl2nb.sampling.params import PRESETS

if TYPE_CHECKING:
    from exl2nb.generator.request import Completion

OPTIONS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most new tokens (default 256)"),
    "temperature": (float, "0 = always the most probable token (default 1; of a chat: as generation_config.json says, else 0.7)"),
    "top_k": (int, "keep the k most probable tokens; 0 = all"),
    "top_p": (float, "keep the most probable tokens up to this probability; 1 = all"),
    "min_p": (float, "keep tokens with this share of the best one's probability; 0 = all"),
    "repetition_penalty": (float, "over 1: tokens already seen become less likely"),
    "seed": (int, "the same seed gives the same text"),
}
# Less used: all listed under a heading of their own in --help.
MORE: dict[str, tuple[type, str]] = {
    "top_a": (float, "keep tokens with this share of the best one's probability squared; 0 = all"),
    "tfs": (float, "tail-free sampling; 1 = off"),
    "typical_p": (float, "keep the tokens of typical surprise up to this probability; 1 = all"),
    "min_temp": (float, "dynamic temperature: where the model is sure"),
    "max_temp": (float, "dynamic temperature: where it is not; 0 = off"),
    "temp_exponent": (float, "dynamic temperature: exponent of the share of entropy"),
    "smoothing_factor": (float, "quadratic smoothing; 0 = off"),
    "smoothing_curve": (float, "1 = parabola to 3 = cubic"),
    "xtc_probability": (float, "leave out the most obvious tokens this often; 0 = never"),
    "xtc_threshold": (float, "probability from which on a token is obvious (default 0.1)"),
    "mirostat_tau": (float, "target surprise of the text in bits per token; switches mirostat on"),
    "mirostat_eta": (float, "how fast mirostat learns (default 0.1)"),
    "skew": (float, "over 0: towards the less probable tokens"),
    "presence_penalty": (float, "subtracted once from tokens of the new text"),
    "frequency_penalty": (float, "subtracted from them for every occurrence"),
    "penalty_range": (int, "last tokens that the penalties count; 0 = all"),
    "penalty_decay": (int, "further tokens over which they fade"),
    "dry_multiplier": (float, "penalty for repeating a sequence; 0 = off"),
    "dry_base": (float, "its growth per token (default 1.75)"),
    "dry_allowed_length": (int, "repetitions up to this length are free (default 2)"),
    "min_tokens": (int, "least number of new tokens before the text may end"),
}
FILES = ("schema", "grammar")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--max-tokens`, `--temperature` and so on, `--stop`, and the options for structured answers."""
    _add(parser, OPTIONS)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given again")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a whole set of sampling options; options given with it override it")
    more = parser.add_argument_group("more sampling", "the definitions stand in exl2nb.sampling")
    _add(more, MORE)
    text = "presence and frequency penalties count the prompt, too"
    more.add_argument("--penalty-prompt", action="store_const", const=True, help=text)
    more.add_argument("--temperature-last", action="store_const", const=True, help="divide by the temperature after the cuts")
    more.add_argument("--ban", action="append", type=int, metavar="ID", help="never choose this token; may be given again")
    shape = parser.add_argument_group("structured output", "needs pip install 'exl2nb[structured]'; at most one of them")
    shape.add_argument("--schema", metavar="FILE", help="JSON schema that the answer fits")
    shape.add_argument("--grammar", metavar="FILE", help="grammar of the answer, Lark or EBNF")
    shape.add_argument("--regex", help="regular expression that all of the answer matches")
    shape.add_argument("--choice", action="append", metavar="TEXT", help="the answer is one of these; given once for each")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `LLM.stream` for the options that were given."""
    from exl2nb.eval.rows import read_text

    names = (*OPTIONS, *MORE, "temperature_last", "penalty_prompt", "stop", "regex", "choice")
    options = {**NEUTRAL, **PRESETS[args.preset]} if args.preset else {}  # a preset is whole: no default of the model adds to it
    options |= {name: value for name in names if (value := getattr(args, name)) is not None}
    options |= {name: read_text(Path(path)) for name in FILES if (path := getattr(args, name)) is not None}
    if args.ban:
        options["banned_tokens"] = args.ban
    if "mirostat_tau" in options:
        options["mirostat"] = True
    return options


def _add(group: Any, options: dict[str, tuple[type, str]]) -> None:
    for name, (kind, text) in options.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, help=text)


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
