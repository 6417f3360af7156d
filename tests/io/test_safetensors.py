import json
import os
import random
import struct

import pytest
import safetensors.torch
import torch

from exl2nb.core.errors import ConversionError, FormatError, ModelNotFound
from exl2nb.io import atomic
from exl2nb.io import safetensors as reader
from exl2nb.io.safetensors import DTYPE_OF_TAG, SafetensorsFile, save, stream


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(3, 5, generator=generator).half(),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "words": torch.randint(-9, 9, (4, 2), generator=generator, dtype=torch.int32),
        "short": torch.arange(3, dtype=torch.int16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "Größe": torch.randint(0, 255, (3,), generator=generator, dtype=torch.uint8),
    }


def write(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_bytes_equal_the_reference_writer(tmp_path):
    for metadata in (None, {"format": "pt"}):
        save(tmp_path / "ours.safetensors", tensors(), metadata)
        safetensors.torch.save_file(tensors(), tmp_path / "theirs.safetensors", metadata)
        with stream(tmp_path / "streamed.safetensors", metadata) as writer:
            for name, tensor in tensors().items():
                writer.add(name, tensor)
        theirs = (tmp_path / "theirs.safetensors").read_bytes()
        assert (tmp_path / "ours.safetensors").read_bytes() == theirs
        assert (tmp_path / "streamed.safetensors").read_bytes() == theirs
    assert sorted(os.listdir(tmp_path)) == ["ours.safetensors", "streamed.safetensors", "theirs.safetensors"]


def test_read_back(tmp_path):
    path = tmp_path / "a.safetensors"
    save(path, tensors(), {"k": "v"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"k": "v"} and set(file.names()) == set(tensors())
        for name, tensor in tensors().items():
            read = file.read(name)
            info = file.info(name)
            assert torch.equal(read, tensor) and read.dtype == tensor.dtype == info.dtype and read.is_contiguous()
            assert info.shape == tuple(tensor.shape) and info.nbytes == tensor.nbytes and info.numel == tensor.numel() and info.path == path
            read.fill_(1)  # a copy: the file does not change
            assert torch.equal(file.read(name), tensor)
        assert "w" in file and "x" not in file and "7 tensors" in repr(file)
        with pytest.raises(FormatError, match="tensor 'x': found none of that name"):
            file.read("x")
    with pytest.raises(FormatError, match="found a closed file"):
        file.read("w")


@pytest.mark.parametrize("tag", DTYPE_OF_TAG)
def test_every_dtype(tmp_path, tag):
    raw = torch.arange(48, dtype=torch.uint8) % 2 if tag == "BOOL" else torch.arange(48, dtype=torch.uint8)
    tensor = raw.view(DTYPE_OF_TAG[tag]).reshape(2, -1)
    save(tmp_path / "a.safetensors", {"t": tensor})
    read = SafetensorsFile(tmp_path / "a.safetensors").read("t")
    assert read.dtype == tensor.dtype and torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
    assert json.loads((tmp_path / "a.safetensors").read_bytes()[8:].split(b"}")[0] + b"}}")["t"]["dtype"] == tag


def test_strided_tensors_are_written_in_order(tmp_path):
    save(tmp_path / "a.safetensors", {"t": torch.arange(12).reshape(3, 4).T, "e": torch.ones(1).expand(4)})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert torch.equal(file.read("t"), torch.arange(12).reshape(3, 4).T) and torch.equal(file.read("e"), torch.ones(4))


BROKEN = {
    "not an object": (b"[1, 2]", b"", "first bytes"),
    "not JSON": (b"{nope", b"", "invalid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "invalid JSON"),
    "trailing text": (b"{} x", b"", "invalid JSON"),
    "key twice": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', b"", "tensor 'a'.*key twice"),
    "inner key twice": (b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}', b"", "key twice"),
    "NaN": (b'{"a":NaN}', b"", "constant NaN"),
    "huge number": (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}', b"", "invalid JSON"),
    "deep": (b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}", b"", "invalid JSON"),
    "entry a list": ({"a": [1]}, b"", "tensor 'a': found list, expected an object"),
    "key missing": ({"a": {"dtype": "F32", "shape": []}}, b"", "keys"),
    "key too many": ({"a": entry() | {"extra": 1}}, b"", "keys"),
    "dtype unknown": ({"a": entry("F12")}, bytes(8), "dtype 'F12'"),
    "dtype a list": ({"a": entry(["F32"])}, bytes(8), "dtype"),
    "shape negative": ({"a": entry(shape=(-2,))}, bytes(8), r"shape \[-2\]"),
    "shape fraction": ({"a": entry(shape=(2.0,))}, bytes(8), r"shape \[2.0\]"),
    "shape boolean": ({"a": entry(shape=(True,))}, bytes(8), r"shape \[True\]"),
    "shape text": ({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, bytes(8), "shape 2"),
    "shape overflows": ({"a": entry(shape=(2**40, 2**40))}, bytes(8), "overflows"),
    "shape deep": ({"a": entry(shape=[1] * 100)}, bytes(8), "shape"),
    "size differs": ({"a": entry(shape=(3,))}, bytes(8), "found 8 bytes in data_offsets, expected 12 bytes"),
    "offsets reversed": ({"a": entry(offsets=(8, 0))}, bytes(8), "data_offsets"),
    "offsets negative": ({"a": entry(offsets=(-8, 0))}, bytes(8), "data_offsets"),
    "offsets one": ({"a": entry(offsets=(8,))}, bytes(8), "data_offsets"),
    "offsets float": ({"a": entry(offsets=(0.0, 8.0))}, bytes(8), "data_offsets"),
    "beyond the file": ({"a": entry(shape=(200,), offsets=(0, 800))}, bytes(8), "tensor 'a': found data up to byte .* cut short"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "tensor 'b'.*must not overlap"),
    "same place": ({"a": entry(), "b": entry()}, bytes(8), "must not overlap"),
    "gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "tensor 'b'.*no gaps"),
    "gap in front": ({"a": entry(offsets=(4, 12))}, bytes(12), "tensor 'a'.*no gaps"),
    "bytes behind": ({"a": entry()}, bytes(9), "found 1 bytes after the last tensor"),
    "metadata a list": ({"__metadata__": [], "a": entry()}, bytes(8), "__metadata__"),
    "metadata numbers": ({"__metadata__": {"a": 1}, "a": entry()}, bytes(8), "not all strings"),
}


@pytest.mark.parametrize(
    "header",
    [b'{"a":' + b"[" * 900_000 + b"]" * 900_000 + b"}", b'{"a":[' + b"[]," * 900_000 + b"0]}", b'{"a":[' + b"0," * 7_000_000 + b"0]}"],
    ids=["nested", "arrays", "numbers"],
)
def test_a_header_of_too_many_values_is_refused_before_it_is_parsed(tmp_path, header, monkeypatch):
    path = write(tmp_path / "x.safetensors", header, b"")
    monkeypatch.setattr(reader, "parse_header", lambda *_: pytest.fail("parsed"))
    with pytest.raises(FormatError, match=r"objects and arrays and \d+ commas, expected at most"):
        SafetensorsFile(path)


def test_too_many_tensors_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_TENSORS", 3)
    save(tmp_path / "good.safetensors", {str(i): torch.zeros(1) for i in range(3)})
    assert "3 tensors" in repr(SafetensorsFile(tmp_path / "good.safetensors"))
    save(tmp_path / "bad.safetensors", {str(i): torch.zeros(1) for i in range(5)})
    with pytest.raises(FormatError, match="5 tensors, expected at most 3"):
        SafetensorsFile(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_headers(tmp_path, name):
    header, data, text = BROKEN[name]
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(FormatError, match=text) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(f"{path}: ") and "expected" in str(caught.value)


@pytest.mark.parametrize(("length", "text"), [(10**6, "cut short or not safetensors"), (2**64 - 1, "cut short"), (0, "first bytes")])
def test_broken_lengths(tmp_path, length, text):
    with pytest.raises(FormatError, match=text):
        SafetensorsFile(write(tmp_path / "x.safetensors", b"{}", length=length))


def test_header_limit(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 200_000_000))
    os.truncate(path, 300_000_000)  # a sparse file
    with pytest.raises(FormatError, match="at most 100000000"):
        SafetensorsFile(path)


def test_not_a_file(tmp_path):
    with pytest.raises(ModelNotFound, match="no such file"):
        SafetensorsFile(tmp_path / "x.safetensors")
    with pytest.raises(FormatError, match="found a directory"):
        SafetensorsFile(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(FormatError, match="expected a regular file"):
        SafetensorsFile(tmp_path / "pipe.safetensors")
    (tmp_path / "e.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="found an empty file"):
        SafetensorsFile(tmp_path / "e.safetensors")


def test_read_into_memory_that_is_there(tmp_path):
    save(tmp_path / "a.safetensors", tensors())
    memory = torch.full((30,), 255, dtype=torch.uint8)  # the bytes of `w`; `words` is larger
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        for name, wanted in tensors().items():
            found = file.read(name, into=memory)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            assert (found.data_ptr() == memory.data_ptr()) == (0 < wanted.nbytes <= 30)
        rows = file.read("words", rows=(1, 3), into=memory)
        assert torch.equal(rows, tensors()["words"][1:3]) and rows.data_ptr() == memory.data_ptr()


def test_padded_header_and_any_key_order_are_fine(tmp_path):
    header = json.dumps({"z": entry(offsets=(8, 16)), "a": entry(offsets=(0, 8))}).encode() + b"   "
    file = SafetensorsFile(write(tmp_path / "x.safetensors", header, bytes(16)))
    assert file.names() == ["a", "z"]


def test_file_cut_short_while_open(tmp_path):
    path = tmp_path / "a.safetensors"
    save(path, {"t": torch.ones(1000)})
    file = SafetensorsFile(path)
    os.truncate(path, 2000)
    with pytest.raises(FormatError, match="the file ends after .* of the tensor's bytes"):
        file.read("t")


def test_every_truncation_is_a_format_error(tmp_path):
    path, cut = tmp_path / "a.safetensors", tmp_path / "cut.safetensors"
    save(path, tensors())
    whole = path.read_bytes()
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            SafetensorsFile(cut)
    cut.write_bytes(whole + b"\0")
    with pytest.raises(FormatError):
        SafetensorsFile(cut)


@pytest.mark.parametrize("seed", range(8))
def test_flipped_bits_never_crash(tmp_path, seed):
    """A damaged header either still describes every byte of the file exactly, or is refused."""
    path, bad = tmp_path / "a.safetensors", tmp_path / "bad.safetensors"
    save(path, tensors())
    whole = path.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = random.Random(seed)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            damaged[rng.randrange(end)] ^= 1 << rng.randrange(8)
        bad.write_bytes(damaged)
        try:
            with SafetensorsFile(bad) as file:
                assert sum(file.read(name).nbytes for name in file.names()) == len(whole) - file.header_bytes
        except FormatError as error:
            refused += str(bad) in str(error)
    assert refused > 50


def test_random_headers_never_crash(tmp_path):
    rng = random.Random(7)
    pool = [None, True, -1, 0, 1, 2.5, 2**63, 2**70, "F32", "I16", "", [], [0], [0, 8], [8, 0], [2**62, 2**63], {}, {"dtype": "F32"}]
    for _ in range(400):
        value = {rng.choice("abc"): {key: rng.choice(pool) for key in rng.sample(["dtype", "shape", "data_offsets"], 3)} for _ in range(3)}
        path = write(tmp_path / "x.safetensors", value, bytes(rng.choice([0, 8, 16])))
        with pytest.raises(FormatError):
            SafetensorsFile(path)


# --- writing ------------------------------------------------------------------------------------------------------------------------------


def test_existing_file_survives_a_failed_write(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), stream(path) as writer:  # noqa: PT012
        writer.add("t", torch.ones(1000))
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.safetensors"]


def test_names_and_dtypes_of_the_writer(tmp_path):
    with pytest.raises(FormatError, match="tensor 't': found it twice"), stream(tmp_path / "a.safetensors") as writer:  # noqa: PT012
        writer.add("t", torch.ones(1))
        writer.add("t", torch.ones(1))
    with pytest.raises(FormatError, match="complex64"):
        save(tmp_path / "a.safetensors", {"t": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(FormatError, match="__metadata__"):
        save(tmp_path / "a.safetensors", {"__metadata__": torch.ones(1)})
    assert os.listdir(tmp_path) == []


def test_disk_full_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    monkeypatch.setattr(atomic, "free_bytes", lambda _: 100)
    with pytest.raises(ConversionError, match=r"a.safetensors: the disk is full \(\d+ bytes needed, 100 bytes free\)"):
        save(path, {"t": torch.ones(1000)})
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no /dev/full")
def test_disk_full_while_writing(tmp_path, monkeypatch):
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *rest: real("/dev/full" if str(path).endswith(".tmp") else path, flags & ~os.O_EXCL, *rest)
    )
    with pytest.raises(ConversionError, match=r"a.safetensors: the disk is full"):
        save(tmp_path / "a.safetensors", {"t": torch.ones(1 << 16)})
    assert os.listdir(tmp_path) == []


def test_directory_that_cannot_be_written(tmp_path):
    with pytest.raises(ConversionError, match="cannot be written"):
        save(tmp_path / "no" / "a.safetensors", {"t": torch.ones(1)})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConversionError, match="cannot be written"):
        save(tmp_path / "file" / "a.safetensors", {"t": torch.ones(1)})
