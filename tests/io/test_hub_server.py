"""The real hub client against a small server of our own on this machine: what is fetched, reported and refused."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

COMMIT = "a" * 40
SEEN: list[str] = []  # files sent
FILES = {"config.json": b"{}", "output.safetensors": os.urandom(3_000_000), "modeling_x.py": b"x", "sub/x.json": b"{}", "model.bin": b"x"}

CLIENT = """
import json, os, sys
from exl2nb.core.errors import ModelNotFound
from exl2nb.io.hub import resolve
events = []
try:
    path = resolve(sys.argv[1], revision=sys.argv[2] or None, progress=events.append)
    answer = sorted(os.listdir(path))
except ModelNotFound as error:
    answer = str(error)
print(json.dumps([answer, [(e.done, e.total, e.state) for e in events]]))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        return

    def answer(self, code, body, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        model = "/api/models/owner/name"
        if path.startswith(f"{model}/tree/"):
            tree = [{"type": "file", "path": p, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for p, d in FILES.items()]
            self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif path in (f"{model}/revision/4.0bpw", f"{model}/revision/{COMMIT}"):
            info = {"id": "owner/name", "modelId": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": p} for p in FILES]}
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        elif path.startswith(f"{model}/revision/"):
            self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
        elif path.startswith("/api/models/"):
            self.answer(401, b"{}", X_Error_Code="RepoNotFound")
        elif "/resolve/" in path and (name := path.split("/resolve/")[1].split("/", 1)[1]) in FILES:
            if self.command == "GET":
                SEEN.append(name)
            self.answer(200, FILES[name], ETag=f'"{hashlib.sha1(FILES[name]).hexdigest()}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(404, b"{}")

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture(scope="module")
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask(endpoint, home, model, revision="", **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HTTP", "http", "ALL_PROXY", "all_proxy"))}
    env = {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **env}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", CLIENT, model, revision], env=env, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "B/s" not in done.stderr  # no progress bar behind the caller's back
    return json.loads(done.stdout.splitlines()[-1])


def test_the_real_client(server, tmp_path):
    answer, events = ask(server, tmp_path, "owner/name", "4.0bpw")
    assert answer == ["config.json", "output.safetensors"]
    assert sorted(SEEN) == ["config.json", "output.safetensors"]
    total = len(FILES["config.json"]) + len(FILES["output.safetensors"])
    assert events[0] == [0, 0, "running"] and events[-1] == [total, total, "done"] and len(events) > 2

    # a second time nothing is fetched, and a complete copy serves without a network
    assert ask(server, tmp_path, "owner/name", "4.0bpw")[0] == answer and len(SEEN) == 2
    assert ask("http://127.0.0.1:9", tmp_path, "owner/name", "4.0bpw", HF_HUB_OFFLINE="1")[0] == answer
    assert "the local cache has no complete copy" in ask(server, tmp_path, "owner/other", HF_HUB_OFFLINE="1")[0]

    answer, events = ask(server, tmp_path, "owner/name", "nope")
    assert "not this revision" in answer and events[-1][2] == "error"
    assert "no such public model" in ask(server, tmp_path, "owner/none")[0]
