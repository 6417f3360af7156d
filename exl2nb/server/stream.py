"""Server-sent events: a response that ends its request whatever becomes of the client.

Not sse-starlette: that package replaces a method of uvicorn's server class for the whole process and ends streams at SIGTERM, where a
graceful end lets them finish.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

PING_S = 10.0  # a comment after so long without a first event: proxies and clients give up on silent connections
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event(data: Any, name: str = "") -> str:
    """One event: JSON, or a text as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


class EventStream(StreamingResponse):
    """Streams events; `on_end` is called once nothing more is sent, also when the client has gone."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(with_pings(events), media_type="text/event-stream", headers=HEADERS)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def with_pings(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events, and comments while one of the first two takes long: the head of an answer, and its first token."""
    for _ in range(2):
        one = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait({one}, timeout=PING_S))[0]:
                yield ": waiting\n\n"
        finally:
            if not one.done():
                one.cancel()
        if (event := one.result()) is None:
            return
        yield event
    async for one in events:
        yield one
