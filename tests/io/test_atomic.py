import os

import pytest

from exl2nb.core.errors import ConversionError
from exl2nb.io.atomic import atomic_write


def test_appears_only_at_the_end(tmp_path):
    path = tmp_path / "a"
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert not path.exists() and all(name.startswith(".") and name.endswith(".tmp") for name in os.listdir(tmp_path))
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_any_error_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_write(path) as file:  # noqa: PT012
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_mode_follows_the_umask(tmp_path):
    with atomic_write(tmp_path / "a"):
        pass
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.parametrize("name", ["", ".", "folder"])
def test_a_directory_is_no_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConversionError, match="is a directory; expected the name of a file"), atomic_write(name):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    link.symlink_to(target)
    for text in (b"one", b"two"):  # of what is not there yet, and of what is
        with atomic_write(link) as file:
            file.write(text)
        assert link.is_symlink()
        assert target.read_bytes() == text


def test_pipes_and_devices_are_left_alone(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/null"):
        with pytest.raises(ConversionError, match="a device or a pipe"), atomic_write(path):
            pass
    assert pipe.is_fifo()
