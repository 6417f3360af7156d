"""Push and pull through the real hub client against a small hub of our own on this machine."""

import base64
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from exl2nb.converter.calibration import read_calibration
from exl2nb.converter.conversion_job import ConversionJob
from exl2nb.converter.publish import card, push
from exl2nb.core.errors import ConversionError, FormatError, ModelNotFound, OptionError
from exl2nb.io import hub

from .test_conversion_job import OPTIONS, write_model

CLIENT = """
import json, sys
from exl2nb.converter.publish import pull, push
from exl2nb.core.errors import Exl2Error
events = []
try:
    made = push(sys.argv[2:], sys.argv[1], source="someone/source", progress=events.append)
    folder = pull(sys.argv[1], made[0].revision)
    print(json.dumps([[m.revision for m in made], str(folder), [e.detail for e in events]]))
except Exl2Error as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


READER = """
import json, sys
from exl2nb.converter.calibration import read_calibration
from exl2nb.core.errors import Exl2Error
found = []
for name in sys.argv[1:]:
    try:
        found.append(read_calibration(name))
    except Exl2Error as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Repositories, branches, commits with small files inline, large files by LFS."""

    branches: dict[str, dict[str, bytes]] = {"main": {}}  # noqa: RUF012
    lfs: dict[str, bytes] = {}  # noqa: RUF012

    def log_message(self, *_):
        return

    def answer(self, code, value=None, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value if value is not None else {}).encode()
        self.send_response(code)
        for name, content in headers.items():
            self.send_header(name.replace("_", "-"), content)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        where = f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != "Bearer hf_good":
            self.answer(401, {"error": "who are you"})
        elif self.path == "/api/repos/create":
            self.answer(200, {"url": f"{where}/me/model"})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif "/branch/" in self.path:
            self.branches.setdefault(self.path.rpartition("/")[2], dict(self.branches["main"]))
            self.answer(200)
        elif "/preupload/" in self.path:
            files = json.loads(data)["files"]
            mode = {True: "lfs", False: "regular"}
            self.answer(
                200,
                {
                    "files": [
                        {"path": f["path"], "uploadMode": mode[f["path"].endswith(".safetensors")], "shouldIgnore": False} for f in files
                    ]
                },
            )
        elif self.path.endswith("/info/lfs/objects/batch"):
            made = []
            for entry in json.loads(data)["objects"]:
                action = {} if entry["oid"] in self.lfs else {"actions": {"upload": {"href": f"{where}/lfs/{entry['oid']}"}}}
                made.append({**entry, "authenticated": True, **action})
            self.answer(200, {"transfer": "basic", "objects": made})
        elif "/commit/" in self.path:
            tree = self.branches[self.path.rpartition("/")[2].partition("?")[0]]
            for line in map(json.loads, data.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    tree[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    tree[value["path"]] = self.lfs[value["oid"]]
            self.answer(200, {"commitUrl": f"{where}/me/model/commit/{'a' * 40}", "commitOid": "a" * 40, "success": True})
        else:
            self.answer(404, {"error": self.path})

    def do_PUT(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(data).hexdigest() == self.path.rpartition("/")[2]
        self.lfs[self.path.rpartition("/")[2]] = data
        self.answer(200)

    def do_GET(self):
        parts = self.path.partition("?")[0].split("/")
        if parts[1] == "api":
            name = parts[6] if len(parts) > 6 else "main"
            name = {f"{'b' * 39}{i}": branch for i, branch in enumerate(self.branches)}.get(name, name)
            if name not in self.branches:
                self.answer(404, {"error": "none"}, X_Error_Code="RevisionNotFound")
                return
            sha = f"{'b' * 39}{list(self.branches).index(name)}"
            tree = [{"type": "file", "path": n, "rfilename": n, "size": len(c), "oid": "0" * 40} for n, c in self.branches[name].items()]
            self.answer(200, tree if "tree" in parts else {"id": "me/model", "sha": sha, "siblings": tree})
            return
        sha, file = parts[-2:]
        sha = sha if sha not in self.branches else f"{'b' * 39}{list(self.branches).index(sha)}"
        content = self.branches[list(self.branches)[int(sha[-1])]][file]
        self.answer(200, content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit=sha, Accept_Ranges="none")

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    source = write_model(folder / "tiny", num_hidden_layers=1)
    first = ConversionJob(source, folder / "four", bpw=4.5, **OPTIONS).run()
    return first, ConversionJob(source, folder / "six", bpw=6.0, measurement=first.measurement, **{**OPTIONS, "report_rows": 0}).run()


def client(tmp_path, server, token, *arguments, script=CLIENT):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def server():
    Hub.branches, Hub.lfs = {"main": {}}, {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def test_push_and_pull(made, server, tmp_path):
    answer = client(tmp_path, server, "hf_good", "me/model", made[0].path, made[1].path)
    assert isinstance(answer, list), answer
    revisions, folder, details = answer
    assert revisions == ["4.5bpw", "6.0bpw"]
    assert details[-2:] == ["6.0bpw", "6.0bpw"]
    assert list(Hub.branches["main"]) == ["README.md"]
    for name, conversion in zip(revisions, made):
        own = {path.name: path.read_bytes() for path in conversion.path.iterdir()}
        assert {n: c for n, c in Hub.branches[name].items() if n != "README.md"} == own
        assert Hub.branches[name]["README.md"] == Hub.branches["main"]["README.md"]
    assert len(Hub.lfs) == 2
    assert (tmp_path / "hf") in Path(folder).parents
    assert Path(folder, "output.safetensors").read_bytes() == (made[0].path / "output.safetensors").read_bytes()


COMMANDS = """
import contextlib, io, json, sys
from exl2nb.cli import main
repo, *folders = sys.argv[1:]
answers = []
push = ["push", *folders, repo, "--revision", "low", "--revision", "high"]
for words in (push, ["pull", repo, "--revision", "high"], ["pull", repo, "--revision", "no"]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*words, "--json", "--quiet"])
    answers.append([code, json.loads(out.getvalue()) if code == 0 else err.getvalue()])
