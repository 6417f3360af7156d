"""Products with every kind of weight: right against fp32, and the same bits whatever travels together."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops import reference
from exl2nb.ops._library import REFERENCES

from .cases import exl2

WIDTHS = (2, 3, 4, 5, 6, 8)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 130)


def mixes():
    """(name, K, N, outputs, groups)."""
    for b in WIDTHS:
        yield pytest.param(256, 96, 96, [(b, 128), (b, 128)], id=f"{b}-bit")
    yield pytest.param(320, 160, 147, [(8, 32), (6, 64), (5, 32), (4, 128), (3, 32), (2, 32)], id="all widths, odd outputs")
    yield pytest.param(224, 32, 32, [(4, 128), (4, 96)], id="short last group")
    yield pytest.param(32, 32, 5, [(3, 32)], id="one unit, 5 outputs")
    yield pytest.param(512, 32, 17, [(5, 256), (2, 256)], id="groups of 256")


@pytest.mark.parametrize(("K", "N", "outputs", "groups"), list(mixes()))
def test_exl2_against_reference(K, N, outputs, groups):
    parts = exl2(K, N, groups, seed=K + N)
    blob = ops.pack_exl2(*parts, out_features=outputs)
    weight = REFERENCES["unpack"](blob)
    assert torch.equal(ops.unpack(blob), weight)
    assert torch.equal(blob, REFERENCES["pack_exl2"](*parts, 1.0, outputs))
    for M in ROWS:
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M))
        exact = x.double() @ weight.double()
        bound = 2 * (x.half() @ weight.half()).double().sub(exact).norm()
        assert (ops.linear(x, blob) - exact).norm() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("K", "N"), [(64, 32), (300, 37), (17, 5), (513, 96)])
def test_dense_against_reference(dtype, K, N):
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(K)).to(dtype)
    blob = ops.pack_dense(weight)
    assert torch.equal(blob, REFERENCES["pack_dense"](weight))
    assert torch.equal(ops.unpack(blob), weight.float().T)
    for M in ROWS:
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M))
        torch.testing.assert_close(ops.linear(x, blob), x @ weight.float().T, rtol=1e-5, atol=1e-5 * K**0.5)


@pytest.mark.parametrize("kind", ["exl2", "f32", "f16", "mixed parts"])
def test_rows_do_not_know_of_each_other(kind):
    """Any split of the rows, any thread count: the same bits."""
    K = 256
    quantised = [ops.pack_exl2(*exl2(K, 96, [(6, 128), (4, 64), (3, 64)], seed=s), out_features=n) for s, n in ((1, 96), (2, 83))]
    dense = [ops.pack_dense(torch.randn(45, K, generator=torch.Generator().manual_seed(3)).to(d)) for d in (torch.float32, torch.float16)]
    blob = {"exl2": quantised[0], "f32": dense[0], "f16": dense[1], "mixed parts": ops.pack_concat([*quantised, *dense])}[kind]
    bias = torch.randn(ops.shape(blob)[1], generator=torch.Generator().manual_seed(4))
    x = torch.randn(137, K, generator=torch.Generator().manual_seed(5))
    whole = ops.linear(x, blob, bias)
    for step in (*range(1, 14), 24, 128):
        assert torch.equal(torch.cat([ops.linear(piece, blob, bias) for piece in x.split(step)]), whole), step
    threads = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            assert torch.equal(ops.linear(x, blob, bias), whole)
    finally:
        torch.set_num_threads(threads)


def test_concat_is_side_by_side():
    K = 128
    parts = [ops.pack_exl2(*exl2(K, 64, [(4, 128)], seed=s), out_features=n) for s, n in ((1, 64), (2, 50))]
    parts.append(ops.pack_dense(torch.randn(7, K)))
    blob = ops.pack_concat(parts)
    x = torch.randn(6, K)
    assert ops.shape(blob) == (K, 121)
    assert torch.equal(ops.linear(x, blob), torch.cat([ops.linear(x, p) for p in parts], 1))
    assert torch.equal(blob, REFERENCES["pack_concat"](parts))
    shared = ops.pack_concat([parts[0], parts[0]])
    assert len(shared) < 2 * len(parts[0]), "equal permutations are stored once"


def test_bias_and_residual():
    blob = ops.pack_exl2(*exl2(128, 64, [(4, 128)]), out_features=51)
    x, bias, residual = torch.randn(3, 128), torch.randn(51), torch.randn(3, 51)
    out = residual.clone()
    ops.linear_residual(out, x, blob, bias)
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
    x = torch.randn(16, K, generator=torch.Generator().manual_seed(bits))
    x[:, ::97] *= outlier
    exact = x.double() @ weight.double()
    ours, half = ops.linear(x, blob) - exact, (x.half() @ weight.half()).double() - exact
    assert ours.norm() <= 2 * half.norm()
    assert ours.abs().max() <= 2 * half.abs().max()


def test_values_that_are_not_numbers_show():
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


def test_no_rows():
    blob = ops.pack_exl2(*exl2(64, 32, [(4, 64)]))
    assert ops.linear(torch.zeros(0, 64), blob).shape == (0, 32)


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
def test_wrong_arguments_are_named(x, bias, message):
    blob = ops.pack_exl2(*exl2(64, 32, [(4, 64)]))
    with pytest.raises(RuntimeError, match=message):
        ops.linear(x, blob, bias)
