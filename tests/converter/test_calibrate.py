"""Calibration rows: spread, seeded, from every kind of source; errors by name."""

import gzip
import lzma

import pytest
import torch

from exl2nb.converter.calibrate import calibration_rows, read_calibration
from exl2nb.core.errors import OptionError


class Words:
    """One id per word: its number. BOS is 1."""

    def encode(self, text, add_special=True):
        return [1] * add_special + [int(word) for word in text.split()]


TEXT = " ".join(f"{i:05d}" for i in range(2, 60000))


def test_rows_are_consecutive_and_spread():
    rows = calibration_rows(Words(), TEXT, rows=8, length=64)
    assert rows.shape == (8, 64)
    assert rows.dtype == torch.int32
    for i, row in enumerate(rows.tolist()):
        body = row[1:] if i % 4 == 0 else row
        assert (row[0] == 1) == (i % 4 == 0)
        assert body == list(range(body[0], body[0] + len(body)))
        assert i / 8 <= body[0] / 60000 <= (i + 1) / 8


def test_seeded():
    first, again, other = (calibration_rows(Words(), TEXT, rows=8, length=64, seed=s) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_short_text_is_used_whole():
    rows = calibration_rows(Words(), " ".join(f"{i:05d}" for i in range(130)), rows=2, length=64)
    assert rows.shape == (2, 64)
    assert rows[0, 0] == 1
    with pytest.raises(OptionError, match="rows=2"):
        calibration_rows(Words(), " ".join(map(str, range(130))), rows=3, length=64)


def test_sources(tmp_path):
    (tmp_path / "a.txt").write_text("plain text")
    with lzma.open(tmp_path / "a.xz", "wt") as file:
        file.write("squeezed text")
    with gzip.open(tmp_path / "a.gz", "wt") as file:
        file.write("zipped text")
    assert read_calibration(tmp_path / "a.txt") == ("plain text", "a.txt")
    assert read_calibration(str(tmp_path / "a.xz"))[0] == "squeezed text"
    assert read_calibration(tmp_path / "a.gz")[0] == "zipped text"
    assert read_calibration(["one", "two"]) == ("one\ntwo", "2 strings")
    text, name = read_calibration(None)
    assert len(text) > 100_000
    assert name == "(default)"


def test_bad_sources_are_named(tmp_path):
    for name, content in (("empty.txt", b"  \n"), ("binary.txt", b"\xff\xfe\x00"), ("fake.xz", b"no xz"), ("fake.gz", b"no gz")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OptionError, match=name):
            read_calibration(tmp_path / name)
    for source in (tmp_path / "absent.txt", [], [""], [3]):
        with pytest.raises(OptionError, match="calibration"):
            read_calibration(source)
