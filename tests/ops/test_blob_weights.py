"""Weight blobs of every format: packed bit for bit as the reference does, multiplied within twice the error of fp16, rows independent."""

import numpy as np
import pytest
import torch

from exl2nb import ops
from exl2nb.ops import blob as layout
from exl2nb.ops import reference
from exl2nb.ops._library import REFERENCE_OPS

from .cases import exl2, gptq, refused_bytes

WIDTHS = layout.CODE_WIDTHS
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 130)
EXL2 = {
    **{f"{b}-bit": (256, 96, 96, [(b, 128), (b, 128)]) for b in WIDTHS},
    "all widths, odd outputs": (320, 160, 147, [(8, 32), (6, 64), (5, 32), (4, 128), (3, 32), (2, 32)]),
    "short last group": (224, 32, 32, [(4, 128), (4, 96)]),
    "one unit, 5 outputs": (32, 32, 5, [(3, 32)]),
    "groups of 256": (512, 32, 17, [(5, 256), (2, 256)]),
}
GPTQ = {
    "symmetric": (256, 96, 128, {"zeros": False}),
    "act-order, odd outputs": (256, 83, 64, {"act_order": True}),
    "groups of 16": (96, 40, 16, {}),
    "short last group": (160, 48, 64, {"act_order": True}),
    "one group, fp32 scales": (64, 16, 64, {"wide": True, "zeros": False}),
    "fp32 scales and zeros": (64, 5, 32, {"wide": True}),
}


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices():
    """Pack op, its arguments, and the f32 matrix `(K, N)` where the format's definition says it."""
    for name, (K, N, outputs, groups) in EXL2.items():
        yield pytest.param("pack_exl2", (*exl2(K, N, groups, seed=K + N), 1.0, outputs), None, id=f"exl2, {name}")
    for name, (K, N, size, options) in GPTQ.items():
        for bits in (2, 3, 4, 8):
            case = gptq(K, N, bits, size, **options, seed=bits)
            yield pytest.param("pack_gptq", (*case.arguments, bits, K), case.weight, id=f"gptq, {name}, {bits}-bit")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for K, N in ((64, 32), (300, 37), (17, 5), (513, 96)):
            weight = randn(N, K, seed=K).to(dtype)
            yield pytest.param("pack_dense", (weight,), weight.float().T, id=f"{dtype}, {K} x {N}")


@pytest.mark.parametrize(("op", "arguments", "weight"), matrices())
def test_packed_and_multiplied(op, arguments, weight):
    blob = getattr(torch.ops.exl2nb, op)(*arguments)
    assert torch.equal(blob, REFERENCE_OPS[op](*arguments))
    found = ops.unpack(blob)
    assert torch.equal(found, REFERENCE_OPS["unpack"](blob))
    assert weight is None or torch.equal(found, weight)
    for M in ROWS:
        x = randn(M, len(found), seed=M)
        exact = x.double() @ found.double()
        half = (x.half() @ found.half()).double() - exact
        y = ops.linear(x, blob)
        assert (y - exact).norm() <= 2 * half.norm()
        if op == "pack_dense":
            torch.testing.assert_close(y, x @ found, rtol=1e-5, atol=1e-5 * len(found) ** 0.5)


@pytest.mark.parametrize("kind", ["exl2", "gptq", "f32", "f16", "mixed parts"])
def test_rows_are_independent(kind, threads):
    """Any split of the rows, any thread count: the same bits."""
    K = 256
    parts = [ops.pack_exl2(*exl2(K, 96, [(6, 128), (4, 64), (3, 64)], seed=s), out_features=n) for s, n in ((1, 96), (2, 83))]
    parts += [gptq(K, 83, 4, 64, act_order=True).pack(), gptq(K, 40, 3, 16, wide=True).pack()]
    parts += [ops.pack_dense(randn(45, K, seed=3).to(dtype)) for dtype in (torch.float32, torch.float16)]
    blob = {"exl2": parts[0], "gptq": parts[2], "f32": parts[4], "f16": parts[5], "mixed parts": ops.pack_concat(parts)}[kind]
    bias, x = randn(ops.shape(blob)[1], seed=4), randn(137, K, seed=5)
    whole = ops.linear(x, blob, bias)
    for step in (*range(1, 14), 24, 128):
        assert torch.equal(torch.cat([ops.linear(piece, blob, bias) for piece in x.split(step)]), whole), step
    for n in (1, 3):
        threads(n)
        assert torch.equal(ops.linear(x, blob, bias), whole)


