"""Quantisation of one matrix: against rounding to nearest, its reported loss, coupled outputs."""

import pytest
import torch

from exl2nb.converter import hessian, rounding
from exl2nb.converter.hessian import couple_outputs, coupled_block, factorize
from exl2nb.core.errors import ConversionError
from exl2nb.quant.exl2 import encode

LAYOUTS = {
    "one width": [(4, 32), (4, 32), (4, 32)],
    "mixed, short last group": [(8, 32), (5, 32), (3, 32)],
    "2 bits in one group": [(2, 96)],
    "6 and 2": [(6, 32), (2, 64)],
}


def problem(k=96, n=40, tokens=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * 0.05 * torch.rand(n, 1, generator=generator).exp()
    x = torch.randn(tokens, k, generator=generator) @ torch.randn(k, k, generator=generator) * torch.rand(k, generator=generator).square()
    return weight, (x.T @ x).double() / tokens


def loss_of(weight, what, hessian):
    error = weight.double() - what.double()
    return ((error @ hessian) * error).sum()


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_loss_is_the_quadratic_form_of_what_is_stored(groups):
    weight, hessian = problem()
    damping = 0.03 * hessian.diagonal().mean() * torch.eye(96, dtype=torch.float64)
    packed, loss = rounding.quantize_matrix(weight, factorize(hessian), groups)
    what = rounding.dense_weight(packed, 40)
    assert packed.groups == groups
    torch.testing.assert_close(loss, float(loss_of(weight, what, hessian + damping)), rtol=2e-3, atol=0)


@pytest.mark.parametrize("at_once", [1, 7 * 96, 1 << 26])
def test_targets_are_shifted_by_what_the_inputs_lack(monkeypatch, at_once):
    weight, h = problem()
    cross, damping = torch.randn(96, 96, generator=torch.Generator().manual_seed(3)).double(), 0.03 * h.diagonal().mean()
    monkeypatch.setattr(hessian, "AT_ONCE", at_once)
    factor = factorize(h)
    assert torch.equal(factor.stored(weight), weight.T[factor.perm])
    shift = torch.linalg.solve(h + damping * torch.eye(96, dtype=torch.float64), cross @ weight.T.double())
    wanted = (weight.T + 0.4 * shift.float())[factor.perm]
    torch.testing.assert_close(factor.stored(weight, cross, 0.4), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_better_than_rounding_to_nearest(bits):
    weight, hessian = problem()
    packed, _ = rounding.quantize_matrix(weight, factorize(hessian), [(bits, 32)] * 3)
    steps = packed.steps().float()[torch.arange(3).repeat_interleave(32)]
    half = 1 << (bits - 1)
    stored = weight.T[packed.perm]
    nearest = torch.empty_like(stored)
    nearest[packed.perm] = (stored / steps[:, :40]).round().clamp(-half, half - 1) * steps[:, :40]
    assert loss_of(weight, rounding.dense_weight(packed, 40), hessian) < 0.7 * loss_of(weight, nearest.T, hessian)


def test_every_scale_beats_the_neighbouring_ones():
    """Local optimality of the scale search where nothing is compensated: a diagonal Hessian."""
    weight, _ = problem(k=32)
    factor = factorize(torch.eye(32, dtype=torch.float64), damping=1e-9)
    packed, _ = rounding.quantize_matrix(weight, factor, [(3, 32)])
    index, unit = packed.scale_index()[0, :40].float(), (packed.q_scale_max.float() / 256).half().float()

    def loss(code):
        step = ((code + 1).square() * unit).half().float()
        return (((weight.T / step).clamp(-4, 3).round() * step - weight.T).square()).sum(0)

    chosen = loss(index)
    assert (chosen <= loss((index - 1).clamp_min(0)) + 1e-9).all()
    assert (chosen <= loss((index + 1).clamp_max(15)) + 1e-9).all()


def test_columns_without_weights_cost_nothing():
    weight, hessian = problem()
    weight[5], weight[7] = 0, 1e-9
    packed, loss = rounding.quantize_matrix(weight, factorize(hessian), [(4, 96)])
    assert torch.isfinite(torch.tensor(loss))
    assert not rounding.dense_weight(packed, 40)[5].any()
    nothing, _ = rounding.quantize_matrix(torch.zeros_like(weight), factorize(hessian), [(4, 96)])
    assert not rounding.dense_weight(nothing, 40).any()


def test_equal_columns_get_equal_codes_in_every_lane():
    """17 columns: whole vectors of every instruction set and a rest."""
    weight, hessian = problem()
    made = rounding.run_rounding(weight[:1].repeat(17, 1), factorize(hessian), [(3, 32), (2, 64)], torch.tensor([1.0] + [0.0] * 16))
    assert torch.equal(made.codes, made.codes[:, :1].expand(-1, 17))


def test_singular_hessians_factor():
    hessian = torch.zeros(64, 64, dtype=torch.float64)
    hessian[:8, :8] = torch.ones(8, 8)
    factor = factorize(hessian)
    assert torch.isfinite(factor.upper).all()
    assert set(factor.perm[:8].tolist()) == set(range(8))
    assert factorize(torch.zeros(32, 32, dtype=torch.float64)).upper.diagonal().min() > 0
    one = torch.ones(64, 64, dtype=torch.float64)
    for hessian in (one * 1e-30, -1e-3 * torch.eye(32, dtype=torch.float64) + one[:32, :32]):
        assert torch.isfinite(factorize(hessian).upper).all()
    with pytest.raises(ConversionError, match="layer 3.*NaN or infinity"):
        factorize(one * float("nan"), name="layer 3, input of q")


def coupled_problem(k, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * 0.05
    x = torch.randn(4 * k, k, generator=generator) @ torch.randn(k, k, generator=generator)
    g = torch.randn(4 * n, n, generator=generator) @ torch.randn(n, n, generator=generator)
    return weight, (x.T @ x).double() / len(x), (g.T @ g).double() / len(g)


def test_loss_is_the_trace_and_less_than_without():
    weight, h, g = coupled_problem(128, 64)
    factor, coupling = factorize(h, damping=1e-6), couple_outputs(g[None], damping=1e-6)
    groups = [(3, 64), (2, 64)]
    traces = []
    for c in (None, coupling):
        made = rounding.run_rounding(weight, factor, groups, coupling=c)
        packed = encode(made.codes.contiguous(), made.scale_index.contiguous(), made.scale_max, groups, factor.perm)
        d = (weight - rounding.dense_weight(packed, 64)).double()
        traces.append(float(((g @ d @ h) * d).sum()))
        if c is not None:
            assert float(made.loss.double().sum()) == pytest.approx(traces[-1], rel=1e-2)
    assert traces[1] < 0.95 * traces[0]


def test_blocks():
    assert [coupled_block(n) for n in (64, 1024, 4096, 1376, 11008)] == [64, 1024, 256, 32, 256]
    assert couple_outputs(torch.zeros(1, 32, 32)) is None  # outputs that matter to nobody
    assert couple_outputs(torch.eye(24)[None]) is None  # not whole lanes
    assert torch.equal(couple_outputs(torch.eye(32)[None]).factor, torch.zeros(1, 32, 32))
