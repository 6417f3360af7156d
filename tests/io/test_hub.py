import huggingface_hub
import pytest
from huggingface_hub import errors

from exl2nb.core.errors import ModelNotFound, OptionError
from exl2nb.io import hub


def test_a_folder_is_itself(tmp_path, monkeypatch):
    assert hub.resolve(tmp_path) == tmp_path and hub.resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve("~/model") == tmp_path / "model"
    with pytest.raises(OptionError, match="revision is 'x' for the local directory"):
        hub.resolve(tmp_path, revision="x")
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match="is a file"):
        hub.resolve(tmp_path / "file")


def test_a_snapshot_is_called_by_owner_name_and_revision(tmp_path):
    commit = "0123456789abcdef" * 2 + "01234567"
    place = tmp_path / "models--owner--some-name"
    folder = place / "snapshots" / commit
    folder.mkdir(parents=True)
    (place / "refs" / "refs" / "pr").mkdir(parents=True)
    assert hub.display_name(folder) == "owner/some-name@0123456789ab"
    (place / "refs" / "refs" / "pr" / "1").write_text(commit)
    assert hub.display_name(folder) == "owner/some-name@refs/pr/1"
    (place / "refs" / "4.0bpw").write_text(commit)
    (place / "refs" / "8.0bpw").write_text("f" * 40)
    assert hub.display_name(folder) == "owner/some-name@4.0bpw"
    assert hub.display_name(folder, "v1") == "owner/some-name@v1"
    (place / "refs" / "main").write_text(commit)
    assert hub.display_name(folder) == "owner/some-name"
    assert hub.display_name(tmp_path / "my-model") == "my-model"


def test_a_folder_has_a_name_however_it_is_written(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    (folder / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    for text in (".", "./", "./.", "inside/..", str(folder), f"{folder}/", f"{folder}//", f"{folder}/.", "../model", "~", "~/", "~/."):
        assert hub.display_name(hub.resolve(text)) == hub.label(text) == "model", text
    assert hub.display_name(hub.resolve("..")) == hub.label("..") == tmp_path.name
    assert hub.label("inside") == hub.label("~/inside") == "inside"
    assert hub.display_name(hub.resolve(tmp_path / "link")) == "link"  # the user's own name for it
    assert hub.display_name(hub.resolve("../link/..")) == tmp_path.name
    assert hub.display_name(hub.resolve("/")) == hub.label("/") == "/"
    monkeypatch.chdir(tmp_path / "link")
    assert hub.display_name(hub.resolve(".")) == "model"
    assert hub.label("owner/name") == "name"


@pytest.mark.parametrize("text", ["/no/such/folder", "./x", "../x/y", "a/b/c", "a", "a/../b", "a b/c", "", "https://x/y", "a/b\n"])
def test_not_a_hub_id(text, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound, match=r"not a hub id either|no such directory"):
        hub.resolve(text)


def test_download_asks_for_needed_files_and_reports_bytes(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    events = []

    def download(repo_id, *, revision, allow_patterns, ignore_patterns, tqdm_class):
        assert (repo_id, revision) == ("owner/name", "4.0bpw")
        offered = [
            "config.json",
            "output.safetensors",
            "modeling_x.py",
            "pytorch_model.bin",
            "sub/x.safetensors",
            "consolidated.safetensors",
        ]
        offered += ["additional_chat_templates/rag.jinja", "adapter/x.safetensors", "a/x.json", "ad/x.json", "b/c/x.json"]
        wanted = huggingface_hub.utils.filter_repo_objects(
            offered,
            allow_patterns=allow_patterns,
            ignore_patterns=ignore_patterns,
        )
        assert list(wanted) == ["config.json", "output.safetensors", "additional_chat_templates/rag.jinja"]
        files = tqdm_class(total=2, unit="it", name="x", disable=True)
        bar = tqdm_class(total=0, unit="B", desc="bytes")
        bar.total += 100
        bar.update(40)
        bar.update(60)
        files.update(1)
        bar.close()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve("owner/name", revision="4.0bpw", progress=events.append) == tmp_path
    assert [(e.stage, e.done, e.total, e.state) for e in events] == [
        ("download", 0, 0, "running"),
        ("download", 40, 100, "running"),
        ("download", 100, 100, "running"),
        ("download", 100, 100, "done"),
    ]
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"no config.json at its top level"):
        hub.resolve("owner/name", revision="4.0bpw")


class Response:
    status_code, headers, request, url = 404, {}, None, ""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.RepositoryNotFoundError, "no such public model"),
        (errors.RevisionNotFoundError, "not this revision"),
        (errors.GatedRepoError, "access is restricted"),
        (errors.LocalEntryNotFoundError, "cannot be reached"),
        (OSError, "the download failed"),
    ],
)
def test_errors_are_named(monkeypatch, error, text):
    def download(*_, **__):
        problem = error.__new__(error)
        Exception.__init__(problem, "why")
        raise problem

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    events = []
    with pytest.raises(ModelNotFound, match=text):
        hub.resolve("owner/name", progress=events.append)
    assert events[-1].state == "error"


def test_offline_without_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="owner/name: the hub cannot be reached"):
        hub.resolve("owner/name")
