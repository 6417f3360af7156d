"""GPTQ matrices in the blob: packed bit for bit, multiplied as exactly as EXL2 ones."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops import blob as layout
from exl2nb.ops._library import REFERENCES

from .cases import exl2, gptq, refused_bytes

KINDS = [
    pytest.param(256, 96, 128, {"zeros": False}, id="symmetric"),
    pytest.param(256, 83, 64, {"act_order": True}, id="act-order, odd outputs"),
    pytest.param(96, 40, 16, {}, id="groups of 16"),
    pytest.param(160, 48, 64, {"act_order": True}, id="short last group"),
    pytest.param(64, 16, 64, {"wide": True, "zeros": False}, id="one group, fp32 scales"),
    pytest.param(64, 5, 32, {"wide": True}, id="fp32 scales and zeros"),
]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("K", "N", "size", "options"), KINDS)
def test_against_the_definition(K, N, size, options, bits):
    case = gptq(K, N, bits, size, **options, seed=bits)
    blob = case.pack()
    assert torch.equal(blob, REFERENCES["pack_gptq"](*case.arguments, bits, K))
    assert torch.equal(ops.unpack(blob), case.weight)
    assert torch.equal(REFERENCES["unpack"](blob), case.weight)
    for M in (1, 2, 3, 4, 5, 33, 130):
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M))
        exact = x.double() @ case.weight.double()
        half = (x.half() @ case.weight.half()).double() - exact
        y = ops.linear(x, blob)
        assert (y - exact).norm() <= 2 * half.norm()
        assert torch.equal(torch.cat([ops.linear(row, blob) for row in x.split(1)]), y), "rows do not know of each other"


def test_beside_other_formats():
    K = 128
    one, two = gptq(K, 48, 4, 32, act_order=True), gptq(K, 48, 4, 32, act_order=True)
    parts = [one.pack(), two.pack(), ops.pack_exl2(*exl2(K, 64, [(4, 128)]), out_features=50), ops.pack_dense(torch.randn(7, K))]
    parts.append(gptq(K, 16, 3, 16).pack())
    blob = ops.pack_concat(parts)
    assert torch.equal(blob, REFERENCES["pack_concat"](parts))
    assert torch.equal(ops.unpack(blob), torch.cat([ops.unpack(part) for part in parts], 1))
    x = torch.randn(6, K)
    assert torch.equal(ops.linear(x, blob), torch.cat([ops.linear(x, part) for part in parts], 1))
    tables = layout.read(blob)[1]
    assert tables[0].perm is not None and tables[0].perm.ctypes.data == tables[1].perm.ctypes.data, "equal permutations are stored once"


def test_eight_bit_zeros_reach_256():
    case = gptq(64, 32, 8, 32)
    case.arguments[2][:] = torch.tensor([0, 256]).repeat(16).short()
    weight, x = ops.unpack(case.pack()), torch.randn(1, 64)
    assert weight[:, 1::2].max() < 0 <= weight[:, ::2].min()
    torch.testing.assert_close(ops.linear(x, case.pack()), x @ weight, rtol=1e-4, atol=1e-3)


def changed(position, value):
    arguments = list(gptq(64, 32, 4, 32, act_order=True).arguments)
    arguments[position] = value(arguments[position])
    return arguments


@pytest.mark.parametrize(
    ("position", "value", "bits", "message"),
    [
        (0, lambda t: t[:7].contiguous(), 4, r"qweight is int32 \(7, 32\)"),
        (1, lambda t: t.double(), 4, "scales is float64"),
        (2, lambda t: t.int(), 4, "zeros is int32"),
        (3, lambda t: t.clone().fill_(0), 4, "perm does not name every row once"),
        (3, lambda t: None if t.numel() == 0 else t[:32].contiguous(), 4, "more rows than are stored"),
        (4, lambda t: torch.tensor([32, 31], dtype=torch.int32), 4, "multiple of 32"),
        (0, lambda t: t, 5, "bits is 5"),
    ],
)
def test_wrong_arguments_are_named(position, value, bits, message):
    with pytest.raises(RuntimeError, match=message):
        ops.pack_gptq(*changed(position, value), bits=bits, in_features=64)


def test_a_damaged_blob_is_refused():
    blob, x = gptq(48, 32, 4, 16, act_order=True).pack(), torch.randn(2, 48)
    tables = 64 + 64 + layout.align(96 * 4) + 64
    assert refused_bytes(blob, x, tables) > 0.6 * tables, "most of these bytes matter"
