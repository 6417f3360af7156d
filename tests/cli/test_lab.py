"""`exl2nb lab`: notebooks copied without losing anybody's edits, and JupyterLab started on them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import exl2nb
from exl2nb.cli import main
from exl2nb.cli.lab import copy_course, course_folder, lab_command
from exl2nb.core.errors import ModelNotFound, OptionError


@pytest.fixture
def course(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    for name in ("01_quickstart.ipynb", "02_more.ipynb"):
        (folder / name).write_text(f"{{}} {name}")
    (folder / "notes.txt").write_text("not part of it")
    return folder


def test_edits_are_never_lost(course, tmp_path):
    mine = tmp_path / "deep" / "mine"
    assert copy_course(mine, course).new == ("01_quickstart.ipynb", "02_more.ipynb")
    assert not (mine / "notes.txt").exists()
    assert copy_course(mine, course).same == ("01_quickstart.ipynb", "02_more.ipynb")
    (mine / "01_quickstart.ipynb").write_text("my own words")
    for name in ("01_quickstart.ipynb", "02_more.ipynb"):
        (course / name).write_text(f"{{}} {name}, second edition")
    copied = copy_course(mine, course)
    assert (copied.kept, copied.updated) == (("01_quickstart.ipynb",), ("02_more.ipynb",))
    assert (mine / "01_quickstart.ipynb").read_text() == "my own words"
    assert "second edition" in (mine / "02_more.ipynb").read_text()
    (mine / "01_quickstart.ipynb").unlink()
    assert copy_course(mine, course).new == ("01_quickstart.ipynb",), "one that was deleted comes back"


def test_without_its_record_everything_counts_as_edited(course, tmp_path):
    mine = tmp_path / "mine"
    copy_course(mine, course)
    (mine / ".exl2nb-course.json").write_text("[broken")
    (mine / "02_more.ipynb").write_text("edited")
    assert copy_course(mine, course).kept == ("02_more.ipynb",)


def test_destinations_that_are_refused(course, tmp_path, monkeypatch):
    with pytest.raises(OptionError, match="is a file"):
        copy_course(course / "01_quickstart.ipynb", course)
    assert copy_course(course, course).same == ("01_quickstart.ipynb", "02_more.ipynb")
    monkeypatch.setattr(exl2nb, "__path__", [str(tmp_path)])
    with pytest.raises(ModelNotFound, match="notebooks are in none of"):
        course_folder()


def test_the_course_of_this_installation(tmp_path, capsys):
    assert main(["lab", str(tmp_path / "mine"), "--copy-only", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "01_quickstart.ipynb" in found["new"]
    assert sorted(path.name for path in (tmp_path / "mine").glob("*.ipynb")) == found["new"]
    assert main(["lab", str(tmp_path / "mine"), "--copy-only"]) == 0
    assert "the course is in" in capsys.readouterr().out


def test_the_command_that_is_started(course, tmp_path, monkeypatch, capsys):
    command = lab_command(course, port=9999, browser=False)
    assert command[:4] == [sys.executable, "-m", "jupyter", "lab"]
    assert {f"--ServerApp.root_dir={course}", "--LabApp.default_url=/lab/tree/01_quickstart.ipynb", "--port=9999", "--no-browser"} <= set(
        command
    )
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "--allow-root" in lab_command(course), "in a container"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "--allow-root" not in lab_command(course)
    started = []

    class Process:
        returncode, waits = 0, 0

        def __init__(self, command, cwd):
            started.append((command, Path(cwd)))

        def poll(self):
            return 0 if self.waits > 1 else None

        def wait(self):
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt  # reaches JupyterLab too, which asks

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert main(["lab", str(tmp_path / "mine"), "--no-browser", "--open", "02.ipynb"]) == 0
    ((command, folder),) = started
    assert folder == tmp_path / "mine"
    assert not any("default_url" in word for word in command), "a notebook that is not there is not opened"
    assert "Ctrl-C ends it" in capsys.readouterr().out


def test_without_jupyterlab(tmp_path, monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["lab", str(tmp_path / "mine")]) == 2
    assert "pip install jupyterlab" in capsys.readouterr().err
