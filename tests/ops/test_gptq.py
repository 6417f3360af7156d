"""The ops of GPTQ: the kernels against their reference, block by block, options side by side; the same on a GPU."""

import functools

import pytest
import torch

from exl2nb.converter.hessian import couple_outputs, factorize
from exl2nb.ops import gptq as gptq_blocks
from exl2nb.ops import gptq_losses, gptq_quantize
from exl2nb.ops._library import REFERENCE_OPS
from exl2nb.ops.gptq import common_blocks, quantize_in_blocks

LAYOUTS = {
    "groups of 32": [(4, 32)] * 5,
    "one short block": [(3, 64)],
    "mixed widths and sizes": [(8, 32), (6, 96), (5, 32), (4, 128), (3, 32), (2, 64)],
    "odd sizes": [(5, 7), (4, 150), (3, 19), (2, 1)],
    "one long group": [(2, 300)],
}


def problem(k, n, *, coupled=0, seed=0, device="cpu"):
    """Arguments of gptq_quantize but for the groups; coupled: columns per block of coupling."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(k, n, generator=generator) * 0.05 * torch.rand(n, generator=generator).exp()
    x = torch.randn(3 * k, k, generator=generator) @ torch.randn(k, k, generator=generator) * torch.rand(k, generator=generator).square()
    factor = factorize((x.T @ x).double() / len(x))
    stored, rest = weight[factor.perm].contiguous(), ()
    columns = torch.rand(n, generator=generator) + 0.5
    if coupled:
        g = torch.randn(2 * n, n, generator=generator) @ torch.randn(n, n, generator=generator)
        products = (g.T @ g).double() / len(g)
        coupling = couple_outputs(torch.stack([products[i : i + coupled, i : i + coupled] for i in range(0, n, coupled)]))
        stored, columns, rest = stored[:, coupling.perm].contiguous(), coupling.spread.square(), (coupling.factor, coupling.spread)
    return [part.to(device) for part in (stored, factor.upper, columns)], [part.to(device) for part in rest]


@functools.cache
def reference(layout, coupled):
    """Arguments for 48 columns, and what the reference makes of them; seconds, so each is made once."""
    table = LAYOUTS[layout]
    arguments, rest = problem(sum(rows for _, rows in table), 48, coupled=coupled)
    return arguments, rest, REFERENCE_OPS["gptq_quantize"](*arguments, flat(table), *rest)


def flat(table):
    return torch.tensor([value for pair in table for value in pair], dtype=torch.int32)


def check_alike(made, wanted, *, columns, tokens=0.02):
    """Sums run in another order, so a tie may fall the other way and pull the rest of its column along, or of its coupled columns."""
    made = [part.cpu() for part in made]
    same = (made[0] == wanted[0]).all(0) & (made[1] == wanted[1]).all(0)
    assert same.float().mean() >= columns
    assert (made[2] == wanted[2]).float().mean() >= (0.75 if columns else 0.25)
    torch.testing.assert_close(made[3].sum(), wanted[3].sum(), rtol=tokens, atol=0)


def test_blocks_end_where_every_option_has_an_end():
    cut = list(common_blocks([[(4, 32)] * 10, [(4, 128), (3, 128), (2, 64)]]))
    assert [(first, end) for first, end, _ in cut] == [(0, 128), (128, 256), (256, 320)]
    assert cut[0][2].tolist() == [[[4, 32]] * 4, [[4, 128], [0, 0], [0, 0], [0, 0]]]
    assert cut[2][2].tolist() == [[[4, 32]] * 2, [[2, 64], [0, 0]]]
    assert [(first, end) for first, end, _ in common_blocks([[(4, 96)] * 2, [(4, 64)] * 3])] == [(0, 192)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("coupled", [0, 16, 48])
def test_the_cpu_kernel_is_the_reference(layout, coupled):
    arguments, rest, wanted = reference(layout, coupled)
    made = gptq_quantize(*arguments, flat(LAYOUTS[layout]), *rest)
    assert (made.codes != wanted[0]).float().mean() < 0.02
    check_alike(made, wanted, columns=0.9 if not coupled else 0.5, tokens=0.01 if not coupled else 0.02)
    if not coupled:
        same = (made.codes == wanted[0]).all(0) & (made.scale_index == wanted[1]).all(0)
        assert torch.equal(made.scale_max, wanted[2])
        torch.testing.assert_close(made.loss[:, same], wanted[3][:, same], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("coupled", [0, 16])
@pytest.mark.parametrize("span", [1, 200, 512])
def test_block_by_block_is_row_by_row(monkeypatch, layout, coupled, span):
    monkeypatch.setattr(gptq_blocks, "SPAN_ROWS", span)
    monkeypatch.setattr(gptq_blocks, "BLOCK_ROWS", 64)
    arguments, rest, wanted = reference(layout, coupled)
    made = quantize_in_blocks(*arguments, flat(LAYOUTS[layout]), *rest)
    check_alike(made, wanted, columns=0.8)


def test_losses_are_those_of_quantising():
    tables = [[(4, 32)] * 6, [(2, 128), (2, 64)], [(8, 192)]]
    arguments, _ = problem(192, 40)
    for table, loss in zip(tables, gptq_losses(*arguments, tables)):
        assert torch.equal(loss, gptq_quantize(*arguments, flat(table)).loss)


def test_wrong_tables_are_named():
    arguments, _ = problem(64, 16)
    for run in (quantize_in_blocks, gptq_quantize):
        with pytest.raises((RuntimeError, ValueError), match="rows of all groups"):
            run(*arguments, flat([(4, 32)]))
    with pytest.raises(ValueError, match="counts"):
        torch.ops.exl2nb.gptq_losses(*arguments, flat([(4, 64)]), [2])


@pytest.mark.gpu
@pytest.mark.parametrize("table", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(("n", "coupled"), [(40, 0), (33, 0), (320, 0), (48, 16), (96, 48), (512, 256), (768, 768), (1024, 1024)])
def test_kernels_are_the_reference(table, n, coupled):
    k = sum(rows for _, rows in table)
    arguments, rest = problem(k, n, coupled=coupled)
    wanted = gptq_quantize(*arguments, flat(table), *rest)  # the kernel of the CPU; its reference takes minutes here
    made = gptq_quantize(*(part.cuda() for part in arguments), flat(table), *(part.cuda() for part in rest))
    check_alike(made, wanted, columns=0.0 if coupled > 100 else 0.5 if coupled else 0.8)
    again = gptq_quantize(*(part.cuda() for part in arguments), flat(table), *(part.cuda() for part in rest))
    assert all(torch.equal(a, b) for a, b in zip(made, again))


@pytest.mark.gpu
def test_options_side_by_side_on_the_gpu():
    tables = [[(bits, size)] * (384 // size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 128)] * 2
    arguments, _ = problem(384, 200, device="cuda")
    for table, loss in zip(tables, gptq_losses(*arguments, tables)):
        assert torch.equal(loss, gptq_quantize(*arguments, flat(table)).loss)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [32, 40])
def test_nothing_to_quantise_on_the_gpu(n):
    """Zero columns, zero matrices and channels without activity."""
    hessian = torch.zeros(64, 64, dtype=torch.float64, device="cuda")
    hessian[:8, :8] = 1.0
    factor, weight = factorize(hessian), torch.randn(64, n, device="cuda")
    weight[:, 3] = 0
    made = gptq_quantize(weight, factor.upper, torch.ones(n, device="cuda"), flat([(4, 64)]))
    assert torch.isfinite(made.loss).all()
    assert (made.codes[:, 3] == 8).all()
    nothing = gptq_quantize(torch.zeros_like(weight), factor.upper, torch.ones(n, device="cuda"), flat([(4, 64)]))
    assert (nothing.codes == 8).all()


@pytest.mark.gpu
def test_wrong_arguments_are_named_on_the_gpu():
    arguments, _ = problem(64, 32, device="cuda")
    with pytest.raises((RuntimeError, ValueError), match="factor"):
        gptq_quantize(arguments[0], arguments[1][:32], arguments[2], flat([(4, 64)]))
    with pytest.raises((RuntimeError, ValueError), match="rows of all groups"):
        gptq_quantize(*arguments, flat([(4, 32)]))
    with pytest.raises(RuntimeError, match="blocks of"):
        gptq_quantize(*arguments, flat([(4, 64)]), torch.zeros(4, 8, 8, device="cuda"), torch.ones(32, device="cuda"))
