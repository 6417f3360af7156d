"""Tensors read ahead: the same numbers, whatever is asked for in which order; trouble is left to whoever asks."""

import threading

import pytest
import torch

from exl2nb.converter.job import ConversionJob
from exl2nb.converter.weights import DenseWeights, Prefetcher
from exl2nb.core.errors import FormatError
from exl2nb.io import safetensors
from exl2nb.model.loader import read_model_config
from exl2nb.model.store import open_store

from .test_job import OPTIONS, output

MOST = 1 << 20


@pytest.fixture
def tensors():
    return {name: torch.randn(size, 7) for name, size in (("a", 3), ("b", 50), ("c", 11))}


@pytest.fixture
def file(tensors, tmp_path):
    safetensors.save(tmp_path / "x.safetensors", tensors)
    with safetensors.SafetensorsFile(tmp_path / "x.safetensors") as found:
        yield found


def test_what_was_expected_is_there(file, tensors):
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


def test_trouble_is_left_to_whoever_asks(file, tensors):
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
        ahead._prefetcher = Prefetcher(store, MOST, pinned=False)
        for index, then in ((0, 1), (1, 2), (1, 0), (0, 1), (0, None), (1, 1)):
            found, wanted = ahead.layer(index, then=then), plain.layer(index)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        ahead.close()
    assert sum(found is not None for found in taken) >= 3 * 7


def test_a_conversion_that_reads_ahead_gives_the_same_bytes(source, tmp_path, monkeypatch):
    taken, take = [], Prefetcher.take
    plain = ConversionJob(source, tmp_path / "plain", bpw=4.0, **OPTIONS).run()
    begin = Prefetcher.__init__
    monkeypatch.setattr(Prefetcher, "__init__", lambda self, store, most, *, pinned: begin(self, store, MOST, pinned=False))
    monkeypatch.setattr(Prefetcher, "take", lambda self, name: taken.append(found := take(self, name)) or found)
    made = ConversionJob(source, tmp_path / "made", bpw=4.0, **OPTIONS).run()
    assert output(made.path) == output(plain.path)
    assert sum(found is not None for found in taken) >= 3 * 7
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights ahead")]
