"""Several replicas of a server behind one address, on Ray Serve: `exl2nb serve MODEL --on ray --replicas 2`.

A router takes requests and hands each to a replica, which is a whole server without sockets: model, engine, application. Requests whose
prompts begin alike go to the replica that had that beginning before, as its pages are cached there; Ray Serve's model multiplexing keeps
the books, with the hash of the beginning in place of a model's name, and sends elsewhere what such a replica has no room for.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

from exl2nb.core.errors import GenerationError, MissingDependency, OptionError
from exl2nb.server.server_options import ServerOptions

PREFIX_CHARACTERS = 1024  # characters: about a page of 256 tokens, the least that is cached
MAX_KNOWN_PREFIXES = 256  # that a replica is known for; the oldest is forgotten first
MAX_REQUEST_TRIES = 3  # of a request whose replica is lost before it has answered
APPLICATION_NAME = "exl2nb"
_SCOPE_KEYS = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server", "root_path")


class Scale(NamedTuple):
    """How many replicas: always `least`, or between both as requests come and go."""

    least: int
    most: int

    @classmethod
    def read(cls, value: object) -> Scale:
        """Of "2" or "1:4".

        Raises:
            OptionError: neither.
        """
        found = re.fullmatch(r"([1-9][0-9]{0,4})(?::([1-9][0-9]{0,4}))?", str(value))
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if most < least:
            raise OptionError(f"serve: replicas is {str(value)[:40]!r}; expected a number, or the least and the most, as in '1:4'")
        return cls(least, most)


def beginning(body: bytes) -> str:
    """What a request's prompt begins with, as a hash; empty where it is shorter than what replicas keep."""
    try:
        asked = json.loads(body)
        parts = [asked.get(name) for name in ("system", "instructions", "messages", "prompt", "input")] if isinstance(asked, dict) else []
        text = _text(parts)
    except (ValueError, RecursionError):  # no JSON, or nested without end: the replica says what is wrong with it
        return ""
    known = text[:PREFIX_CHARACTERS].encode(errors="replace")  # JSON may spell surrogates
    return blake2b(known, digest_size=8).hexdigest() if len(text) >= PREFIX_CHARACTERS else ""


def _text(value: object) -> str:
    """The texts of a prompt in order; token ids as numbers."""
    if isinstance(value, Mapping):
        return "".join(f"{key}\0{_text(part)}\0" for key, part in value.items() if key in ("role", "content", "text"))
    if isinstance(value, Sequence) and not isinstance(value, str):
        out = ""
        for part in value:
            if len(out) >= PREFIX_CHARACTERS:
                break
            out += _text(part)
        return out
    return "" if value is None else value if isinstance(value, str) else f"{value} "


