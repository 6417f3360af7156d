"""Replicas on Ray Serve by need: one while there is little to do, more while requests queue, all of them with the answers of one server."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import exl2nb as ex

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("ray.serve")

from exl2nb.server.replicas import serve_replicas  # noqa: E402
from exl2nb.server.server_options import ServerOptions  # noqa: E402

DEMO = Path(ex.__file__).parent / "demo_model"
STARTS_S = 300  # Ray looks at queues over half a minute before it starts another replica


def processes() -> int:
    """Of replicas, whoever started them."""
    count = 0
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += b"ServeReplica:exl2nb:replica" in line.read_bytes()
        except OSError:
            continue
    return count


@pytest.mark.slow
def test_requests_that_queue_start_a_replica() -> None:
    """Clients ask until a second process serves; their answers are those of one model, before, while and after it starts."""
    with ex.load(DEMO, device="cpu", progress=None) as llm:
        expected = llm.generate("It was a dark", max_tokens=60, temperature=0).text
    wrong: list[object] = []
    over = threading.Event()
    loading = {"device": "cpu", "max_sequences": 1}
    with serve_replicas(str(DEMO), ServerOptions(port=0, drain_s=2), replicas="1:2", gpus=0, loading=loading) as served:
        assert processes() == 1, "nobody asks yet"

        def answer() -> str:
            asked = {"prompt": "It was a dark", "max_tokens": 60, "temperature": 0}
            return httpx.post(f"{served.url}/v1/completions", json=asked, timeout=120).json()["choices"][0]["text"]

        def ask() -> None:
            while not over.is_set():
                try:
                    if (text := answer()) != expected:
                        wrong.append(text)
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + STARTS_S
        while processes() < 2 and time.monotonic() < deadline:
            time.sleep(0.5)
        grown = processes()
        over.set()
        for thread in threads:
            thread.join()
        assert grown == 2, "queued requests start a second replica"
        assert not wrong
        assert answer() == expected
