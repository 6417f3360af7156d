"""ServerMonitor: what a server is doing: requests, queue, tokens per second, cache pages, latency of each client."""

from __future__ import annotations

import html
import statistics
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import traitlets as t

from exl2nb.core.errors import OptionError
from exl2nb.core.log import logger
from exl2nb.core.options import shown
from exl2nb.widgets.base import ExlWidget
from exl2nb.widgets.protocol import ServedClient, ServedRequest, ServerMonitorState

CURVE_SAMPLES = 120  # of the throughput curve
MAX_SHOWN_ROWS = 30


class Serving(Protocol):
    """The part of a server that is read here."""

    @property
    def running(self) -> bool: ...  # noqa: D102
    def figures(self) -> dict[str, Any]: ...  # noqa: D102


class ServerMonitor(ExlWidget):
    """Shows a server at work, twice a second, until it stops; the last state stays.

    Args:
        server: what `llm.serve()` gave, or its `figures()` as plain data, which shows one moment.

    Traits to read: url, model, active, queued, max_queue, pages, pages_free, tok_s (the last samples, tokens per second), ttft_p50_s and
    ttft_p99_s of the last ten seconds, requests, clients.

    Example:
        >>> ServerMonitor({"url": "http://127.0.0.1:1", "model": "m", "active": 2, "queued": 1})
        http://127.0.0.1:1: m, 2 requests (1 queued), 0 tok/s, 0 of 0 pages in use
    """

    _bundle, _state_type = "servermonitor", ServerMonitorState

    url = t.Unicode("").tag(sync=True)
    model = t.Unicode("").tag(sync=True)
    active = t.Int(0).tag(sync=True)
    queued = t.Int(0).tag(sync=True)
    max_queue = t.Int(0).tag(sync=True)
    pages = t.Int(0).tag(sync=True)
    pages_free = t.Int(0).tag(sync=True)
    tok_s = t.List().tag(sync=True)
    ttft_p50_s = t.Float(None, allow_none=True).tag(sync=True)
    ttft_p99_s = t.Float(None, allow_none=True).tag(sync=True)
    requests = t.List().tag(sync=True)
    clients = t.List().tag(sync=True)

    _ended: threading.Event | None = None  # the constructor may refuse its arguments, and `close` is called all the same

    def __init__(self, server: Serving | Mapping[str, Any], *, every_s: float = 0.5, **kwargs: Any) -> None:
        self._ended = threading.Event()
        if not isinstance(server, Mapping) and not callable(getattr(server, "figures", None)):
            raise OptionError(f"ServerMonitor: server is {shown(server)}; expected what llm.serve() gave, or its figures()")
        if not isinstance(every_s, (int, float)) or not 0.05 <= every_s <= 3600:
            raise OptionError(f"ServerMonitor: every_s is {shown(every_s)}; expected seconds from 0.05 to 3600")
        super().__init__(**kwargs)
        self._tokens: tuple[float, int] | None = None  # when, and how many there were
        if isinstance(server, Mapping):
            self._show(server)
            return
        self._show(server.figures())
        self.status = "running"
        threading.Thread(target=_watch, args=(weakref.ref(self), server, self._ended, every_s), name="exl2nb-monitor", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        if self._ended is not None:
            self._ended.set()
        super().close()

    def _show(self, figures: Mapping[str, Any]) -> None:
        """Take one look's figures."""
        now, tokens = time.monotonic(), int(figures.get("tokens", 0))
        rows = list(figures.get("requests", ()))[:MAX_SHOWN_ROWS]
        with self.hold_sync():
            for name in ("active", "queued", "max_queue", "pages", "pages_free", "ttft_p50_s", "ttft_p99_s"):
                if name in figures:
                    setattr(self, name, figures[name])
            self.url, self.model = str(figures.get("url", "")), str(figures.get("model") or "")
            if self._tokens is not None and now > self._tokens[0]:
                rate = max(0.0, (tokens - self._tokens[1]) / (now - self._tokens[0]))
                if rate or any(self.tok_s[-8:]):  # nothing is sent while nothing happens
                    self.tok_s = [*self.tok_s[1 - CURVE_SAMPLES :], round(rate, 1)]
            self.requests = [
                list(
                    ServedRequest(
                        one["number"],
                        one["route"],
                        one["client"],
                        one["state"],
                        one["seconds"],
                        one["ttft_s"],
                        one["prompt_tokens"],
                        one["new_tokens"],
                    )
                )
                for one in rows
            ]
            self.clients = [list(one) for one in clients_of(figures.get("requests", ()))]
        self._tokens = (now, tokens)

    def _over(self) -> None:
        self.status = "stopped"
        self._refresh_static()

    def _summary(self) -> str:
        rate = self.tok_s[-1] if self.tok_s else 0
        queued = f" ({self.queued} queued)" if self.queued else ""
        pages = f"{self.pages - self.pages_free} of {self.pages} pages in use"
        stopped = ", stopped" if self.status == "stopped" else ""
        return f"{self.url}: {self.model or 'no model'}, {self.active} requests{queued}, {rate:.0f} tok/s, {pages}{stopped}"

    def _static_body(self) -> str:
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in ServedRequest._fields)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape('' if value is None else str(value))}</td>" for value in row) + "</tr>"
            for row in self.requests[:10]
        )
        return f"<div>{html.escape(self._summary())}</div><table><tr>{head}</tr>{body}</table>"


def clients_of(requests: Any) -> list[ServedClient]:
    """Requests by client: how many run and ended, and the medians of their latencies."""
    by_client: dict[str, list[Mapping[str, Any]]] = {}
    for one in requests:
        by_client.setdefault(one["client"], []).append(one)
    made = []
    for client, own in sorted(by_client.items()):
        ttfts = [one["ttft_s"] for one in own if one["ttft_s"] is not None]
        per_token = [
            (one["seconds"] - one["ttft_s"]) / (one["new_tokens"] - 1) for one in own if one["ttft_s"] is not None and one["new_tokens"] > 1
        ]
        running = sum(one["state"] == "running" for one in own)
        made.append(
            ServedClient(
                client,
                running,
                len(own) - running,
                round(1000 * statistics.median(ttfts), 1) if ttfts else None,
                round(1000 * statistics.median(per_token), 2) if per_token else None,
            )
        )
    return made


def _watch(widget: weakref.ref[ServerMonitor], server: Serving, ended: threading.Event, every_s: float) -> None:
    """Look at the server until it stops or the widget is closed or dropped."""
    while not ended.wait(every_s):
        monitor = widget()
        if monitor is None:
            return
        try:
            monitor._show(server.figures())
        except Exception as problem:
            logger.exception("the monitor could not read its server")
            monitor._show_error(problem)
            return
        if not server.running:
            monitor._over()
            return
        del monitor
