"""From what a caller writes to requests: text or ids, a negative prompt, a structure, several samples. Knows no threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exl2nb.core.errors import ContextOverflow, OptionError
from exl2nb.core.options import shown
from exl2nb.generator.request import Request
from exl2nb.sampling.params import MAX_SEED, check_integer
from exl2nb.tokenizer.tokenizer import Tokenizer

MAX_SAMPLES = 1024
SHORT = 1 << 16  # characters; encoding fewer takes no time worth a check
STRUCTURES = ("schema", "regex", "choice", "grammar")
_OURS = ("stream", "where", "cls", "prompt_ids", "sampling")  # parameters of `Request.of` and its fields, which are no options


def check_length(text: str, tokenizer: Tokenizer, context: int, *, where: str, name: str = "prompt") -> None:
    """Refuse a text that cannot fit a context of so many tokens before encoding it, which takes seconds for megabytes.

    Raises:
        ContextOverflow: it has more tokens.
    """
    if len(text) > SHORT and (least := tokenizer.at_least(text)) > context:
        raise ContextOverflow(
            f"{where}: the {name} has {len(text)} characters, at least {least} tokens, and the context {context}; shorten it, or load the "
            "model with a larger context"
        )


def ids_of(prompt: Any, tokenizer: Tokenizer, *, where: str, name: str = "prompt", context: int | None = None) -> list[int]:
    """The ids of a text, or of ids: a list, or an array of numpy or torch with one dimension.

    Raises:
        OptionError: neither a text nor whole numbers. ContextOverflow: surely more than `context` tokens.
    """
    if isinstance(prompt, str):
        if context is not None:
            check_length(prompt, tokenizer, context, where=where, name=name)
        return tokenizer.encode(prompt)
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, Sequence) and not isinstance(ids, (bytes, bytearray)) and all(type(i) is int for i in ids):
        return list(ids)
    hint = "; several prompts of ids run together in llm.batch" if name == "prompt" and isinstance(ids, (list, tuple)) else ""
    raise OptionError(f"{where}: {name} is {str(prompt)[:80]!r}; expected a text or a list of token ids{hint}")


def compile_structure(options: dict[str, Any], tokenizer: Tokenizer, vocab_size: int, *, where: str) -> None:
    """Put `structure` in the place of schema, regex, choice or grammar."""
    if options.keys() & set(STRUCTURES):
        from exl2nb.constraint.structure import structure_of

        made = structure_of(options, tokenizer, vocab_size, where=where)
        if made is not None:
            options["structure"] = made


def request_of(
    prompt: Any, options: dict[str, Any], tokenizer: Tokenizer, vocab_size: int, *, context: int, where: str, stream: bool
) -> Request:
    """One request.

    Args:
        prompt: text or ids.
        options: of the caller: those of `Request` and `SamplingParams`, and negative_prompt (text or ids) and the structures.
        tokenizer: of the model. vocab_size: of the model. context: of the engine, in tokens. where: the public call, for messages.
        stream: hand tokens over as they come.

    Raises:
        OptionError: says what, where, and what is expected. ContextOverflow: a text that is too long by its length alone.
    """
    options = dict(options)
    for name in options:
        if not isinstance(name, str) or name in _OURS:
            hint = "; to take tokens as they come: llm.stream" if name == "stream" else ""
            raise OptionError(f"{where}: unknown keyword {shown(name)}{hint}")
    ids = ids_of(prompt, tokenizer, where=where, context=context)
    if (negative := options.pop("negative_prompt", None)) is not None:
        options["negative_ids"] = tuple(ids_of(negative, tokenizer, where=where, name="negative_prompt", context=context))
    compile_structure(options, tokenizer, vocab_size, where=where)
    request = Request.of(ids, where=where, stream=stream, **options)
    request.sampling.check_vocabulary(vocab_size, where=where)
    return request


def sample_options(options: dict[str, Any], n: int, *, where: str) -> list[dict[str, Any]]:
    """Options of each of `n` samples: with a seed, sample i has seed + i, so that each can be made again alone."""
    check_integer(f"{where}: n", n, 1, MAX_SAMPLES)
    seed = options.get("seed")
    if seed is None:
        return [dict(options) for _ in range(n)]
    check_integer("seed", seed, 0, MAX_SEED)
    return [{**options, "seed": (seed + i) % (MAX_SEED + 1)} for i in range(n)]
