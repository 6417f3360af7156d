"""The model that exllamav2 made: read, checked, reconstructed to committed checksums, and encoded again byte for byte."""

import hashlib
from pathlib import Path

import pytest

from exl2nb.io.shards import TensorStore
from exl2nb.quant.exl2 import Exl2Tensors, encode

from .oracle import decode

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def store():
    with TensorStore(DATA / "demo-exl2-4.0bpw") as store:
        yield store


def prefixes(store):
    return sorted(name.removesuffix(".q_weight") for name in store.names() if name.endswith(".q_weight"))


def test_reconstruction_checksums(store):
    lines = (DATA / "demo-exl2-4.0bpw.reconstruct.sha256").read_text().splitlines()
    expected = dict(reversed(line.split()) for line in lines)
    found = {p: hashlib.sha256(Exl2Tensors.read(store, p).reconstruct().numpy().tobytes()).hexdigest()[:16] for p in prefixes(store)}
    assert len(found) == 85 and found == expected


def test_encoding_again_gives_the_same_bytes(store):
    for prefix in prefixes(store):
        read = Exl2Tensors.read(store, prefix)
        again = encode(read.codes(), read.scale_index(), read.q_scale_max, read.groups, read.perm, bias=read.bias)
        for name, tensor in again.tensors(prefix).items():
            original = store.read(name)
            assert tensor.dtype == original.dtype and tensor.shape == original.shape
            assert tensor.numpy().tobytes() == original.numpy().tobytes(), name


@pytest.mark.parametrize("prefix", ["model.layers.0.self_attn.k_proj", "model.layers.7.self_attn.k_proj"])
def test_scalar_decoder_agrees(store, prefix):
    read = Exl2Tensors.read(store, prefix)
    arrays = [getattr(read, name).numpy() for name in ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")]
    assert decode(*arrays).tobytes() == read.reconstruct().numpy().tobytes()
