"""Replicas of a server on Ray Serve: the answers of one server, beginnings that stay where they were, and a replica that dies."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.core.errors import MissingDependency, OptionError

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from exl2nb.server.replicas import PREFIX_CHARACTERS, Replicas, Scale, beginning, serve_replicas  # noqa: E402
from exl2nb.server.server_options import ServerOptions  # noqa: E402

DEMO = Path(ex.__file__).parent / "demo_model"
LONG = "Once upon a time there was a king who had three sons. " * 24


def test_scale() -> None:
    assert Scale.read("3") == Scale(3, 3) and Scale.read("1:4") == Scale(1, 4)
    for wrong in ("0", "4:1", "many", "", "1:2:3", "-1"):
        with pytest.raises(OptionError, match="replicas is"):
            Scale.read(wrong)


def test_beginnings_are_those_of_prompts() -> None:
    def asked(**of: object) -> bytes:
        return json.dumps(of).encode()

    assert beginning(asked(prompt=LONG)) == beginning(asked(prompt=LONG + "and more", max_tokens=3)) != ""
    assert beginning(asked(prompt="x" + LONG)) != beginning(asked(prompt=LONG))
    system = {"role": "system", "content": LONG}
    chats = [[system, {"role": "user", "content": text}] for text in ("a", "b")]
    assert beginning(asked(messages=chats[0])) == beginning(asked(messages=chats[1])) != ""
    parts = [{"role": "user", "content": [{"type": "text", "text": LONG}]}]
    assert (
        len({beginning(asked(messages=parts)), beginning(asked(messages=chats[0])), beginning(asked(prompt=[*range(PREFIX_CHARACTERS)]))})
        == 3
    )
    for short in (asked(prompt="It was"), asked(messages=[]), b"", b"[1]", b"{", asked(prompt=None)):
        assert beginning(short) == ""


def test_no_body_harms_the_router() -> None:
    deep, number = b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}", b'{"prompt":' + b"9" * 9999 + b"}"
    for hostile in (b"[" * 100_000, b'{"prompt":' * 100_000, deep, number, b"\xff\xfe"):
        assert beginning(hostile) == ""
    assert beginning(b'{"prompt":"' + b"\\ud800" * PREFIX_CHARACTERS + b'"}') != ""


def test_what_replicas_do_not_do_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'exl2nb\[ray,server\]'"):
        serve_replicas(str(DEMO), ServerOptions())


# ---- with Ray


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    pytest.importorskip("ray.serve")
    options = ServerOptions(port=0, drain_s=2, max_body_bytes=1 << 16)
    with serve_replicas(str(DEMO), options, replicas=2, gpus=0, loading={"device": "cpu"}) as found:
        yield found


def complete(url: str, prompt: str, **options: object) -> dict[str, object]:
    found = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 8, "temperature": 0, **options}, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


def processes() -> list[int]:
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ServeReplica:exl2nb:replica" in line.read_bytes():
                found.append(int(line.parent.name))
        except OSError:
            continue
    return found


def test_the_answers_of_one_server(replicas: Replicas) -> None:
    with ex.load(DEMO, device="cpu", progress=None) as llm:
        for prompt in ("The secret of life is", "It was a dark"):
            expected = llm.generate(prompt, max_tokens=8, temperature=0).text
            assert [complete(replicas.url, prompt)["choices"][0]["text"] for _ in range(3)] == [expected] * 3
            events = []
            request = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
            with httpx.stream("POST", f"{replicas.url}/v1/completions", json=request, timeout=60) as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected
    assert httpx.get(f"{replicas.url}/health").status_code == 200
    assert httpx.post(f"{replicas.url}/v1/completions", content=b"x" * (1 << 17)).status_code == 413


def test_a_beginning_stays_with_its_replica(replicas: Replicas) -> None:
    cached = [complete(replicas.url, f"{LONG} {number}")["usage"]["prompt_tokens_details"]["cached_tokens"] for number in range(6)]
    assert cached[0] == 0 and all(cached[1:]), cached


def test_streams_may_be_left(replicas: Replicas) -> None:
    request = {"prompt": "Once", "max_tokens": 900, "stream": True}
    for _ in range(3):
        with httpx.stream("POST", f"{replicas.url}/v1/completions", json=request, timeout=60) as stream:
            for _line in stream.iter_lines():
                break
    assert complete(replicas.url, "It was")["usage"]["completion_tokens"] == 8


def test_a_replica_may_die(replicas: Replicas) -> None:
    before = processes()
    assert len(before) == 2
    wrong: list[object] = []

    def ask() -> None:
        try:
            complete(replicas.url, "It was a dark", max_tokens=40)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    os.kill(before[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert not wrong
    deadline = time.monotonic() + 60
    while len(processes()) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(processes()) == 2 and set(processes()) != set(before)
    assert complete(replicas.url, "It was")["usage"]["completion_tokens"] == 8


def test_options_of_one_server_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve")
    with pytest.raises(OptionError, match="model_dir with replicas"):
        serve_replicas(str(DEMO), ServerOptions(model_dir=tmp_path))