print(json.dumps(answers))
"""


def test_push_and_pull_from_the_command_line(made, server, tmp_path):
    pushed, pulled, missing = client(tmp_path, server, "hf_good", "me/model", made[0].path, made[1].path, script=COMMANDS)
    assert (pushed[0], pulled[0], missing[0]) == (0, 0, 2)
    assert [one["revision"] for one in pushed[1]["published"]] == ["low", "high"]
    assert pulled[1]["name"] == "me/model@high"
    assert Path(pulled[1]["path"], "output.safetensors").read_bytes() == (made[1].path / "output.safetensors").read_bytes()
    assert "the hub has the model but not this revision" in missing[1]


def test_refused(made, server, tmp_path):
    answer = client(tmp_path, server, "hf_bad", "me/model", made[0].path)
    assert answer.startswith("ConversionError: push to me/model: ")
    assert "hf auth login" in answer


def test_calibration_from_a_data_set(server, tmp_path):
    lines = b"\n".join(json.dumps({"text": text}).encode() for text in ("one two", "three"))
    Hub.branches = {"main": {"README.md": b"# Texts", "a.txt": b"other", "train-0.jsonl": lines}, "v2": {"b.txt": b"new"}}
    names = ["dataset:me/texts", "dataset:me/texts:a*", "dataset:me/texts@v2", "dataset:me/texts:*.parquet", "dataset:me/texts@v3"]
    found = client(tmp_path, server, "hf_good", *names, script=READER)
    assert [one[0] for one in found[:3]] == ["one two\nthree", "other", "new"]
    assert [one[1] for one in found[:3]] == names[:3]
    assert found[3].startswith("OptionError: calibration dataset:me/texts:*.parquet: none of its 3 files")
    assert found[4].startswith("OptionError: calibration dataset:me/texts@v3: cannot be fetched")


def test_no_network_is_named(made, monkeypatch):
    import huggingface_hub

    broken = hub.network_errors() or (ConnectionError,)

    def refuse(*args, **kwargs):
        raise broken[0]("name or service not known")

    for name in ("list_repo_files", "create_repo"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, refuse)
    with pytest.raises(OptionError, match=r"dataset:me/texts: cannot be fetched \(name or service not known\)"):
        read_calibration("dataset:me/texts")
    with pytest.raises(ConversionError, match="push to me/model: name or service not known"):
        push(made[0], "me/model")


def test_card(made):
    text = card("me/model", [m.to_dict() for m in made], ["4.5bpw", "6.0bpw"], source="someone/source")
    assert text.startswith("---\nbase_model: someone/source\n")
    assert f"| `4.5bpw` | {made[0].bpw:.4f} |" in text
    assert f"{made[0].quality.kl:.5f} (" in text
    assert "| not measured |" in text
    assert 'ex.load("me/model", revision="4.5bpw")' in text
    assert "`exl2nb convert someone/source OUT --bpw 4.5 --head-bits 6 --rows 6 --length 32`" in text
    asked = {"bytes": "2GB", "head_bits": "auto", "overrides": {"layer 0": (6, 8.5), "v": 5, "k": [(4, 32), (3, 32)]}, "frozen": True}
    text = card("me/model", [{**made[0].to_dict(), "asked": asked}], ["a"])
    wanted = 'convert SOURCE OUT --override "layer 0=6-8.5" --override "v=5" --frozen CHOICES --bytes 2GB --head-bits auto --rows 6'
    assert wanted in text


def test_wrong_arguments(made, tmp_path):
    with pytest.raises(OptionError, match="at least one"):
        push([], "me/model")
    with pytest.raises(OptionError, match="a name of its own"):
        push(list(made), "me/model", revisions=["a", "a"])
    with pytest.raises(ModelNotFound):
        push(list(made), "not an id")
    with pytest.raises(FormatError, match="conversion.json"):
        push(tmp_path, "me/model")
    (tmp_path / "conversion.json").write_text('{"bpw": 3}')
    with pytest.raises(FormatError, match="expected a conversion's report"):
        push(tmp_path, "me/model")
