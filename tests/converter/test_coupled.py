"""Rounding with coupled outputs: the kernel against the reference, bits and loss, and that it does what it is for."""

import pytest
import torch

from exl2nb.converter import gptq
from exl2nb.converter.hessian import block_of, couple, factorize
from exl2nb.ops.gptq import _gptq_quantize, gptq_quantize
from exl2nb.quant.exl2 import encode


def problem(k, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * 0.05
    x = torch.randn(4 * k, k, generator=generator) @ torch.randn(k, k, generator=generator)
    g = torch.randn(4 * n, n, generator=generator) @ torch.randn(n, n, generator=generator)
    return weight, (x.T @ x).double() / len(x), (g.T @ g).double() / len(g)


@pytest.mark.parametrize(("k", "n", "block"), [(64, 48, 48), (96, 64, 32), (32, 16, 16)])
def test_kernel_is_the_reference(k, n, block):
    weight, h, g = problem(k, n)
    products = torch.stack([g[i : i + block, i : i + block] for i in range(0, n, block)])
    factor, coupling = factorize(h), couple(products)
    groups = torch.tensor([v for b, r in ((4, 32), (3, k - 32)) if r for v in (b, r)], dtype=torch.int32)
    stored = weight.T[factor.perm][:, coupling.perm].contiguous()
    arguments = (stored, factor.upper, coupling.spread.square(), groups, coupling.factor, coupling.spread)
    made, wanted = gptq_quantize(*arguments), _gptq_quantize(*arguments)
    # a value on the edge between two codes may fall either way (the order of a sum differs), and then everything after it moves
    assert (made.codes != wanted[0]).float().mean() < 0.02
    torch.testing.assert_close(made.loss.sum(), wanted[3].sum(), rtol=0.02, atol=0)


def test_loss_is_the_trace_and_less_than_without():
    weight, h, g = problem(128, 64)
    factor, coupling = factorize(h, damping=1e-6), couple(g[None], damping=1e-6)
    groups = [(3, 64), (2, 64)]
    traces = []
    for c in (None, coupling):
        made = gptq.run(weight, factor, groups, coupling=c)
        packed = encode(made.codes.contiguous(), made.scale_index.contiguous(), made.scale_max, groups, factor.perm)
        d = (weight - gptq.dense(packed, 64)).double()
        traces.append(float(((g @ d @ h) * d).sum()))
        if c is not None:
            assert float(made.loss.double().sum()) == pytest.approx(traces[-1], rel=1e-2)
    assert traces[1] < 0.95 * traces[0]


def test_blocks():
    assert [block_of(n) for n in (64, 1024, 4096, 1376, 11008)] == [64, 1024, 256, 32, 256]
    assert couple(torch.zeros(1, 32, 32)) is None  # outputs that matter to nobody
    assert couple(torch.eye(24)[None]) is None  # not whole lanes
    assert torch.equal(couple(torch.eye(32)[None]).factor, torch.zeros(1, 32, 32))
