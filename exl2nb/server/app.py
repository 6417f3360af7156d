"""The application: routes, keys, limits and error shapes put together. Knows no sockets."""

from __future__ import annotations

from fastapi import Depends, FastAPI, HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import exl2nb
from exl2nb.server import anthropic, error_responses, lora_routes, openai, responses, tabby
from exl2nb.server.error_responses import ApiError, response_of
from exl2nb.server.server_options import LOCAL_HOSTS, ServerOptions
from exl2nb.server.state import State, user


def application(state: State) -> FastAPI:
    """The ASGI application of one server."""
    options = state.options
    app = FastAPI(
        title="exl2nb",
        version=exl2nb.__version__,
        description="OpenAI's, Anthropic's and TabbyAPI's routes over one engine.",
        docs_url="/docs" if options.docs else None,
        openapi_url="/openapi.json" if options.docs else None,
        redoc_url=None,
    )
    app.state.server = state
    error_responses.install(app)
    for router in (openai.router, responses.router, anthropic.router):
        app.include_router(router, dependencies=[Depends(user)])
    for router in (tabby.open_routes, tabby.router, tabby.admin_routes, lora_routes.router, lora_routes.admin_routes):
        app.include_router(router)
    app.add_middleware(Guard, options=options)
    if options.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["*"], allow_headers=["*"])
    return app


class Guard:
    """Refuses requests with a larger body, without reading it to its end, those that call a local server by a foreign name, and, where no
    key protects the server, those that a page of another origin makes.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._most = app, options.max_body_bytes
        # a page may point a name of its own at this machine; the requests it makes carry that name
        self._hosts = {*LOCAL_HOSTS, options.host, *options.allowed_hosts} if options.local else None
        # a page may send simple requests anywhere without asking first
        self._origins = None if options.api_keys or options.admin_keys or "*" in options.cors_origins else frozenset(options.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (error := self._refused(dict(scope["headers"]))) is not None:
            await response_of(error, scope["path"])(scope, receive, send)
            return
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._most:
                raise HTTPException(413, f"the body is larger than {self._most} bytes")
            return message

        await self._app(scope, counted, send)

    def _refused(self, headers: dict[bytes, bytes]) -> ApiError | None:
        host = headers.get(b"host", b"").decode("latin-1")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
        if self._hosts is not None and name.lower() not in self._hosts:
            return ApiError(403, f"this server is not called {name[:80]!r}; call it by its address, or add the name to allowed_hosts")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if self._origins is not None and origin and origin not in self._origins and origin.partition("://")[2] != host:
            return ApiError(403, f"requests of pages from {origin[:80]!r} are not allowed; add it to cors_origins, or set a key")
        announced = headers.get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self._most:
            return ApiError(413, f"the body is larger than {self._most} bytes", code="request_too_large")
        return None
