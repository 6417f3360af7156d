"""Blobs and reconstruction: bit for bit."""

import numpy as np
import pytest
import torch

from exl2nb import ops
from exl2nb.ops import blob as layout
from exl2nb.ops._library import REFERENCES

from .damage import refused_bytes
from .model_case import exl2


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (2, "1B1B1B1B 1B1B1B1B"),
        (3, "53977053 70539770 97705397"),
        (4, "4D6F81A3 C5E7092B 4D6F81A3 C5E7092B"),
        (5, "4DFC4543 78245BA3 0753617D 4B276CF4 E55C7066"),
        (6, "9F611283 90BBD2D9 B2579740 8F201EB3 9CAB91D5 71538703"),
        (8, "18110A03 342D261F 5049423B 6C655E57 88817A73 A49D968F C0B9B2AB DCD5CEC7"),
    ],
)
@pytest.mark.parametrize("run", [ops.reconstruct, REFERENCES["reconstruct"]], ids=["compiled", "reference"])
def test_codes_of_the_format(bits, words, run):
    """The worked words of the format: codes (7r + 3) mod 2^b down a column."""
    column = np.array([int(w, 16) for w in words.split()], np.uint32).view(np.int32)
    q_weight = torch.from_numpy(np.repeat(column[:, None], 32, 1))
    scale_max = torch.tensor([1.0]).half()  # index 15: step 256 * fp16(1 / 256) = 1
    perm = torch.arange(32, dtype=torch.int32)
    out = run(q_weight, torch.full((1, 4), -1, dtype=torch.int32), scale_max, torch.tensor([bits, 0], dtype=torch.int16), perm)
    expected = (7 * torch.arange(32) + 3) % 2**bits - 2 ** (bits - 1)
    assert torch.equal(out, expected[:, None].expand(32, 32).half())


@pytest.mark.parametrize(
    ("scale_max", "index", "bits", "code", "expected"),
    [(0x3800, 9, 4, 13, 0x3BD0), (0x22CF, 9, 4, 13, 0x26A6), (0x1019, 15, 8, 255, 0x2C18)],
)
@pytest.mark.parametrize("run", [ops.reconstruct, REFERENCES["reconstruct"]], ids=["compiled", "reference"])
def test_rounding_of_the_format(scale_max, index, bits, code, expected, run):
    """The worked numbers of the format, subnormal steps included."""
    per_word = 32 // bits
    word = sum(code << (bits * j) for j in range(per_word))
    q_weight = torch.from_numpy(np.full((bits, 32), word, np.uint32).view(np.int32))
    nibbles = torch.from_numpy(np.full((1, 4), sum(index << 4 * j for j in range(8)), np.uint32).view(np.int32))
    maximum = torch.from_numpy(np.array([scale_max], np.uint16).view(np.float16))
    out = run(q_weight, nibbles, maximum, torch.tensor([bits, 0], dtype=torch.int16), torch.arange(32, dtype=torch.int32))
    assert (out.numpy().view(np.uint16) == expected).all()


@pytest.mark.parametrize("groups", [[(b, 128)] for b in layout.WIDTHS] + [[(8, 32), (6, 64), (5, 32), (4, 128), (3, 32), (2, 32)]])
def test_reconstruct_against_reference(groups):
    parts = exl2(sum(rows for _, rows in groups), 64, groups, scale=2.0)
    assert torch.equal(ops.reconstruct(*parts), REFERENCES["reconstruct"](*parts))


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
