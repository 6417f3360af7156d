"""The hub's client against servers on this machine that accept and then say nothing, from the start or in the middle."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from .test_hub_server import FILES, SEEN, Hub, server  # noqa: F401

CLIENT = """
import json, sys, threading, time
import exl2nb as ex
from exl2nb.core.errors import Interrupted, ModelNotFound
from exl2nb.io.hub import resolve
events = []
what, after = sys.argv[1:]
def sink(event):
    events.append((event.detail, event.state))
    if after == "stop" and "waiting" in event.detail:
        raise Interrupted("stopped")
if after == "ctrl-c":
    import os, signal
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    answer = {"resolve": lambda: resolve("owner/name", revision="4.0bpw", progress=sink),
              "inspect": lambda: ex.inspect("owner/name", revision="4.0bpw"),
              "revisions": lambda: ex.revisions("owner/name")}[what]()
except (KeyboardInterrupt, Interrupted, ModelNotFound) as error:
    answer = type(error).__name__ + ": " + str(error)
print(json.dumps([str(answer), events]))
"""


def ask(endpoint, home, what, after, timeout_s):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HTTP", "http", "ALL_PROXY", "all_proxy"))}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DOWNLOAD_TIMEOUT": str(timeout_s)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, what, after], env={**clean, **own}, cwd=root, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def silent():
    """Accepts connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=50)
    held = []

    def accept():
        while True:
            try:
                held.append(listener.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    for connection in held:
        connection.close()


@pytest.mark.parametrize("what", ["resolve", "inspect", "revisions"])
def test_a_silent_server_is_given_up(silent, tmp_path, what):
    answer, events = ask(silent, tmp_path, what, "timeout", timeout_s=2)
    assert answer.startswith("ModelNotFound: owner/name")
    if what == "resolve":
        assert any("waiting for the server, nothing received for" in detail for detail, _ in events)
        assert events[-1] == ["owner/name", "error"]


@pytest.mark.parametrize("what", ["resolve", "inspect", "revisions"])
def test_a_silent_server_can_be_interrupted(silent, tmp_path, what):
    """Long before its timeout."""
    answer, events = ask(silent, tmp_path, what, "ctrl-c", timeout_s=1000)
    assert answer == "KeyboardInterrupt: "
    assert what != "resolve" or events[-1][1] == "cancelled"


def test_stop_of_a_progress_widget(silent, tmp_path):
    answer, events = ask(silent, tmp_path, "resolve", "stop", timeout_s=1000)
    assert answer == "Interrupted: stopped"
    assert events[-1][1] == "cancelled"


@pytest.fixture
def silent_amid_a_file(server, monkeypatch):  # noqa: F811
    """Sends half of each large file, then nothing."""
    release = threading.Event()

    def send_half(self, body):
        if len(body) < 1_000_000 or self.command != "GET":
            return real(self, body)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        release.wait(100)
        return None

    real = Hub.send_file
    monkeypatch.setattr(Hub, "send_file", send_half)
    assert any(len(body) > 1_000_000 for body in FILES.values())
    yield server
    release.set()
    SEEN.clear()


def test_silence_in_the_middle_of_a_file_can_be_interrupted(silent_amid_a_file, tmp_path):
    answer, events = ask(silent_amid_a_file, tmp_path, "resolve", "ctrl-c", timeout_s=4)
    assert answer == "KeyboardInterrupt: "
    assert events[-1][1] == "cancelled"
