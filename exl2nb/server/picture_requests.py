"""Pictures in requests: data in the request itself; addresses are fetched only where the server's owner allows it, files never read."""

from __future__ import annotations

import http.client
import socket
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Timer
from typing import Any

from exl2nb.core.errors import PictureError
from exl2nb.llm.requests import IMAGE_TYPES, MAX_PICTURES, VIDEO_TYPES
from exl2nb.model.vision.pictures import Picture, check_total, from_data_url
from exl2nb.server.error_responses import ApiError

MAX_FETCHED = 20 << 20  # bytes of a picture from an address
FETCH_S = 10.0  # of one picture, in all
MAX_FRAMES = 64


def with_pictures(messages: Sequence[Any], *, remote: bool) -> list[Any]:
    """The messages with the pictures in their parts read; nothing of the server's own files can be named.

    Args:
        remote: whether addresses are fetched.

    Raises:
        ApiError: 400, a picture that is neither data nor an address that may be fetched, or one that cannot be read.
    """
    made, count, pixels = [], 0, 0
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)):
            parts = []
            for part in content:
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind in IMAGE_TYPES or kind in VIDEO_TYPES:
                    count += 1
                    if count > MAX_PICTURES:
                        raise ApiError(
                            400, f"messages.{number}: more than {MAX_PICTURES} pictures in one conversation", code="invalid_value"
                        )
                    try:
                        picture = _read(part, kind, f"messages.{number}", remote)
                        pixels += picture.pixels
                        check_total(pixels, f"messages.{number}")
                    except PictureError as error:
                        raise ApiError(400, str(error), param="messages", code="invalid_image") from error
                    name = "video" if kind in VIDEO_TYPES else "image"
                    parts.append({"type": name, name: picture})
                else:
                    parts.append(part)
            message = {**message, "content": parts}
        made.append(message)
    return made


def _read(part: Mapping[str, Any], kind: str, where: str, remote: bool) -> Picture:
    """The picture or video of a part."""
    if kind in VIDEO_TYPES:
        given, fps = part.get("video_url", part.get("video")), part.get("fps", 2.0)
        if not isinstance(given, list):
            return Picture.video(_bytes(given, where, remote), fps=fps, max_frames=MAX_FRAMES, where=where)
        if len(given) > MAX_FRAMES:
            raise PictureError(f"{where}: a video of {len(given)} frames; expected at most {MAX_FRAMES}")
        frames, pixels = [], 0
        for one in given:
            frame = Picture.of(_bytes(one, where, remote), where=where)
            pixels += frame.pixels
            check_total(pixels, where)
            frames.append(frame.frames[0])
        return Picture.video(frames, fps=fps, where=where)
    given = next((part[name] for name in ("image_url", "source", "url", "base64", "image") if part.get(name) is not None), None)
    if part.get("base64") is not None and given is part["base64"]:
        given = f"data:image/any;base64,{given}"
    return Picture.of(_bytes(given, where, remote), where=where)


def _bytes(given: Any, where: str, remote: bool) -> bytes:
    if isinstance(given, Mapping):  # {"url": ..., "detail": ...} or {"type": "base64", "media_type": ..., "data": ...}
        data = given.get("data")
        given = f"data:{given.get('media_type')};base64,{data}" if isinstance(data, str) else given.get("url")
    if not isinstance(given, str):
        raise PictureError(f"{where}: a picture is a {type(given).__name__}; expected a data URL, 'data:image/png;base64,...'")
    if given.startswith("data:"):
        return from_data_url(given, where)
    if not given.startswith(("http://", "https://")):
        raise PictureError(f"{where}: {given[:40]!r} is no data URL; expected 'data:image/png;base64,...'")
    if not remote:
        raise PictureError(
            f"{where}: {given[:60]!r} is an address, and this server fetches none; send the picture itself as a data URL, or start "
            "the server with remote_images"
        )
    try:
        data = _fetched(given, where)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PictureError(f"{where}: {given[:60]!r} cannot be fetched: {str(error)[:100]}") from None
    if len(data) > MAX_FETCHED:
        raise PictureError(f"{where}: {given[:60]!r} has more than {MAX_FETCHED >> 20} MiB")
    return data


def _fetched(address: str, where: str) -> bytes:
    """At most one byte more than `MAX_FETCHED`, within `FETCH_S` in all, however slowly handshakes, headers and bytes come."""
    deadline, data, opened = time.monotonic() + FETCH_S, bytearray(), list[socket.socket]()

    def connect(place: tuple[str, int], *_: Any) -> socket.socket:
        problem: Exception = TimeoutError("timed out")
        for found in socket.getaddrinfo(*place, type=socket.SOCK_STREAM):
            if (left := deadline - time.monotonic()) <= 0:
                break
            try:
                made = socket.create_connection((str(found[4][0]), place[1]), left)
            except OSError as error:
                problem = error
                continue
            made.settimeout(FETCH_S)
            opened.append(made.dup())  # TLS takes the other one over
            return made
        raise problem

    def end() -> None:
        for one in opened:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    timer = Timer(FETCH_S, end)
    timer.daemon = True
    timer.start()
    try:
        with _opener(connect).open(address, timeout=FETCH_S) as answer:
            while len(data) <= MAX_FETCHED and (piece := answer.read1(1 << 16)):
                data += piece
        if time.monotonic() < deadline:
            return bytes(data)
    except (OSError, ValueError, http.client.HTTPException):
        if time.monotonic() < deadline:
            raise
    finally:
        timer.cancel()
        for one in opened:
            one.close()
    raise PictureError(f"{where}: {address[:60]!r} takes longer than {FETCH_S:g} s")


def _opener(connect: Any) -> urllib.request.OpenerDirector:
    """HTTP and HTTPS alone, also where an answer points elsewhere, through connections that `connect` makes."""

    class Plain(http.client.HTTPConnection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._create_connection = connect

    class Secure(http.client.HTTPSConnection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._create_connection = connect

    class PlainHandler(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Plain, req)

    class SecureHandler(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Secure, req)

    made = urllib.request.OpenerDirector()
    others = (urllib.request.ProxyHandler, urllib.request.HTTPRedirectHandler, urllib.request.HTTPDefaultErrorHandler)
    for handler in (PlainHandler, SecureHandler, *others, urllib.request.HTTPErrorProcessor):
        made.add_handler(handler())
    return made
