"""The server's life: beside a notebook, from the command line, at its end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from exl2nb.core.errors import MissingDependency
from exl2nb.server.server_options import ServerOptions
from exl2nb.server.state import State, Ticket

LONG = {"prompt": "It was", "max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_tokens_of_a_stream_join_within_the_interval(route, llm, events):
    asked = {"prompt": "It was"} if route == "completions" else {"messages": [{"role": "user", "content": "It was"}]}
    body = {**asked, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    made = {}
    for interval in (0, 10_000):
        with llm.serve(stream_interval_ms=interval, template="chatml") as server:
            *data, last = events(httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60))
            assert last == "[DONE]"
            choices = [one["choices"][0] for one in data]
            texts = [one["text"] if route == "completions" else one["delta"].get("content", "") for one in choices]
            assert choices[-1]["finish_reason"] == "length"
            made[interval] = [text for text in texts if text]
    assert len(made[10_000]) == 2 < len(made[0])
    assert "".join(made[0]) == "".join(made[10_000])


def test_among_many_requests_tokens_join_for_longer(llm):
    state = State(ServerOptions.of(stream_interval_ms=20), llm, owned=False)
    found = []
    for number in range(70):
        found.append(state.stream_interval_s())
        state.active[number] = Ticket(number, "completions", "", 0.0, [])
    assert found == [0.02] * 65 + [0.04] * 5


def test_beside_a_cell_and_after_the_end(llm):
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with llm.serve() as server:
        own = llm.stream("She said", max_tokens=50)
        got = httpx.post(server.url + "/v1/completions", json={"prompt": "It was", "max_tokens": 5, "temperature": 0}).json()
        assert got["choices"][0]["text"] == llm.generate("It was", max_tokens=5, temperature=0).text
        assert len(own.result().tokens) == 50
        assert repr(server) == f"Server({server.url}, demo_model, 0 requests, 1 ended)"
        page = server._repr_html_()
        assert "completions" in page
        assert server.url in page
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert "stopped" in repr(server)
    assert not server.running
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")
    assert llm.generate("It was", max_tokens=2).tokens


def test_running_requests_may_finish(llm):
    server, texts = llm.serve(drain_s=60), []

    def ask():
        with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=60) as stream:
            texts.extend(stream.iter_lines())

    thread = threading.Thread(target=ask)
    thread.start()
    while not texts:
        time.sleep(0.005)
    server.stop()
    thread.join()
    assert texts[-2:] == ["data: [DONE]", ""]


def test_requests_that_do_not_finish_in_time_are_cancelled(llm):
    server = llm.serve(drain_s=0)
    with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "max_tokens": 1000, "stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.stop()
        assert "data: [DONE]" not in list(lines)
    assert not server.running


def test_figures_of_a_running_request(llm):
    with llm.serve(drain_s=0) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()  # dropping it would close the connection
            next(lines)
            figures = server.figures()
            assert (figures["active"], figures["requests"][0]["state"]) == (1, "running")
            assert figures["pages_free"] < figures["pages"]
        assert json.dumps(figures)


@pytest.mark.cpu
def test_the_command(tmp_path):
    """Serves, finishes a stream after SIGTERM, and ends."""
    keys, config = tmp_path / "keys", tmp_path / "c.toml"
    keys.write_text("secret\n")
    config.write_text('port = 0\ncontext = 512\ntemplate = "chatml"\n')
    command = [
        sys.executable,
        "-m",
        "exl2nb.cli",
        "serve",
        "demo",
        "--config",
        str(config),
        "--api-key-file",
        str(keys),
        "--json",
        "--quiet",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "EXL2NB_DEVICE": "cpu"}
    )
    try:
        url = json.loads(process.stdout.readline())["url"]
        with httpx.Client(base_url=url, headers={"authorization": "Bearer secret"}, timeout=60) as client:
            assert httpx.get(url + "/v1/models").status_code == 401
            assert client.get("/v1/model").json()["parameters"]["max_seq_len"] == 512
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert list(lines)[-2:] == ["data: [DONE]", ""]
        process.wait(30)
        assert process.returncode == -signal.SIGTERM
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "0"], "no model was given"),
        (["demo", "--host", "0.0.0.0"], "no key"),
        (["demo", "--config", "none.toml"], "cannot be read as TOML"),
    ],
)
def test_the_command_refuses(arguments, words, capsys, monkeypatch, tmp_path):
    from exl2nb.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_the_extra(llm, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("exl2nb.server.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingDependency, match=r"pip install 'exl2nb\[server\]'"):
        llm.serve()
