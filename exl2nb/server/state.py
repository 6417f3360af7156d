"""What a server holds: the model, the requests that run, presets. Everything here belongs to the server's event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import to_thread
from fastapi import Request
from starlette.types import Receive

from exl2nb.core.errors import OptionError
from exl2nb.core.progress import Sink
from exl2nb.generator.handle import Handle, Handles
from exl2nb.generator.request import Chunk, Completion
from exl2nb.server.errors import ApiError
from exl2nb.server.fields import check_preset
from exl2nb.server.metrics import Metrics
from exl2nb.server.options import ServerOptions

if TYPE_CHECKING:
    from exl2nb.llm.model import LLM

RECENT = 200  # requests that are over and still listed
MANY = 64  # requests
INLINE_CHARACTERS = 4096  # a longer prompt is encoded on another thread, so that the event loop stays free
CLIENT_GONE = 499  # for the log alone: the client has gone
T = TypeVar("T")


@dataclass(eq=False)
class Ticket:
    """One request of a client: what it is and how far it came.

    state: "running", or how it ended: "done", "cancelled", "error". Times are `time.monotonic()`.
    """

    number: int
    route: str
    client: str
    started: float
    handles: list[Handle]
    state: str = "running"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    first_at: float | None = None
    ended_at: float | None = None

    def count(self, chunk: Chunk) -> None:
        """Tokens have come."""
        if self.first_at is None:
            self.first_at = time.monotonic()
        self.new_tokens += len(chunk.tokens)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_at is None else self.first_at - self.started

    @property
    def seconds(self) -> float:
        """How long it has run, or ran."""
        return (self.ended_at or time.monotonic()) - self.started


class State:
    """One server's model, requests and presets.

    Args:
        llm: the model, or None to begin without one. owned: the server may close it and load another.
    """

    def __init__(self, options: ServerOptions, llm: LLM | None, *, owned: bool) -> None:
        self.options, self.owned = options, owned
        self.presets: dict[str, Mapping[str, Any]] = {}  # by the fields' own names
        for name, preset in options.presets.items():
            try:
                self.presets[name] = check_preset(preset)
            except ApiError as error:
                raise OptionError(f"presets: {name}: {error.message}") from None
        self.metrics = Metrics()
        self.started = time.time()
        self.active: dict[int, Ticket] = {}
        self.recent: deque[Ticket] = deque(maxlen=RECENT)
        self.draining = False
        self.template = options.template
        self.preset: tuple[str | None, Mapping[str, Any]] = (options.preset, self.presets.get(options.preset or "", {}))
        self.changing = asyncio.Lock()  # loading, unloading
        self._llm = llm
        self._numbers = itertools.count(1)

    # ---- the model

    @property
    def model(self) -> LLM | None:
        """The loaded model, if there is one."""
        return None if self._llm is None or self._llm.engine.closed else self._llm

    @property
    def llm(self) -> LLM:
        """The loaded model.

        Raises:
            ApiError: 503, none is loaded.
        """
        if (model := self.model) is None:
            raise ApiError(503, "no model is loaded; load one with POST /v1/model/load", code="no_model")
        return model

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.options.model_name or self.llm.name

    async def load(self, path: str, options: dict[str, Any], sink: Sink | None) -> None:
        """Replace the model; requests of the old one end."""
        from exl2nb.llm.load import load

        self.check_owned()
        async with self.changing:
            await self._unload()
            self._llm = await to_thread.run_sync(lambda: load(path, progress=sink, **options))

    async def unload(self) -> None:
        """Close the model; its requests end."""
        self.check_owned()
        async with self.changing:
            await self._unload()

    def check_owned(self) -> None:
        """Refuse to touch a model that belongs to a notebook."""
        if not self.owned:
            raise ApiError(
                409, "this server was started by llm.serve(): its model is its caller's; `exl2nb serve` loads and unloads models"
            )

    async def _unload(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await to_thread.run_sync(llm.close)

    def resolve(self, name: str) -> Path:
        """A model directory by its name inside `model_dir`.

        Raises:
            ApiError: 400 without model_dir, or for a name that leads out of it; 404 for one that is not there.
        """
        folder = self.options.model_dir
        if folder is None:
            raise ApiError(400, "no model_dir was given, so there are no models to choose from; start the server with --model-dir")
        place = folder / name
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            raise ApiError(400, f"model name {name[:80]!r} leads out of the model folder; expected the name of a folder in it")
        if not (place / "config.json").is_file():
            raise ApiError(404, f"there is no model {name[:80]!r}; GET /v1/model/list names them", code="model_not_found")
        return place

    # ---- requests

    def admit(self, request: Request, route: str) -> Ticket:
        """Take a request in.

        Raises:
            ApiError: 429 where too many run or wait, 503 where the server is about to end.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "30"})
        if len(self.active) >= self.options.max_queue:
            raise ApiError(
                429,
                f"{len(self.active)} requests run or wait; try again later",
                code="queue_full",
                headers={"Retry-After": self._retry_after()},
            )
        client = request.client.host if request.client is not None else ""
        ticket = Ticket(next(self._numbers), route, client, time.monotonic(), [])
        self.active[ticket.number] = ticket
        return ticket

    def end(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """A request is over; whatever of it still runs is cancelled. A second call does nothing."""
        if self.active.pop(ticket.number, None) is None:
            return
        finished = all(handle.done for handle in ticket.handles)
        for handle in ticket.handles:
            handle.cancel()
            if handle.done and isinstance(handle.outcome, Completion):
                completion = handle.outcome
                self.metrics.count(completion)
                ticket.new_tokens = max(ticket.new_tokens, completion.timings.new_tokens)
                ticket.prompt_tokens, ticket.cached_tokens = completion.timings.prompt_tokens, completion.timings.reused_tokens
                ticket.first_at = ticket.first_at or ticket.started + completion.timings.first_token_s
        gone = isinstance(error, ApiError) and error.status == CLIENT_GONE
        ticket.state = "error" if error is not None and not gone else "done" if finished and not gone else "cancelled"
        ticket.ended_at = time.monotonic()
        ticket.handles = []
        self.metrics.requests.labels(ticket.route, ticket.state).inc()
        self.recent.append(ticket)

    def stream_interval_s(self) -> float:
        """For how long a stream that begins now collects tokens: twice as long among many, whose events take the engine's processor."""
        return self.options.stream_interval_ms / 1000 * (2 if len(self.active) > MANY else 1)

    def cancel_all(self) -> None:
        """End every request."""
        for ticket in list(self.active.values()):
            for handle in ticket.handles:
                handle.cancel()

    def _retry_after(self) -> str:
        """Seconds after which one of the running requests has probably ended."""
        ended = [ticket.seconds for ticket in self.recent if ticket.state == "done"][-20:]
        mean = sum(ended) / len(ended) if ended else 1.0
        return str(max(1, min(60, round(mean / max(1, len(self.active)) * 4))))


async def aside(function: Callable[[], T], *, heavy: bool) -> T:
    """Run a function here, or on another thread where it takes long."""
    return await to_thread.run_sync(function) if heavy else function()


async def chunks(ticket: Ticket, interval_s: float) -> AsyncIterator[tuple[int, Chunk]]:
    """What comes, and from which answer of a request, see `Handle.achunks`; keeps the ticket's figures."""
    handles = ticket.handles
    if len(handles) > 1:
        async for index, chunk in Handles(handles).achunks(interval_s):
            ticket.count(chunk)
            yield index, chunk
        return
    async for chunk in handles[0].achunks(interval_s):
        ticket.count(chunk)
        yield 0, chunk


async def results(request: Request, ticket: Ticket) -> list[Completion]:
    """Wait for every answer of a request. If the client goes away they are cancelled.

    Raises:
        ApiError: the client has gone, or the engine failed.
    """
    leaving = asyncio.ensure_future(gone(request.receive))
    waiting = asyncio.gather(*(handle.aresult() for handle in ticket.handles))
    try:
        await asyncio.wait({leaving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ApiError(CLIENT_GONE, "the client went away", code="client_gone")
        return waiting.result()
    except BaseException:
        for handle in ticket.handles:
            handle.cancel()
        raise
    finally:
        for task in (leaving, waiting):
            task.cancel()
            task.add_done_callback(_quiet)


def _quiet(task: asyncio.Future[Any]) -> None:
    """The client has gone."""
    if not task.cancelled():
        task.exception()


async def gone(receive: Receive) -> None:
    """Wait until the client goes away. The body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
