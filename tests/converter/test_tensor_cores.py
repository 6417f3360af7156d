"""Large linears on tensor cores: what is sent there, what comes back, and its gradient."""

import pytest
import torch
import torch.nn.functional as F

from exl2nb.converter import tensor_cores
from exl2nb.converter.sensitivity import _Kept, _spacing


def test_large_linears_go_there_and_their_gradients(monkeypatch):
    seen = []
    monkeypatch.setattr(tensor_cores, "pays", lambda x, multiplications: multiplications >= 1000)
    monkeypatch.setattr(tensor_cores, "product", lambda x, y: seen.append((x.shape, y.shape)) or x @ y)
    x, weight, bias = torch.randn(2, 5, 8, requires_grad=True), torch.randn(13, 8), torch.randn(13)
    plain = F.linear(x, weight, bias)
    with tensor_cores._Mode():
        small = F.linear(x[:1, :1], weight)
        made = F.linear(x, weight, bias)
    assert seen == [((10, 8), (8, 13))]
    torch.testing.assert_close(made, plain)
    torch.testing.assert_close(small, plain[:1, :1] - bias)
    upper = torch.randn_like(plain)
    torch.testing.assert_close(torch.autograd.grad(made, x, upper), torch.autograd.grad(plain, x, upper))
    assert len(seen) == 2


def test_nothing_happens_on_a_cpu():
    with tensor_cores.used_by(torch.device("cpu"), 8192):
        assert torch.equal(F.linear(torch.ones(2, 2), torch.ones(2, 2)), torch.full((2, 2), 2.0))


@pytest.mark.parametrize(
    ("layers", "room", "every"), [(32, 32, 1), (32, 20, 2), (32, 18, 2), (32, 12, 4), (32, 3, 5), (2, 1, 1), (1, 0, 1)]
)
def test_as_many_streams_are_kept_as_fit(layers, room, every):
    assert _spacing(10, layers, 10 * room) == every


def test_kept_streams_come_back():
    kept, x = _Kept(torch.device("cpu"), torch.device("cpu")), torch.randn(3)
    kept.put(4, x)
    assert 4 in kept and 3 not in kept
    assert torch.equal(kept.get(4), x) and torch.equal(kept.take(4), x)
    assert 4 not in kept
