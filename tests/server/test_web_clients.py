"""Open WebUI and SillyTavern against a server, each from an environment of its own under build/clients, in headless Chromium."""

import ast
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("playwright")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CLIENTS = Path(__file__).parents[2] / "build" / "clients"
PICTURES = Path(__file__).parents[2] / "build" / "pictures"
WEBUI = CLIENTS / "webui" / "bin" / "open-webui"
SILLYTAVERN = CLIENTS / "sillytavern" / "node_modules" / "sillytavern"
START_S = 900  # both prepare themselves at their first start


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def answer_of(client, command, port, server, log, **settings):
    """Start a client, drive it, end it: the lengths that the answer had on the page."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, **settings)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if httpx.get(url, timeout=30).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        PICTURES.mkdir(parents=True, exist_ok=True)
        driver = [sys.executable, Path(__file__).parent / "web_clients.py", client, url, server, PICTURES / f"{client}.png"]
        done = subprocess.run(driver, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return ast.literal_eval(done.stdout)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_open_webui_shows_a_streamed_answer(server, llm, tmp_path):
    if not WEBUI.exists():
        pytest.skip(f"not installed: python -m venv {WEBUI.parents[1]}; {WEBUI.parent}/pip install open-webui")
    port = free_port()
    settings = {
        "DATA_DIR": str(tmp_path),
        "WEBUI_SECRET_KEY": "key",
        "WEBUI_AUTH": "False",
        "OPENAI_API_BASE_URL": server.url + "/v1",
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": "False",
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "RAG_EMBEDDING_ENGINE": "openai",  # else a model for embeddings is fetched
        **{f"ENABLE_{what}_GENERATION": "False" for what in ("TITLE", "TAGS", "FOLLOW_UP", "AUTOCOMPLETE")},
        "DO_NOT_TRACK": "true",
        "ANONYMIZED_TELEMETRY": "False",
        "SCARF_NO_ANALYTICS": "true",
    }
    command = [WEBUI, "serve", "--host", "127.0.0.1", "--port", str(port)]
    lengths = answer_of("webui", command, port, server.url, tmp_path / "log", cwd=tmp_path, env={**os.environ, **settings})
    assert len(set(lengths)) > 3
    assert max(lengths) > 100


def test_sillytavern_shows_a_streamed_answer(server, llm, tmp_path):
    if not SILLYTAVERN.exists():
        pytest.skip(f"not installed: npm install --prefix {SILLYTAVERN.parents[1]} sillytavern")
    data, port = CLIENTS / "sillytavern" / "data", free_port()
    shutil.rmtree(data / "default-user", ignore_errors=True)  # beside it are compiled scripts, which take minutes
    data.mkdir(exist_ok=True)
    shutil.copy(SILLYTAVERN / "default" / "config.yaml", data / "config.yaml")
    command = ["node", "server.js", "--port", str(port), "--dataRoot", data, "--configPath", data / "config.yaml"]
    command += ["--browserLaunchEnabled", "false"]
    lengths = answer_of("sillytavern", command, port, server.url, tmp_path / "log", cwd=SILLYTAVERN)
    assert len(set(lengths)) > 3
    assert max(lengths) > 100
