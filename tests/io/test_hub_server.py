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

import exl2nb as ex
from exl2nb.io.metadata import FIRST_BYTES
from exl2nb.io.safetensors import SafetensorsFile

COMMIT = "a" * 40
SEEN: list[str] = []  # files sent
RANGES: list[str] = []  # byte ranges asked for
SENT: list[tuple[str, int, int]] = []  # file, first byte and number of bytes of the ranges sent
CUTS: list[int] = []  # how much to send of the next large files before the connection breaks
REFS = {
    "branches": [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": COMMIT if n == "4.0bpw" else c * 40}
                 for n, c in (("main", "b"), ("6_5", "c"), ("4.0bpw", "a"), ("2.55bpw-h6", "d"))],
    "tags": [{"name": "<v1>", "ref": "refs/tags/v1", "targetCommit": "e" * 40}],
    "converts": [],
}  # fmt: skip
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
SMALL_PIECES = "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 65536\n"
LIST = """
import json, sys
import exl2nb as ex
answers = []
for model in sys.argv[1].split():
    try:
        found = ex.revisions(model)
        answers.append([found.to_dict(), repr(found), found._repr_html_()])
    except ex.errors.ModelNotFound as error:
        answers.append(str(error))
print(json.dumps(answers))
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

    def send_file(self, body):
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked and self.command == "GET":
            RANGES.append(asked)
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, total = int(first), len(body)
            body = body[start : int(last) + 1 if last else total]
            SENT.append((self.path.rpartition("/")[2], start, len(body)))
            return self.answer(206, body, Content_Range=f"bytes {start}-{start + len(body) - 1}/{total}", **headers)
        if CUTS and len(body) > 1_000_000 and self.command == "GET":
            self.send_response(200)
            for name, value in {**headers, "Content_Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body[: CUTS.pop()])
            self.wfile.flush()
            self.close_connection = True
            return None
        return self.answer(200, body, **headers)

    def do_GET(self):
        path = self.path.split("?")[0]
        model = "/api/models/owner/name"
        if path.startswith(f"{model}/tree/"):
            tree = [{"type": "file", "path": p, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for p, d in FILES.items()]
            self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif path == f"{model}/refs":
            self.answer(200, json.dumps(REFS).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/owner/gated"):
            self.answer(403, b"{}", X_Error_Code="GatedRepo")
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
            self.send_file(FILES[name])
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


def ask(endpoint, home, model, revision="", *, client=CLIENT, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HTTP", "http", "ALL_PROXY", "all_proxy"))}
    env = {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **env}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", client, model, revision], env=env, cwd=root, capture_output=True, text=True, timeout=120)
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
    assert "not this revision; it has main, 6_5, 4.0bpw, 2.55bpw-h6, <v1>" in answer and events[-1][2] == "error"
    assert "no such public model" in ask(server, tmp_path, "owner/none")[0]
    assert "access is restricted; accept its terms" in ask(server, tmp_path, "owner/gated")[0]


def test_revisions(server, tmp_path):
    (answer, text, page), nobody, gated = ask(server, tmp_path, "owner/name owner/none owner/gated", client=LIST)
    found = [(r["name"], r["kind"], r["bpw"], r["cached"]) for r in answer["revisions"]]
    assert found == [
        ("2.55bpw-h6", "branch", 2.55, False),
        ("4.0bpw", "branch", 4.0, False),
        ("6_5", "branch", 6.5, False),
        ("<v1>", "tag", None, False),
        ("main", "branch", None, False),
    ]
    assert text.startswith("owner/name: 5 revisions\nrevision") and "2.55bpw-h6  2.55             branch  dddddddddd" in text
    assert "&lt;v1&gt;" in page and "<v1>" not in page
    assert "no such public model" in nobody
    assert "access is restricted" in gated

    # what was downloaded is marked, and is the answer where there is no network
    ask(server, tmp_path, "owner/name", "4.0bpw")
    ((answer, text, _),) = ask(server, tmp_path, "owner/name", client=LIST)
    assert [r["name"] for r in answer["revisions"] if r["cached"]] == ["4.0bpw"] and "downloaded" in text
    ((answer, text, _),) = ask("http://127.0.0.1:9", tmp_path, "owner/name", client=LIST)
    assert answer["offline"] and [r["name"] for r in answer["revisions"]] == ["4.0bpw"]
    assert "1 revision in the local cache (the hub was not asked)" in text
    assert "cannot be reached" in ask(server, tmp_path, "owner/other", client=LIST, HF_HUB_OFFLINE="1")[0]


def test_no_network(tmp_path):
    answer, events = ask("http://127.0.0.1:9", tmp_path, "owner/name")
    assert "cannot be reached and the local cache has no complete copy; connect" in answer and events[-1][2] == "error"


def test_a_broken_connection_is_resumed(server, tmp_path):
    CUTS.append(2_000_000)
    RANGES.clear()
    answer, events = ask(server, tmp_path, "owner/name", "4.0bpw", client=SMALL_PIECES + CLIENT)
    assert answer == ["config.json", "output.safetensors"] and events[-1][2] == "done"
    assert RANGES and 0 < int(RANGES[0].removeprefix("bytes=").rstrip("-")) <= 2_000_000
    stored = next(tmp_path.rglob("output.safetensors"))
    assert stored.read_bytes() == FILES["output.safetensors"]


KILLED = """
import os, sys, threading, time
from exl2nb.io.hub import resolve
def stop(event):
    if event.done > 500_000:
        os._exit(9)
