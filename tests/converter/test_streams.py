"""Streams in files and tensors read ahead: the same numbers and bytes as in memory, full disks named, nothing left behind."""

import shutil
import threading

import pytest
import torch

from exl2nb.converter import sensitivity, streams
from exl2nb.converter.quantization import Rounding
from exl2nb.converter.streams import DiskStream, copy_to_disk, new_stream
from exl2nb.converter.weights import DenseWeights, Prefetcher
from exl2nb.core.errors import ConversionError, FormatError
from exl2nb.io import safetensors
from exl2nb.model.loader import read_model_config
from exl2nb.model.store import open_store

from .test_conversion_job import convert, output

CPU = torch.device("cpu")


def test_rows_come_back(tmp_path):
    x = torch.randn(5, 3, 8)
    made = copy_to_disk(x, tmp_path)
    assert list(tmp_path.iterdir()) == []  # it has no name
    assert (len(made), made.shape, made.nbytes, made.is_cuda) == (5, x.shape, x.nbytes, False)
    assert torch.equal(made[:], x)
    assert torch.equal(made[1:3], x[1:3])
    assert made[5:].shape == (0, 3, 8)
    made[3:] = 2 * x[3:]
    made[0:1] = x.transpose(1, 2).contiguous().transpose(1, 2)[2:3]
    assert torch.equal(made[:], torch.cat([x[2:3], x[1:3], 2 * x[3:]]))
    assert copy_to_disk(made, tmp_path) is made
    made.file.truncate(100)
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
    assert output(convert(source, tmp_path / "out").path) == output(whole.path)
    assert made
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_named(source, tmp_path, monkeypatch):
    for module in (streams, sensitivity):
        monkeypatch.setattr(module, "STREAM_BYTES", 0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConversionError, match=r"stream: the disk is full \(49152 bytes needed, 1000 bytes free\)"):
        convert(source, tmp_path / "out", rounding=Rounding(folded=False))
    assert not (tmp_path / "out").exists()


# ---- Tensors read ahead: the same numbers in any order; errors are left to the reader


MOST = 1 << 20


@pytest.fixture
def tensors():
    return {name: torch.randn(size, 7) for name, size in (("a", 3), ("b", 50), ("c", 11))}


@pytest.fixture
def file(tensors, tmp_path):
    safetensors.save(tmp_path / "x.safetensors", tensors)
    with safetensors.SafetensorsFile(tmp_path / "x.safetensors") as found:
        yield found


def test_tensors_read_ahead_are_taken(file, tensors):
    ahead = Prefetcher(file, MOST, pinned=False)
    for names in (["a", "b"], ["c", "a"], ["b", "c", "a"]):
        ahead.begin(names)
        ahead.begin(names)
        assert all(torch.equal(ahead.take(name), tensors[name]) for name in reversed(names))
        assert all(ahead.take(name) is None for name in tensors.keys() - set(names))
    ahead.close()
    ahead.close()
    assert ahead.take("a") is None


def test_more_than_fits_is_not_read(file, tensors):
    ahead = Prefetcher(file, tensors["b"].nbytes, pinned=False)
    ahead.begin(["a", "b"])
    assert ahead.take("a") is None
    ahead.begin(["a", "c"])
    assert torch.equal(ahead.take("c"), tensors["c"])


def test_errors_are_left_to_the_reader(file, tensors):
    with open(file.path, "r+b") as raw:
        raw.truncate(file.header_bytes + sum(tensors[name].nbytes for name in ("a", "b")) + 1)
    ahead = Prefetcher(file, MOST, pinned=False)
    ahead.begin(["a", "b", "c"])
    assert torch.equal(ahead.take("a"), tensors["a"])
    assert ahead.take("c") is None
    with pytest.raises(FormatError, match="the file ends"):
        file.read("c")


def test_reading_stops(file):
    began, go, names = threading.Event(), threading.Event(), []

    class Slow:
        info = staticmethod(file.info)

        def read(self, name, into):
            names.append(name)
            began.set()
            go.wait(10)
            return file.read(name, into=into)

    ahead = Prefetcher(Slow(), MOST, pinned=False)
    ahead.begin(["a", "b", "c"])
    assert began.wait(10)
    threading.Timer(0.05, go.set).start()
    ahead.close()
    assert names == ["a"]


def test_layers_are_the_same_in_any_order(source, monkeypatch):
    config, taken, take = read_model_config(source), [], Prefetcher.take
    monkeypatch.setattr(Prefetcher, "take", lambda self, name: taken.append(found := take(self, name)) or found)
    with open_store(config, source) as store:
        plain, ahead = DenseWeights(config, store), DenseWeights(config, store)
        ahead.prefetcher = Prefetcher(store, MOST, pinned=False)
        for index, then in ((0, 1), (1, 2), (1, 0), (0, 1), (0, None), (1, 1)):
            found, wanted = ahead.layer(index, then=then), plain.layer(index)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        ahead.close()
    assert sum(found is not None for found in taken) >= 3 * 7


def test_a_conversion_that_reads_ahead_gives_the_same_bytes(source, whole, tmp_path, monkeypatch):
    taken, take, begin = [], Prefetcher.take, Prefetcher.__init__
    monkeypatch.setattr(Prefetcher, "__init__", lambda self, store, most, *, pinned: begin(self, store, MOST, pinned=False))
    monkeypatch.setattr(Prefetcher, "take", lambda self, name: taken.append(found := take(self, name)) or found)
    assert output(convert(source, tmp_path / "made").path) == output(whole.path)
    assert sum(found is not None for found in taken) >= 3 * 7
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights ahead")]
