"""Server-sent events: a response that ends its request whatever becomes of the client.

An API writes its events as a plain generator, which gives the text to send and takes what the engine has made next. What is ready at one
moment goes out as one write: tokens that came while nothing was sent, and the end of an answer with its last tokens.

Not sse-starlette: that package replaces a method of uvicorn's server class for the whole process and ends streams at SIGTERM, where a
graceful end lets them finish. Not Starlette's StreamingResponse: its task group costs as much as the events of a short answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Generator
from json.encoder import encode_basestring
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from exl2nb.generator.request import Chunk
from exl2nb.server.state import State, Ticket, chunks, gone

HEAD_S = 2.0  # the head of an answer waits so long for its first token, so that both are one write
PING_S = 10.0  # a comment after so long without an event: proxies and clients give up on silent connections
MEDIA_TYPE = "text/event-stream"
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
TEXT_MARK = "\0text\0"  # in a template, the place of a text

Events = Generator[str, "tuple[int, Chunk] | None", None]
"""The events of one answer: yields how it begins, then the text for each (number of the choice, chunk), and for None how it ends."""


def event(data: Any, name: str = "") -> str:
    """One event: JSON, or a text as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


class Frame:
    r"""An event of which one text changes: everything around it is written once.

    Args:
        data: as of `event`, with TEXT_MARK in the place of the text.

    Example:
        >>> Frame({"text": TEXT_MARK})('a "word"')
        'data: {"text":"a \\"word\\""}\n\n'
    """

    def __init__(self, data: Any, name: str = "") -> None:
        self._before, self._after = event(data, name).split(encode_basestring(TEXT_MARK))

    def __call__(self, text: str) -> str:
        """The event."""
        return f"{self._before}{encode_basestring(text)}{self._after}"


class EventStream(Response):
    """Streams the events of one request, and ends the request.

    Args:
        events: what is sent. fail: the event that tells of an error.
    """

    media_type = MEDIA_TYPE

    def __init__(self, state: State, ticket: Ticket, events: Events, fail: Callable[[Exception], str]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(STREAM_HEADERS)
        self._state, self._ticket, self._events, self._fail = state, ticket, events, fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        listening = asyncio.ensure_future(gone(receive))
        listening.add_done_callback(lambda _: self._state.end(self._ticket))  # cancels its handles, which ends the loop below
        out = _Out(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for text, more in self._texts():
                await out.write(text, more=more)
        finally:
            out.close()
            listening.cancel()
            self._state.end(self._ticket)

    async def _texts(self) -> AsyncIterator[tuple[str, bool]]:
        """What to send, and whether more follows."""
        events, handles = self._events, list(self._ticket.handles)
        text = ""
        try:
            text = next(events)
            async for item in chunks(self._ticket, self._state.stream_interval_s()):
                text += events.send(item)
                if text and not all([handle.over for handle in handles]):
                    yield text, True
                    text = ""
            text += events.send(None)
        except Exception as error:
            text += self._fail(error)
        yield text, False


class _Out:
    """The connection. The head goes out with the first text, or after HEAD_S; a comment goes out when nothing else did for PING_S.

    Args:
        begin: the message that carries the head.
    """

    def __init__(self, send: Send, begin: Message) -> None:
        self._send, self._begin = send, begin
        self._silent, self._begun = True, False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(HEAD_S, self._look)
        self._task: asyncio.Task[None] | None = None

    async def write(self, text: str, *, more: bool) -> None:
        """Send a text; with `more` False the last one."""
        self._silent = False
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task = None
        if not self._begun:
            self._begun = True
            await self._send(self._begin)
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})

    def close(self) -> None:
        """Nothing more."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _look(self) -> None:
        if self._silent and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._ping())
        self._silent = True
        self._timer = self._loop.call_later(PING_S, self._look)

    async def _ping(self) -> None:
        if not self._begun:
            self._begun = True
            await self._send(self._begin)
        await self._send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