def test_concat_is_side_by_side():
    K = 128
    one, two = (gptq(K, 48, 4, 32, act_order=True).pack() for _ in range(2))
    parts = [ops.pack_exl2(*exl2(K, 64, [(4, 128)], seed=s), out_features=n) for s, n in ((1, 64), (2, 50))]
    parts += [one, two, ops.pack_dense(torch.randn(7, K)), gptq(K, 16, 3, 16).pack()]
    blob, x = ops.pack_concat(parts), torch.randn(6, K)
    assert ops.shape(blob) == (K, 64 + 50 + 48 + 48 + 7 + 16)
    assert torch.equal(blob, REFERENCE_OPS["pack_concat"](parts))
    assert torch.equal(ops.unpack(blob), torch.cat([ops.unpack(part) for part in parts], 1))
    assert torch.equal(ops.linear(x, blob), torch.cat([ops.linear(x, part) for part in parts], 1))
    tables = layout.read_blob(blob)[1]
    assert tables[2].perm is not None and tables[2].perm.ctypes.data == tables[3].perm.ctypes.data, "equal permutations are stored once"
    assert len(ops.pack_concat([parts[0], parts[0]])) < 2 * len(parts[0])
    with pytest.raises(RuntimeError, match="K of the first"):
        ops.pack_concat([ops.pack_dense(torch.randn(4, 32)), ops.pack_dense(torch.randn(4, 64))])


def test_bias_and_residual():
    blob = ops.pack_exl2(*exl2(128, 64, [(4, 128)]), out_features=51)
    x, bias, residual = torch.randn(3, 128), torch.randn(51), torch.randn(3, 51)
    out = residual.clone()
    ops.ResidualOp(blob=blob, bias=bias)(out, x)
    assert torch.equal(out, residual + ops.linear(x, blob, bias))
    assert torch.equal(ops.linear(x, blob, bias), ops.linear(x, blob) + bias)
    expected = residual.clone()
    reference.linear_residual(expected, x, ops.unpack(blob), bias)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_error_is_that_of_fp16(bits, outlier):
    """At most twice the error of a plain fp16 product, outliers in the activations included."""
    K = 1024
    blob = ops.pack_exl2(*exl2(K, 128, [(bits, 128)] * 8, seed=bits))
    weight = ops.unpack(blob)
    x = randn(16, K, seed=bits)
    x[:, ::97] *= outlier
    exact = x.double() @ weight.double()
    ours, half = ops.linear(x, blob) - exact, (x.half() @ weight.half()).double() - exact
    assert ours.norm() <= 2 * half.norm()
    assert ours.abs().max() <= 2 * half.abs().max()


def test_nan_and_infinity_show_in_their_rows():
    blob = ops.pack_exl2(*exl2(64, 32, [(4, 64)]))
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 40] = float("nan"), float("inf")
    y = ops.linear(x, blob)
    assert (y[0] == 0).all()
    assert y[1:].isnan().all()


def test_tiny_and_huge_activations():
    blob = ops.pack_exl2(*exl2(64, 32, [(8, 64)]))
    weight = ops.unpack(blob)
    for size in (1e-25, 1e25):
        x = torch.randn(5, 64) * size
        torch.testing.assert_close(ops.linear(x, blob) / size, (x / size) @ weight, rtol=1e-3, atol=1e-4)


