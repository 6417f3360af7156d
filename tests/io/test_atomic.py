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
