"""Clients and a fuzzer that bring many packages: each in an environment of its own, made from the package index."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent


CLIENTS = Path(__file__).parents[2] / "build" / "clients"


def environment(name, *packages):
    """The programs of a virtual environment with these packages, made once under build/clients."""
    folder = CLIENTS / name
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        done = subprocess.run([folder / "bin" / "pip", "install", "-qq", *packages], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{', '.join(packages)} cannot be installed: {done.stderr[-300:]}")
        (folder / "made").write_text(" ".join(packages))
    return folder / "bin"


def test_langchain_litellm_smolagents(server):
    bin = environment("python", "langchain-openai", "litellm", "smolagents")
    done = subprocess.run([bin / "python", HERE / "heavy_clients.py", server.url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("fine") == 3


def test_inspect_ai(server, llm):
    bin = environment("inspect", "inspect-ai", "openai")
    body = {"messages": [{"role": "user", "content": "It was"}], "max_tokens": 30, "temperature": 0}
    text = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]["content"]
    done = subprocess.run([bin / "python", HERE / "inspect_client.py", server.url, text[:12]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("fine\n")


def test_schemathesis_finds_no_failure_of_the_server(server, llm, tmp_path):
    """Calls made from the OpenAPI document: none is answered with 5xx, and the model works on."""
    bin = environment("fuzz", "schemathesis")
    done = subprocess.run(fuzz(bin, server.url, examples=20), capture_output=True, text=True, cwd=tmp_path)
    assert "not_a_server_error" not in done.stdout, done.stdout[-4000:]
    assert "Test cases" in done.stdout or "generated" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert httpx.get(server.url + "/health").status_code == 200
    assert llm.engine.wait_idle(60)


def fuzz(bin, url, *, examples):
    """The command: checks for 5xx alone, in all phases but stateful ones."""
    return [
        *(bin / "schemathesis", "run", url + "/openapi.json", "--url", url, "--checks", "not_a_server_error"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", str(examples), "--request-timeout", "60", "--seed", "1"),
        *("--exclude-path-regex", "download", "--workers", "2", "--no-color"),
    ]
