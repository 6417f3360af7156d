"""f32 products of two bf16 pieces: what they hold, in pieces of bounded size, subtracted in place."""

import pytest
import torch
import torch.nn.functional as F

from exl2nb.ops import bf16x3


@pytest.fixture
def pieces(monkeypatch):
    """On the CPU too: sizes of the factors that were split, each of which is its own high piece."""
    sizes, mm = [], torch.mm

    def split(x):
        sizes.append(x.numel())
        return x, torch.zeros_like(x)

    monkeypatch.setattr(bf16x3, "split_bf16", split)
    monkeypatch.setattr(torch, "mm", lambda x, y, out_dtype: mm(x, y))  # the CPU has none with an out_dtype
    return sizes


def test_the_pieces_hold_16_bits():
    x = torch.randn(1000) * torch.logspace(-30, 30, 1000)
    high, low = bf16x3.split_bf16(x)
    assert ((high.float() + low.float() - x).abs() <= x.abs() * 2.0**-16).all()


@pytest.mark.parametrize(("m", "k", "n"), [(300, 4, 700), (300, 4, 100), (10, 4, 700), (10, 4, 10), (1, 2000, 3)])
def test_large_factors_are_split_in_pieces(monkeypatch, pieces, m, k, n):
    monkeypatch.setattr(bf16x3, "SPLIT_NUMBERS", 1024)
    x, y = torch.randn(m, k, dtype=torch.float64), torch.randn(n, k, dtype=torch.float64).T
    torch.testing.assert_close(bf16x3.multiply_split(x, y), x @ y)
    assert max(pieces) <= max(1024, 256 * k) and len(pieces) >= 2


@pytest.mark.parametrize("columns", [100, 256, 700])
def test_subtracted_some_columns_at_a_time(monkeypatch, pieces, columns):
    monkeypatch.setattr(bf16x3, "is_worthwhile", lambda x, multiplications: True)
    monkeypatch.setattr(bf16x3, "RESULT_NUMBERS", 256 * 30)
    w, x, y = (torch.randn(shape, dtype=torch.float64) for shape in ((30, columns), (4, 30), (4, columns)))
    wanted = w - x.T @ y
    bf16x3.subtract_product(w, x.T, y)
    torch.testing.assert_close(w, wanted)
    assert max(pieces) <= max(4 * 30, 4 * 256)


def test_a_cpu_does_without():
    w, x, y = torch.ones(2, 3), torch.ones(2, 4), torch.ones(4, 3)
    assert not bf16x3.is_worthwhile(x, 1 << 40)
    bf16x3.subtract_product(w, x, y)
    assert torch.equal(w, torch.full((2, 3), -3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 1024, 4096), (300, 2000, 9000)])
def test_products_are_nearly_those_of_f32(shape):
    m, k, n = shape
    x = torch.randn(m, k, device="cuda") * torch.logspace(-3, 3, k, device="cuda")
    y = torch.randn(k, n, device="cuda") * torch.logspace(3, -3, k, device="cuda")[:, None]
    assert bf16x3.is_worthwhile(x, m * k * n)
    wanted = x.double() @ y.double()
    made, plain = bf16x3.multiply_split(x, y), x @ y
    assert (made - wanted).norm() < 2e-5 * wanted.norm()
    assert (plain - wanted).norm() < 2e-5 * wanted.norm()
    assert torch.equal(made, bf16x3.multiply_split(x, y))
    w = torch.randn(m, n, device="cuda")
    left = (w - made).norm()
    bf16x3.subtract_product(w, x, y)
    assert float(w.norm()) == pytest.approx(float(left), rel=1e-5)


def test_large_linears_go_there_and_their_gradients(monkeypatch):
    seen = []
    monkeypatch.setattr(bf16x3, "is_worthwhile", lambda x, multiplications: multiplications >= 1000)
    monkeypatch.setattr(bf16x3, "multiply_split", lambda x, y: seen.append((x.shape, y.shape)) or x @ y)
    x, weight, bias = torch.randn(2, 5, 8, requires_grad=True), torch.randn(13, 8), torch.randn(13)
    plain = F.linear(x, weight, bias)
    with bf16x3.LargeLinears():
        small = F.linear(x[:1, :1], weight)
        made = F.linear(x, weight, bias)
    assert seen == [((10, 8), (8, 13))]
    torch.testing.assert_close(made, plain)
    torch.testing.assert_close(small, plain[:1, :1] - bias)
    upper = torch.randn_like(plain)
    torch.testing.assert_close(torch.autograd.grad(made, x, upper), torch.autograd.grad(plain, x, upper))
    assert len(seen) == 2
    weight.requires_grad_(True)
    with bf16x3.LargeLinears():
        made = F.linear(x, weight, bias)
    wanted = torch.autograd.grad(F.linear(x, weight, bias), [x, weight], upper)
    for found, one in zip(torch.autograd.grad(made, [x, weight], upper), wanted):
        torch.testing.assert_close(found, one)
    assert len(seen) == 5, "a weight that learns gets its gradient, too"


def test_nothing_happens_on_a_cpu():
    with bf16x3.bf16x3_linears(torch.device("cpu"), 8192):
        assert torch.equal(F.linear(torch.ones(2, 2), torch.ones(2, 2)), torch.full((2, 2), 2.0))
