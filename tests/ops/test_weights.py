"""Blobs and reconstruction: bit for bit."""

import numpy as np
import pytest
import torch

from exl2nb import ops
from exl2nb.ops import blob as layout
from exl2nb.ops._library import REFERENCES

from .cases import exl2, refused_bytes


@pytest.mark.parametrize("prescale", [1.0, 0.25, 1.7])
def test_prescale(prescale):
    parts = exl2(128, 32, [(4, 128)])
    blob = ops.pack_exl2(*parts, prescale=prescale)
    assert torch.equal(blob, REFERENCES["pack_exl2"](*parts, prescale, 32))
    torch.testing.assert_close(ops.unpack(blob), ops.unpack(ops.pack_exl2(*parts)) * prescale, rtol=5e-2, atol=1e-4)


@pytest.mark.parametrize("bits", layout.WIDTHS)
def test_units_round_trip(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (96, 16)).astype(np.uint8)
    words = layout.pack_units(codes, bits)
    assert words.shape == (3, bits, 16)
    assert (layout.unpack_units(words, bits) == codes).all()
    taken = sorted((word, bit + i) for _, _, count, word, bit in layout.placement(bits) for i in range(count))
    assert taken == [(w, i) for w in range(bits) for i in range(16)], "every bit of a half is used once"


def broken(change):
    """EXL2 tensors with one of them replaced."""
    parts = dict(zip(("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm"), exl2(64, 32, [(4, 32), (2, 32)])))
    return tuple({**parts, **change(parts)}.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"q_groups": torch.tensor([7, 0, 2, 4], dtype=torch.int16)}, "width is not"),
        (lambda p: {"q_groups": torch.tensor([4, 0, 2, 3], dtype=torch.int16)}, "no multiple of its width"),
        (lambda p: {"q_groups": torch.tensor([4, 0, 2, 9], dtype=torch.int16)}, "out of order"),
        (lambda p: {"q_groups": torch.tensor([2, 0, 2, 4], dtype=torch.int16)}, "more rows than q_invperm"),
        (lambda p: {"q_invperm": torch.zeros(64, dtype=torch.int32)}, "no permutation"),
        (lambda p: {"q_invperm": torch.arange(96, dtype=torch.int32)}, "fewer rows than q_invperm"),
        (lambda p: {"q_scale": p["q_scale"][:, :3].contiguous()}, "q_scale is int32"),
        (lambda p: {"q_scale_max": p["q_scale_max"].float()}, "q_scale_max is float32"),
    ],
)
def test_wrong_exl2_tensors_are_named(change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.pack_exl2(*broken(change))
    with pytest.raises(RuntimeError, match=message):
        ops.reconstruct(*broken(change))


def test_a_damaged_blob_is_refused():
    """No byte of the header and tables can be changed so that a kernel reads outside the blob."""
    blob = ops.pack_concat([ops.pack_exl2(*exl2(64, 32, [(4, 32), (2, 32)])), ops.pack_dense(torch.randn(5, 64))])
    x = torch.randn(2, 64)
    for damaged in (blob[:40], blob[:-64], torch.zeros_like(blob), blob[1:]):
        with pytest.raises(RuntimeError, match="linear: blob"):
            ops.linear(x, damaged.clone())
    tables = 64 + 2 * 64 + 64 * 4 + 64
    assert refused_bytes(blob, x, tables) > 0.6 * tables, "most of these bytes matter"


def test_concat_refuses_different_k():
    with pytest.raises(RuntimeError, match="K of the first"):
        ops.pack_concat([ops.pack_dense(torch.randn(4, 32)), ops.pack_dense(torch.randn(4, 64))])
