"""A server as Python holds it: on a thread of its own beside a notebook, or in the main thread of `exl2nb serve`."""

from __future__ import annotations

import asyncio
import contextvars
import html
import queue
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any

from exl2nb.core.errors import MissingDependency, OptionError
from exl2nb.core.show import facts

try:
    import uvicorn

    from exl2nb.server.app import application
    from exl2nb.server.state import State, Ticket
except ImportError as error:
    raise MissingDependency(f"serving needs packages that are not installed ({error.name}); pip install 'exl2nb[server]'") from error

from exl2nb.server.server_options import ServerOptions

if TYPE_CHECKING:
    from exl2nb.llm.llm import LLM

TICK_S = 0.05
KEEP_ALIVE_S = 60  # of a connection without a request
FORCED_S = 5.0  # what the end waits for after connections were cut


class Server:
    """A running server. Made by `llm.serve()`; ended by `stop()` or a `with` block. The engine stays as it is.

    Attributes:
        url: where it listens. options: its `ServerOptions`.

    Args:
        llm: the model, None to begin without one. owned: the server may close it and load another.
    """

    def __init__(self, llm: LLM | None, options: ServerOptions, *, owned: bool = False) -> None:
        self.options = options
        self._state = State(options, llm, owned=owned)
        self._socket = _bind(options.host, options.port)
        host, port = self._socket.getsockname()[:2]
        self.port = int(port)
        shown = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"
        config = uvicorn.Config(
            application(self._state),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(options.drain_s)),
        )
        self._uvicorn = _Uvicorn(config, self._state)
        self._thread: threading.Thread | None = None

    # ---- life

    def start(self) -> Server:
        """Serve on a thread of its own; returns when it answers. Installs no signal handlers."""
        ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                _run(self._serve(lambda: ready.put(None)))
            except BaseException as error:
                ready.put(error)

        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="exl2nb-server", daemon=True)
        self._thread.start()
        try:
            while True:
                try:
                    error = ready.get(timeout=TICK_S)
                    break
                except queue.Empty:
                    continue
        except BaseException:
            self.stop(drain_s=0)
            raise
        if error is not None:
            self._socket.close()
            raise error
        return self

    def run(self, started: Callable[[], None]) -> None:
        """Serve in this thread until a signal ends it; for the command line. uvicorn handles SIGINT and SIGTERM."""
        _run(self._serve(started))

    def stop(self, drain_s: float | None = None) -> None:
        """End the server; running requests may finish within `drain_s` (None = as in its options), then they are cancelled.

        A second call does nothing.
        """
        self._state.draining = True
        self._uvicorn.should_exit = True
        deadline = time.monotonic() + (self.options.drain_s if drain_s is None else drain_s)
        self._join(deadline)
        if self.running:
            self._state.cancel_all()
            self._uvicorn.force_exit = True
            self._join(time.monotonic() + FORCED_S)
        self._socket.close()

    def close(self) -> None:
        """Stop, and close a model that the server owns."""
        self.stop()
        if self._state.owned and (llm := self._state.model) is not None:
            llm.close()

    def _join(self, deadline: float) -> None:
        while self.running and time.monotonic() < deadline:
            assert self._thread is not None
            self._thread.join(TICK_S)

    async def _serve(self, started: Callable[[], None]) -> None:
        serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._socket]))
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0.005)
        if not serving.done():
            started()
        try:
            await serving
        finally:
            for ticket in list(self._state.active.values()):
                self._state.end(ticket)

    # ---- what it does

    @property
    def running(self) -> bool:
        """Whether its thread still serves."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def requests(self) -> list[Ticket]:
        """Requests that run, then the last that ended, the newest first."""
        return [*list(self._state.active.values()), *reversed(list(self._state.recent))]

    def figures(self) -> dict[str, Any]:
        """What a monitor shows, as plain data: requests, tokens, pages."""
        state, llm = self._state, self._state.model
        now = time.monotonic()
        active = list(state.active.values())
        rows = [
            {
                "number": one.number,
                "route": one.route,
                "client": one.client,
                "state": one.state,
                "seconds": round(one.seconds, 3),
                "ttft_s": None if one.ttft_s is None else round(one.ttft_s, 4),
                "prompt_tokens": one.prompt_tokens,
                "cached_tokens": one.cached_tokens,
                "new_tokens": one.new_tokens,
            }
            for one in self.requests[:100]
        ]
        recent = [one for one in list(state.recent) if one.ended_at is not None and now - one.ended_at < 10]
        ttfts = sorted(one.ttft_s for one in recent if one.ttft_s is not None)
        scheduler = None if llm is None else llm.engine.loop.scheduler
        return {
            "url": self.url,
            "model": None if llm is None else state.model_name,
            "running": self.running,
            "active": len(active),
            "queued": 0 if scheduler is None else len(scheduler.waiting),
            "max_queue": self.options.max_queue,
            "pages": 0 if llm is None else llm.engine.pages.num_pages,
            "pages_free": 0 if llm is None else llm.engine.pages.num_free,
            "tokens": state.metrics.tokens + sum(one.new_tokens for one in active),
            "ttft_p50_s": ttfts[len(ttfts) // 2] if ttfts else None,
            "ttft_p99_s": ttfts[min(len(ttfts) - 1, len(ttfts) * 99 // 100)] if ttfts else None,
            "requests": rows,
        }

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        figures = self.figures()
        state = f"{figures['active']} requests" if figures["running"] else "stopped"
        return f"Server({self.url}, {figures['model'] or 'no model'}, {state}, {len(self._state.recent)} ended)"

    def _repr_html_(self) -> str:
        figures = self.figures()
        rows = {
            "state": "running" if figures["running"] else "stopped",
            "model": figures["model"] or "none",
            "requests": f"{figures['active']} of at most {figures['max_queue']}, {figures['queued']} of them queued",
            "cache pages": f"{figures['pages'] - figures['pages_free']} of {figures['pages']} in use",
            "tokens": f"{figures['tokens']} generated",
        }
        columns = ("number", "route", "client", "state", "seconds", "ttft_s", "prompt_tokens", "new_tokens")
        head = "".join(f"<th>{name}</th>" for name in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape('' if one[name] is None else str(one[name]))}</td>" for name in columns) + "</tr>"
            for one in figures["requests"][:20]
        )
        return facts(self.url, rows) + (f"<table><tr>{head}</tr>{body}</table>" if body else "")


class _Uvicorn(uvicorn.Server):
    """uvicorn, whose signal handler also stops new requests on open connections."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn; a second SIGINT cuts what still runs."""
        self._state.draining = True
        super().handle_exit(sig, frame)


def _run(serving: Coroutine[Any, Any, None]) -> None:
    """Run to the end on an event loop of its own: uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serving)
    else:
        uvloop.run(serving)


def serve(llm: LLM, **options: Any) -> Server:
    """See `LLM.serve`."""
    return Server(llm, ServerOptions.of(**options)).start()


def _bind(host: str, port: int) -> socket.socket:
    """A listening address.

    Raises:
        OptionError: it is taken, or not of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(family, kind, proto)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise OptionError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; give another port (0 = a free one) or host"
        ) from error
    made.set_inheritable(False)
    return made
