"""ServerMonitor from plain data and from a server that is simulated."""

import gc
import threading
import time

import pytest

from exl2nb.core.errors import OptionError
from exl2nb.widgets import ServerMonitor
from exl2nb.widgets.servermonitor import clients_of


def request(number, **changes):
    row = {"number": number, "route": "chat", "client": "127.0.0.1", "state": "done", "seconds": 1.1, "ttft_s": 0.1}
    return {**row, "prompt_tokens": 5, "new_tokens": 11, **changes}


FIGURES = {
    "url": "http://127.0.0.1:1",
    "model": "m",
    "active": 1,
    "queued": 0,
    "max_queue": 8,
    "pages": 10,
    "pages_free": 7,
    "tokens": 0,
    "ttft_p50_s": 0.1,
    "ttft_p99_s": 0.2,
    "requests": [request(2, state="running", ttft_s=None, new_tokens=0), request(1)],
}


class Serving:
    """A server whose tokens grow with every look."""

    def __init__(self):
        self.running, self.looks = True, 0

    def figures(self):
        self.looks += 1
        return {**FIGURES, "tokens": 100 * self.looks}


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def watching():
    return [one for one in threading.enumerate() if one.name == "exl2nb-monitor"]


def test_one_moment():
    monitor = ServerMonitor(FIGURES)
    assert repr(monitor) == "http://127.0.0.1:1: m, 1 requests, 0 tok/s, 3 of 10 pages in use"
    assert monitor.requests[0] == [2, "chat", "127.0.0.1", "running", 1.1, None, 5, 0]
    assert monitor.clients == [["127.0.0.1", 1, 1, 100.0, 100.0]]
    assert "127.0.0.1" in monitor._repr_mimebundle_()[0]["text/html"]
    assert "exl2nb-servermonitor" in monitor.to_html()


def test_it_watches_until_the_server_stops():
    server = Serving()
    monitor = ServerMonitor(server, every_s=0.05)
    until(lambda: len(monitor.tok_s) >= 2)
    assert monitor.status == "running"
    assert all(rate > 0 for rate in monitor.tok_s)
    server.running = False
    until(lambda: monitor.status == "stopped")
    until(lambda: not watching())
    assert "stopped" in repr(monitor)


def test_closed_or_broken_it_watches_no_more():
    monitor = ServerMonitor(Serving(), every_s=0.05)
    monitor.close()
    until(lambda: not watching())
    server = Serving()
    monitor = ServerMonitor(server, every_s=0.05)
    server.figures = lambda: 1 / 0
    until(lambda: monitor.status == "error")
    assert "ZeroDivisionError" in monitor.error
    until(lambda: not watching())
    gc.collect()


def test_clients_are_told_apart():
    rows = [request(1, client="a"), request(2, client="b", ttft_s=None, new_tokens=0), request(3, client="a", ttft_s=0.3)]
    first, second = clients_of(rows)
    assert (first.client, first.ended, first.ttft_ms) == ("a", 2, 200.0)
    assert (second.ttft_ms, second.token_ms) == (None, None)


@pytest.mark.parametrize(("server", "options", "message"), [(5, {}, "server is 5"), ({}, {"every_s": 0}, "every_s is 0")])
def test_refused(server, options, message):
    with pytest.raises(OptionError, match=message):
        ServerMonitor(server, **options)
