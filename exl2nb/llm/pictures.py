"""Pictures in messages: taken out of their parts, and marked in the prompt. Knows no engine; a text model loads without `model.vision`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import OptionError, PictureError
from exl2nb.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2nb.model.vision.encoder import VisionEncoder
    from exl2nb.model.vision.pictures import Picture

MAX_PICTURES = 256  # of one prompt
IMAGE, VIDEO = "\ue001picture\ue001", "\ue001video\ue001"  # stand for pictures while a conversation is text
_MARKS = re.compile(f"\n?({IMAGE}|{VIDEO})\n?")
IMAGES = ("image", "input_image", "image_url")
VIDEOS = ("video", "input_video", "video_url")


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
                parts.append({"type": "text", "text": VIDEO if kind == "video" else IMAGE} if kind else part)
            message = {**message, "content": parts}
        made.append(message)
    return made, found


def with_parts(
    messages: Sequence[Mapping[str, Any]], pictures: Sequence[Picture], source: str, encoder: VisionEncoder, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Messages of plain texts as the template `source` wants them: marks become parts, or the model's own marks where it knows no parts."""
    knows = re.search(r"""['"]image['"]""", source) is not None
    everywhere = knows and "is string" not in source and "is not string" not in source
    marks = {IMAGE: encoder.mark(tokenizer.piece)}
    if encoder.vision.marks.video is not None:
        marks[VIDEO] = encoder.mark(tokenizer.piece, video=True)
    made, count = [], 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            pieces = _MARKS.split(content)
            count += len(pieces) // 2
            if knows and (everywhere or len(pieces) > 1):
                message = {**message, "content": [_part(piece) for piece in pieces if piece]}
            elif len(pieces) > 1:
                message = {**message, "content": re.sub(f"{IMAGE}|{VIDEO}", lambda m: marks[m.group()], content)}
        made.append(dict(message))
    if count != len(pictures):
        raise PictureError(
            f"the conversation has {len(pictures)} pictures and {count} places for them: a text holds a mark of this library"
        )
    return made


def _part(piece: str) -> dict[str, str]:
    if piece in (IMAGE, VIDEO):
        return {"type": "image" if piece == IMAGE else "video"}
    return {"type": "text", "text": piece}


def _kind(part: Any) -> str:
    """What a part is: "image", "video", or "" for a text and what is no part."""
    if isinstance(part, str) or part is None:
        return ""
    if isinstance(part, Mapping):
        kind = part.get("type")
        return "image" if kind in IMAGES else "video" if kind in VIDEOS else ""
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
