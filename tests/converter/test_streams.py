"""Streams in files: the same numbers as in memory, the same bytes in the end, an error where the disk is full, nothing left behind."""

import shutil

import pytest
import torch

from exl2nb.converter import sensitivity, streams
from exl2nb.converter.job import ConversionJob
from exl2nb.converter.quantization import Rounding
from exl2nb.converter.streams import DiskStream, new_stream, on_disk
from exl2nb.core.errors import ConversionError

from .test_job import OPTIONS, output

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    return output(ConversionJob(source, tmp_path_factory.mktemp("out") / "whole", bpw=4.0, **OPTIONS).run().path)


def test_rows_come_back(tmp_path):
    x = torch.randn(5, 3, 8)
    made = on_disk(x, tmp_path)
    assert list(tmp_path.iterdir()) == []  # it has no name
    assert (len(made), made.shape, made.nbytes, made.is_cuda) == (5, x.shape, x.nbytes, False)
    assert torch.equal(made[:], x)
    assert torch.equal(made[1:3], x[1:3])
    assert made[5:].shape == (0, 3, 8)
    made[3:] = 2 * x[3:]
    made[0:1] = x.transpose(1, 2).contiguous().transpose(1, 2)[2:3]
    assert torch.equal(made[:], torch.cat([x[2:3], x[1:3], 2 * x[3:]]))
    assert on_disk(made, tmp_path) is made
    made._file.truncate(100)
    with pytest.raises(ConversionError, match=r"found 4 bytes of rows 1 to 2, expected 96"):
        made[1:2]


def test_only_what_is_too_large_goes_to_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "STREAM_BYTES", 1000)
    assert isinstance(new_stream((5, 5, 5), CPU, beside=2, directory=tmp_path), torch.Tensor)
    assert isinstance(new_stream((5, 5, 5), CPU, beside=3, directory=tmp_path), DiskStream)
    assert isinstance(new_stream((5, 5, 5), CPU, beside=3, directory=None), torch.Tensor)


@pytest.mark.parametrize("room", [0, 2 * 6 * 32 * 64 * 4])  # none, and two streams' worth: working ones in files, then kept ones as well
@pytest.mark.parametrize("disk", [0, 1 << 30])  # 0: what is between two kept ones is computed twice
def test_the_same_bytes_wherever_streams_are(source, whole, tmp_path, monkeypatch, room, disk):
    for module in (streams, sensitivity):
        monkeypatch.setattr(module, "STREAM_BYTES", room)
    monkeypatch.setattr(sensitivity, "DISK_BYTES", disk)
    made, begin = [], DiskStream.__init__
    monkeypatch.setattr(DiskStream, "__init__", lambda self, *a: made.append(self) or begin(self, *a))
    done = ConversionJob(source, tmp_path / "out", bpw=4.0, **OPTIONS).run()
    assert output(done.path) == whole
    assert made
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_says_so(source, tmp_path, monkeypatch):
    for module in (streams, sensitivity):
        monkeypatch.setattr(module, "STREAM_BYTES", 0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConversionError, match=r"stream: the disk is full \(49152 bytes needed, 1000 bytes free\)"):
        ConversionJob(source, tmp_path / "out", bpw=4.0, rounding=Rounding(folded=False), **OPTIONS).run()
    assert not (tmp_path / "out").exists()
