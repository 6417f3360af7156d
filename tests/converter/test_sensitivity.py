"""What the sweep takes from which rows: Hessians and couplings from the first ones, the price of an error from the others."""

import pytest
import torch

from exl2nb.converter.sensitivity import KeptStreams, Probe, kept_spacing, sweep_layers


@pytest.fixture
def run(weights):
    return lambda ids, used: list(sweep_layers(weights, ids, used=used, seed=0, step=lambda detail: None))


def rows(seed, count):
    return torch.randint(3, 90, (count, 24), generator=torch.Generator().manual_seed(seed))


def same(one, other, names):
    return [name for name in names if all(torch.equal(a, getattr(other, name)[key]) for key, a in getattr(one, name).items())]


def test_no_row_counts_twice(run):
    hessians, sensitivity = rows(1, 6), rows(2, 2)
    rounding, price = ["hessians", "token_weights", "couplings"], ["gradients"]
    first = run(torch.cat([hessians, sensitivity]), 6)
    assert [found.layer for found in first] == [-1, 2, 1, 0]
    for one, other in zip(first, run(torch.cat([hessians, rows(3, 2)]), 6), strict=True):
        assert same(one, other, rounding) == rounding
        assert same(one, other, price) == []
    for one, other in zip(first, run(torch.cat([rows(4, 6), sensitivity]), 6), strict=True):
        assert same(one, other, price) == price
        assert "hessians" not in same(one, other, rounding)
    tokens = {len(weight) for found in first for weight in found.token_weights.values()}
    assert tokens == {6 * 24}


def test_one_kind_of_rows_serves_for_both(run):
    for found in run(rows(1, 3), 3)[1:]:
        for key, coupling in found.couplings.items():
            torch.testing.assert_close(coupling.diagonal(dim1=1, dim2=2).flatten().double(), found.gradients[key], rtol=1e-4, atol=1e-12)


def test_changes_have_the_curvature_of_the_kl():
    p = torch.tensor([0.9, 0.06, 0.03, 0.01, 0.0])
    v = Probe(5, torch.Generator().manual_seed(1), p.device)(p.expand(200_000, 5)).double()
    wanted = (p.diag() - p[:, None] * p).double()
    torch.testing.assert_close(v.T @ v / len(v), wanted, rtol=0.05, atol=2e-3)
    assert float(v.sum(1).abs().max()) < 1e-6
    again = Probe(5, torch.Generator().manual_seed(1), p.device)(p.expand(200_000, 5)).double()
    assert torch.equal(v, again)


@pytest.mark.parametrize(
    ("layers", "room", "every"), [(32, 32, 1), (32, 20, 2), (32, 18, 2), (32, 12, 4), (32, 3, 5), (2, 1, 1), (1, 0, 1)]
)
def test_as_many_streams_are_kept_as_fit(layers, room, every):
    assert kept_spacing(10, layers, 10 * room) == every


def test_kept_streams_come_back():
    kept, x = KeptStreams(torch.device("cpu"), torch.device("cpu")), torch.randn(3)
    kept.put(4, x)
    assert 4 in kept and 3 not in kept
    assert torch.equal(kept.get(4), x) and torch.equal(kept.take(4), x)
    assert 4 not in kept
