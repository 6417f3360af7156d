"""f32 products of two bf16 pieces: what they hold, in pieces of bounded size, subtracted in place."""

import pytest
import torch

from exl2nb.ops import split_product


@pytest.fixture
def pieces(monkeypatch):
    """On the CPU too: sizes of the factors that were split, each of which is its own high piece."""
    sizes, mm = [], torch.mm

    def split(x):
        sizes.append(x.numel())
        return x, torch.zeros_like(x)

    monkeypatch.setattr(split_product, "split", split)
    monkeypatch.setattr(torch, "mm", lambda x, y, out_dtype: mm(x, y))  # the CPU has none with an out_dtype
    return sizes


def test_the_pieces_hold_16_bits():
    x = torch.randn(1000) * torch.logspace(-30, 30, 1000)
    high, low = split_product.split(x)
    assert ((high.float() + low.float() - x).abs() <= x.abs() * 2.0**-16).all()


@pytest.mark.parametrize(("m", "k", "n"), [(300, 4, 700), (300, 4, 100), (10, 4, 700), (10, 4, 10), (1, 2000, 3)])
def test_large_factors_are_split_in_pieces(monkeypatch, pieces, m, k, n):
    monkeypatch.setattr(split_product, "PIECE", 1024)
    x, y = torch.randn(m, k, dtype=torch.float64), torch.randn(n, k, dtype=torch.float64).T
    torch.testing.assert_close(split_product.product(x, y), x @ y)
    assert max(pieces) <= max(1024, 256 * k) and len(pieces) >= 2


@pytest.mark.parametrize("columns", [100, 256, 700])
def test_subtracted_some_columns_at_a_time(monkeypatch, pieces, columns):
    monkeypatch.setattr(split_product, "pays", lambda x, multiplications: True)
    monkeypatch.setattr(split_product, "RESULT", 256 * 30)
    w, x, y = (torch.randn(shape, dtype=torch.float64) for shape in ((30, columns), (4, 30), (4, columns)))
    wanted = w - x.T @ y
    split_product.subtract(w, x.T, y)
    torch.testing.assert_close(w, wanted)
    assert max(pieces) <= max(4 * 30, 4 * 256)


def test_a_cpu_does_without():
    w, x, y = torch.ones(2, 3), torch.ones(2, 4), torch.ones(4, 3)
    assert not split_product.pays(x, 1 << 40)
    split_product.subtract(w, x, y)
    assert torch.equal(w, torch.full((2, 3), -3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 1024, 4096), (300, 2000, 9000)])
def test_products_are_nearly_those_of_f32(shape):
    m, k, n = shape
    x = torch.randn(m, k, device="cuda") * torch.logspace(-3, 3, k, device="cuda")
    y = torch.randn(k, n, device="cuda") * torch.logspace(3, -3, k, device="cuda")[:, None]
    assert split_product.pays(x, m * k * n)
    wanted = x.double() @ y.double()
    made, plain = split_product.product(x, y), x @ y
    assert (made - wanted).norm() < 2e-5 * wanted.norm()
    assert (plain - wanted).norm() < 2e-5 * wanted.norm()
    assert torch.equal(made, split_product.product(x, y))
    w = torch.randn(m, n, device="cuda")
    left = (w - made).norm()
    split_product.subtract(w, x, y)
    assert float(w.norm()) == pytest.approx(float(left), rel=1e-5)