class Replica:
    """A server without sockets; Ray Serve holds it in a process of its own."""

    def __init__(self, model: str, options: ServerOptions, loading: dict[str, Any], adapters: Sequence[tuple[str, float]] = ()) -> None:
        from exl2nb.llm.load import load
        from exl2nb.server.app import application
        from exl2nb.server.state import State

        self._llm = load(model, progress=None, **loading)
        for path, scale in adapters:
            self._llm.loras.load(path, scale=scale, progress=None)
        self._state = State(options, self._llm, owned=True)
        self._app = application(self._state)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """Status and headers of the answer to a request, then the pieces of its body. Closing it early cancels the request."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        requests: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await messages.put(message)

        whole: Any = {**scope, "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
        task = asyncio.ensure_future(self._app(whole, receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message["headers"]]
                elif piece := message.get("body"):
                    yield piece
            await task
        finally:
            left.set()
            if not task.done():
                done, _ = await asyncio.wait([task], timeout=5)
                if not done:
                    task.cancel()

    def check_health(self) -> None:
        """Ray Serve asks from time to time, and replaces a replica that raises."""
        if self._llm.engine.closed:
            raise GenerationError("the engine is closed")

    def __del__(self) -> None:
        with suppress(AttributeError):
            self._llm.close()


class Router:
    """What listens: hands requests to replicas. most: bytes of a body."""

    def __init__(self, replicas: Any, most: int) -> None:
        self._replicas, self._most = replicas, most

    async def __call__(self, request: Any) -> Any:
        """A starlette request -> a starlette response."""
        from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
        from starlette.responses import PlainTextResponse, StreamingResponse

        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > self._most:
                break  # the application refuses it
        scope = {key: request.scope[key] for key in _SCOPE_KEYS if key in request.scope}
        handle = self._replicas.options(stream=True, multiplexed_model_id=beginning(body))
        lost = ""
        for _ in range(MAX_REQUEST_TRIES):
            pieces = handle.answer.remote(scope, body)
            try:
                status, headers = await anext(pieces)
            except RayError as error:
                lost = type(error).__name__
                continue
            response = StreamingResponse(_read(pieces), status_code=status)
            response.raw_headers = [(bytes(name), bytes(value)) for name, value in headers]
            return response
        return PlainTextResponse(f"no replica answers: {lost}", 503)


async def _read(pieces: Any) -> AsyncIterator[bytes]:
    try:
        async for piece in pieces:
            yield piece
    finally:
        pieces.cancel()  # where the client has gone


class Replicas:
    """Replicas that run. Made by `serve_replicas`; ended by `stop()` or a `with` block.

    Attributes:
        url: where they listen.
    """

    def __init__(self, url: str, *, ours: bool) -> None:
        self.url, self._ours = url, ours

    def stop(self) -> None:
        """End the replicas, and Ray where it was started for them; running requests may finish within their `drain_s`."""
        import ray  # pyright: ignore[reportMissingImports]
        from ray import serve  # pyright: ignore[reportMissingImports]

        if ray.is_initialized():
            serve.delete(APPLICATION_NAME)
            if self._ours:
                serve.shutdown()
                ray.shutdown()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Replicas({self.url})"


def serve_replicas(
    model: str,
    options: ServerOptions,
    *,
    replicas: str | int = 1,
    gpus: float | None = None,
    loading: Mapping[str, Any] | None = None,
    adapters: Sequence[tuple[str, float]] = (),
) -> Replicas:
    """Serve a model by replicas on the Ray cluster that is running, or one that is started here.

    Args:
        model: a directory or hub id that every node finds. options: as of one server; each replica has its own queue of `max_queue`.
        replicas: a number, or "MIN:MAX": as many as requests need. gpus: of a replica; None = 1 where the cluster has any.
        loading: keywords of `exl2nb.load`. adapters: (path, scale) each.

    Raises:
        MissingDependency: Ray Serve is not installed. OptionError: options that only one server can have.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray import serve  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependency(f"serve: --on ray needs Ray Serve ({error.name}): pip install 'exl2nb[ray,server]'") from None
    scale, loading = Scale.read(replicas), dict(loading or {})
    for name in ("model_dir", "lora_dir"):
        if getattr(options, name) is not None:
            raise OptionError(f"serve: {name} with replicas: a client would change one of them; start them with what they shall serve")
    ours = not ray.is_initialized()
    if ours:
        paths = os.pathsep.join(filter(None, sys.path))
        ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    port = options.port or _free_port(options.host)
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU") and loading.get("device") != "cpu" else 0.0

    class Served(Replica):
        """A replica that says which beginnings it has had."""

        @serve.multiplexed(max_num_models_per_replica=MAX_KNOWN_PREFIXES)
        async def remember(self, hashed: str) -> str:
            return hashed

        async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
            if hashed := serve.get_multiplexed_model_id():
                await self.remember(hashed)
            async for piece in super().answer(scope, body):
                yield piece

    sized: dict[str, Any] = {"num_replicas": scale.least}
    if scale.most > scale.least:
        busy = loading.get("max_sequences", 16)  # requests in one batch: more would wait
        sized = {"autoscaling_config": {"min_replicas": scale.least, "max_replicas": scale.most, "target_ongoing_requests": busy}}
    served = serve.deployment(
        name="replica",
        max_ongoing_requests=options.max_queue,
        graceful_shutdown_timeout_s=options.drain_s,
        ray_actor_options={"num_cpus": 0 if gpus else 1, "num_gpus": gpus},
        **sized,
    )(Served)
    routing = serve.deployment(name="router", max_ongoing_requests=1 << 16, ray_actor_options={"num_cpus": 0})(Router)
    try:
        serve.start(http_options={"host": options.host, "port": port})
        bound = served.bind(model, options, loading, [*adapters])
        serve.run(routing.bind(bound, options.max_body_bytes), name=APPLICATION_NAME, route_prefix="/")
    except BaseException:
        if ours:
            serve.shutdown()
            ray.shutdown()
        raise
    shown = "127.0.0.1" if options.host == "0.0.0.0" else f"[{options.host}]" if ":" in options.host else options.host
    return Replicas(f"http://{shown}:{port}", ours=ours)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as made:
        made.bind((host, 0))
        return int(made.getsockname()[1])