def test_eight_bit_zeros_reach_256():
    case = gptq(64, 32, 8, 32)
    case.arguments[2][:] = torch.tensor([0, 256]).repeat(16).short()
    weight, x = ops.unpack(case.pack()), torch.randn(1, 64)
    assert weight[:, 1::2].max() < 0 <= weight[:, ::2].min()
    torch.testing.assert_close(ops.linear(x, case.pack()), x @ weight, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("prescale", [1.0, 0.25, 1.7])
def test_prescale(prescale):
    parts = exl2(128, 32, [(4, 128)])
    blob = ops.pack_exl2(*parts, prescale=prescale)
    assert torch.equal(blob, REFERENCE_OPS["pack_exl2"](*parts, prescale, 32))
    torch.testing.assert_close(ops.unpack(blob), ops.unpack(ops.pack_exl2(*parts)) * prescale, rtol=5e-2, atol=1e-4)


@pytest.mark.parametrize("bits", WIDTHS)
def test_units_round_trip(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (96, 16)).astype(np.uint8)
    words = layout.pack_units(codes, bits)
    assert words.shape == (3, bits, 16)
    assert (layout.unpack_units(words, bits) == codes).all()
    taken = sorted((word, bit + i) for _, _, count, word, bit in layout.bit_placement(bits) for i in range(count))
    assert taken == [(w, i) for w in range(bits) for i in range(16)], "every bit of a half is used once"


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(2, 65), None, r"linear: x is float32 \(2, 65\); expected contiguous float32 \(\*, 64\)"),
        (torch.zeros(2, 64).half(), None, r"linear: x is float16"),
        (torch.zeros(64, 2).T, None, "not contiguous"),
        (torch.zeros(64), None, r"linear: x is float32 \(64\)"),
        (torch.zeros(2, 64), torch.zeros(31), r"linear: bias is float32 \(31\)"),
    ],
)
def test_wrong_arguments_of_linear(x, bias, message):
    blob = ops.pack_exl2(*exl2(64, 32, [(4, 64)]))
    assert ops.linear(torch.zeros(0, 64), blob).shape == (0, 32)
    with pytest.raises(RuntimeError, match=message):
        ops.linear(x, blob, bias)


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
def test_wrong_exl2_tensors(change, message):
    with pytest.raises(RuntimeError, match=message):
        ops.pack_exl2(*broken(change))
    with pytest.raises(RuntimeError, match=message):
        ops.reconstruct(*broken(change))


@pytest.mark.parametrize(
    ("position", "value", "bits", "message"),
    [
        (0, lambda t: t[:7].contiguous(), 4, r"qweight is int32 \(7, 32\)"),
        (1, lambda t: t.double(), 4, "scales is float64"),
        (2, lambda t: t.int(), 4, "zeros is int32"),
        (3, lambda t: t.clone().fill_(0), 4, "perm does not name every row once"),
        (3, lambda t: t[:32].contiguous(), 4, "more rows than are stored"),
        (4, lambda t: torch.tensor([32, 31], dtype=torch.int32), 4, "multiple of 32"),
        (0, lambda t: t, 5, "bits is 5"),
    ],
)
def test_wrong_gptq_tensors(position, value, bits, message):
    arguments = list(gptq(64, 32, 4, 32, act_order=True).arguments)
    arguments[position] = value(arguments[position])
    with pytest.raises(RuntimeError, match=message):
        ops.pack_gptq(*arguments, bits=bits, in_features=64)


def test_a_damaged_blob_is_refused():
    """No byte of the header and tables can be changed so that a kernel reads outside the blob."""
    blob = ops.pack_concat([ops.pack_exl2(*exl2(64, 32, [(4, 32), (2, 32)])), ops.pack_dense(torch.randn(5, 64))])
    x = torch.randn(2, 64)
    for damaged in (blob[:40], blob[:-64], torch.zeros_like(blob), blob[1:]):
        with pytest.raises(RuntimeError, match="linear: blob"):
            ops.linear(x, damaged.clone())
    tables = 64 + 2 * 64 + 64 * 4 + 64
    assert refused_bytes(blob, x, tables) > 0.6 * tables, "most of these bytes matter"
    blob, x = gptq(48, 32, 4, 16, act_order=True).pack(), torch.randn(2, 48)
    tables = 64 + 64 + layout.align_64(96 * 4) + 64
    assert refused_bytes(blob, x, tables) > 0.6 * tables
