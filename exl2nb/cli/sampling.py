"""Generation options on the command line: the same names and meanings as in Python."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exl2nb.generator.request import Completion

OPTIONS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most new tokens (default 256)"),
    "temperature": (float, "0 = always the most probable token (default 1)"),
    "top_k": (int, "keep the k most probable tokens; 0 = all"),
    "top_p": (float, "keep the most probable tokens up to this probability; 1 = all"),
    "min_p": (float, "keep tokens with this share of the best one's probability; 0 = all"),
    "repetition_penalty": (float, "over 1: tokens already seen become less likely"),
    "seed": (int, "the same seed gives the same text"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--max-tokens`, `--temperature` and so on, and `--stop`."""
    for name, (kind, text) in OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given again")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `LLM.stream` for the options that were given."""
    options = {name: getattr(args, name) for name in (*OPTIONS, "stop")}
    return {name: value for name, value in options.items() if value is not None}


def facts(completion: Completion) -> dict[str, Any]:
    """A completion as plain values."""
    timings = completion.timings
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "prompt_tokens": timings.prompt_tokens,
        "new_tokens": timings.new_tokens,
        "first_token_s": timings.first_token_s,
        "prefill_tok_s": timings.prefill_tok_s,
        "decode_tok_s": timings.decode_tok_s,
        "ids": [token.id for token in completion.tokens],
        "logprobs": [token.logprob for token in completion.tokens],
    }