resolve(sys.argv[1], revision=sys.argv[2], progress=stop)
"""


def test_a_killed_download_is_resumed(server, tmp_path):
    """The process ends in the middle of a file; nothing looks complete afterwards, and the next call fetches what is missing."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HTTP", "http", "ALL_PROXY", "all_proxy"))}
    env = {**clean, "HF_ENDPOINT": server, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    CUTS.append(2_000_000)
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", SMALL_PIECES + KILLED, "owner/name", "4.0bpw"],
        env=env,
        cwd=root,
        capture_output=True,
        timeout=120,
        check=False,
    )
    CUTS.clear()
    SEEN.clear()
    assert not list(tmp_path.rglob("snapshots/*/output.safetensors"))
    answer, _ = ask(server, tmp_path, "owner/name", "4.0bpw", HF_HUB_OFFLINE="1")
    assert "no complete copy" in answer or "not complete" in answer, answer
    assert ask(server, tmp_path, "owner/name", "4.0bpw")[0] == ["config.json", "output.safetensors"]
    assert SEEN.count("output.safetensors") == 1 and SEEN.count("config.json") <= 1
    assert next(tmp_path.rglob("output.safetensors")).read_bytes() == FILES["output.safetensors"]


LOOK = """
import json, os, sys
import exl2nb as ex
def look(model, revision):
    try:
        return ex.inspect(model, revision=revision).to_dict()
    except ex.errors.ModelNotFound as error:
        return str(error)
answers = [look(*one.split("@")) for one in sys.argv[1].split()]
if sys.argv[2] == "and plan":
    answers.append(ex.plan("owner/name", revision="4.0bpw", free=10**9).to_dict())
print(json.dumps([answers, [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("exl2nb")]]))
"""


def test_inspect_reads_no_weights(server, tmp_path, monkeypatch):
    """What a hub id shows is what the downloaded folder shows; of the weights' data only group tables were sent."""
    folder = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
    model = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in list(FILES):
        monkeypatch.delitem(FILES, name)
    hostile = {"../../x.json": b"{}", "additional_chat_templates/../../y.jinja": b"y", "modeling_x.py": b"x"}
    for name, data in {**model, **hostile}.items():
        monkeypatch.setitem(FILES, name, data)
    (tmp_path / "temporary").mkdir()
    SENT.clear(), SEEN.clear()
    places = {"TMPDIR": str(tmp_path / "temporary")}
    asked = "owner/name@4.0bpw owner/name@nope owner/none@main"
    (answer, unknown, nobody, planned), left = ask(server, tmp_path / "home", asked, "and plan", client=LOOK, **places)
    local = ex.inspect(folder).to_dict()
    assert {**answer, "path": ""} == {**local, "path": ""}
    assert answer["path"] == "owner/name" and left == [] and not (tmp_path / "home").exists()
    weights = "output.safetensors"
    assert set(SEEN) == {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json", weights}
    with SafetensorsFile(folder / weights) as file:
        infos = [file.info(name) for name in file.names()]
    header = min(info.start for info in infos)
    touched = bytearray(len(model[weights]))
    for name, start, count in SENT:
        assert name == weights
        touched[start : start + count] = b"\1" * count
    beyond = [info.name for info in infos if any(touched[max(info.start, FIRST_BYTES) : info.end])]
    tables = sum(info.nbytes for info in infos if info.name.endswith("q_groups"))
    assert beyond and all("q_groups" in name for name in beyond), "the header's first piece, and tables that lie side by side"
    assert sum(touched) <= max(FIRST_BYTES, header) + tables + 64 < len(model[weights]) / 4
    assert planned == {**ex.plan(folder, free=10**9).to_dict(), "name": "owner/name@4.0bpw"}
    assert "not this revision; it has main" in unknown and "no such public model" in nobody

    # without a network: what was downloaded before, else the reason
    for name in hostile:
        monkeypatch.delitem(FILES, name)
    (answer,), _ = ask("http://127.0.0.1:9", tmp_path / "home", "owner/name@4.0bpw", client=LOOK, **places)
    assert "cannot be reached" in answer or "download failed" in answer
    ask(server, tmp_path / "home", "owner/name", "4.0bpw")
    (offline,), _ = ask("http://127.0.0.1:9", tmp_path / "home", "owner/name@4.0bpw", client=LOOK, HF_HUB_OFFLINE="1", **places)
    assert {**offline, "path": ""} == {**local, "path": ""}
