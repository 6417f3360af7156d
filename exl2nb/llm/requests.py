"""From what a caller writes to requests: text or ids, pictures in messages, a structure, several samples. Knows no threads.

A text model loads without `model.vision`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import ContextOverflow, OptionError, PictureError
from exl2nb.core.options import shown
from exl2nb.generator.request import Request
from exl2nb.sampling.params import MAX_ID, MAX_SEED, check_integer
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2nb.model.vision.encoder import VisionEncoder
    from exl2nb.model.vision.pictures import Picture

MAX_SAMPLES = 1024
SHORT_TEXT_CHARACTERS = 1 << 16  # characters; encoding fewer takes no time worth a check
STRUCTURE_OPTIONS = ("schema", "regex", "choice", "grammar")
_RESERVED_NAMES = ("stream", "where", "cls", "prompt_ids", "sampling")  # parameters of `Request.of` and its fields, which are no options


def check_length(text: str, tokenizer: Tokenizer, context: int, *, where: str, name: str = "prompt") -> None:
    """Refuse a text that cannot fit a context of so many tokens before encoding it, which takes seconds for megabytes.

    Raises:
        ContextOverflow: it has more tokens.
    """
    if len(text) > SHORT_TEXT_CHARACTERS and (least := tokenizer.at_least(text)) > context:
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
        if ids and max(max(ids), -min(ids)) > MAX_ID:
            raise OptionError(f"{where}: {name} holds a number that is no token id; expected 0 to {MAX_ID} at most")
        return list(ids)
    hint = "; several prompts of ids run together in llm.batch" if name == "prompt" and isinstance(ids, (list, tuple)) else ""
    raise OptionError(f"{where}: {name} is {str(prompt)[:80]!r}; expected a text or a list of token ids{hint}")


def compile_structure(options: dict[str, Any], tokenizer: Tokenizer, vocab_size: int, *, where: str) -> None:
    """Put `structure` in the place of schema, regex, choice or grammar."""
    if options.keys() & set(STRUCTURE_OPTIONS):
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
        if not isinstance(name, str) or name in _RESERVED_NAMES:
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


MAX_PICTURES = 256  # of one prompt
IMAGE_MARK = "\ue001picture\ue001"  # stand for pictures while a conversation is text
VIDEO_MARK = "\ue001video\ue001"
_PICTURE_MARKS = re.compile(f"\n?({IMAGE_MARK}|{VIDEO_MARK})\n?")
IMAGE_TYPES = ("image", "input_image", "image_url")
VIDEO_TYPES = ("video", "input_video", "video_url")


def take_pictures(messages: Sequence[Any]) -> tuple[list[Any], list[Picture]]:
    """The messages with a mark in the place of each picture, and the pictures in order.

    A part is a picture if its type is "image" or "video", as the field "image" or "video" (also "url", "path" and "base64") gives it,
    OpenAI's "image_url" or "input_image", Anthropic's "source", or a picture itself.

    Raises:
        PictureError: a picture that cannot be used, too many of them, or a text that holds a mark.
    """
    from exl2nb.model.vision.pictures import check_total

    made: list[Any] = []
    found: list[Picture] = []
    pixels = 0
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)):
            parts = []
            for part in content:
                kind = _kind(part)
                if kind and len(found) >= MAX_PICTURES:
                    raise PictureError(f"message {number}: more than {MAX_PICTURES} pictures in one conversation; give fewer")
                if kind:
                    found.append(_picture(part, kind, number))
                    pixels += found[-1].pixels
                    check_total(pixels, f"message {number}")
                parts.append({"type": "text", "text": VIDEO_MARK if kind == "video" else IMAGE_MARK} if kind else part)
            message = {**message, "content": parts}
        made.append(message)
    return made, found


def with_parts(
    messages: Sequence[Mapping[str, Any]], pictures: Sequence[Picture], source: str, encoder: VisionEncoder, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Messages of plain texts as the template `source` wants them: marks become parts, or the model's own marks where it knows no parts."""
    knows = re.search(r"""['"]image['"]""", source) is not None
    everywhere = knows and "is string" not in source and "is not string" not in source
    marks = {IMAGE_MARK: encoder.mark(tokenizer.piece)}
    if encoder.vision.marks.video is not None:
        marks[VIDEO_MARK] = encoder.mark(tokenizer.piece, video=True)
    made, count = [], 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            pieces = _PICTURE_MARKS.split(content)
            count += len(pieces) // 2
            if knows and (everywhere or len(pieces) > 1):
                message = {**message, "content": [_part(piece) for piece in pieces if piece]}
            elif len(pieces) > 1:
                message = {**message, "content": re.sub(f"{IMAGE_MARK}|{VIDEO_MARK}", lambda m: marks[m.group()], content)}
        made.append(dict(message))
    if count != len(pictures):
        raise PictureError(
            f"the conversation has {len(pictures)} pictures and {count} places for them: a text holds a mark of this library"
        )
    return made


def _part(piece: str) -> dict[str, str]:
    if piece in (IMAGE_MARK, VIDEO_MARK):
        return {"type": "image" if piece == IMAGE_MARK else "video"}
    return {"type": "text", "text": piece}


def _kind(part: Any) -> str:
    """What a part is: "image", "video", or "" for a text and what is no part."""
    if isinstance(part, str) or part is None:
        return ""
    if isinstance(part, Mapping):
        kind = part.get("type")
        return "image" if kind in IMAGE_TYPES else "video" if kind in VIDEO_TYPES else ""
    from exl2nb.model.vision.pictures import Picture

    if isinstance(part, Picture):
        return "video" if part.is_video else "image"
    return "image" if hasattr(part, "savefig") or hasattr(part, "__array__") or type(part).__module__.startswith("PIL.") else ""


def _picture(part: Any, kind: str, number: int) -> Picture:
    from exl2nb.model.vision.pictures import Picture

    where = f"message {number}"
    if not isinstance(part, Mapping):
        return Picture.of(part, where=where)
    fields = ("image", "video", "image_url", "video_url", "url", "path", "base64", "source")
    given = next((part[name] for name in fields if part.get(name) is not None), None)
    if isinstance(given, Mapping):  # OpenAI: {"url": ..., "detail": ...}; Anthropic: {"type": "base64", "media_type": ..., "data": ...}
        given = given.get("url") or (f"data:{given.get('media_type')};base64,{given.get('data')}" if given.get("data") else None)
    elif part.get("base64") is not None and given is part["base64"]:
        given = f"data:image/any;base64,{given}"
    if given is None:
        raise OptionError(f"{where} holds a part of type {part.get('type')!r} without a picture; expected it under {kind!r}")
    if kind == "video":
        options = {name: part[name] for name in ("fps", "max_frames") if part.get(name) is not None}
        return Picture.video(given, where=where, **options)
    return Picture.of(given, where=where)
