"""Adapters in a step: the engine against adapters merged into the weights; the bits of a row whatever is beside it; blends."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops._library import REFERENCE_OPS
from exl2nb.ops.lora_table import LoraChange, LoraPart, LoraStrips, LoraTable, blend_adapters

from .cases import Net, prompts, same_bits

COUNTS = [5, 1, 4, 1, 3, 1]  # 15 tokens: a fused step of several sequences


def adapter(program, seed, *, rank=5, gain=False, norms=False):
    """Random changes of every op; q and v have parts of their own."""
    g = torch.Generator().manual_seed(seed)

    def part(inputs, columns, first=0):
        a, b = torch.randn(inputs, rank, generator=g), torch.randn(rank, columns, generator=g)
        return LoraPart.of(0.3 * a, 0.3 * b, 0.5 + torch.rand(rank, generator=g), first)

    found = {}
    for number, op in enumerate(program.steps):
        if isinstance(op, ops.EmbedOp):
            found[number] = LoraChange(parts=(part(op.vocab, op.width),))
            continue
        if isinstance(op, ops.AttentionOp):
            continue
        K, N = ops.shape(op.blob)
        parts = (part(K, N // 2), part(K, 19, N - 19)) if isinstance(op, ops.QkvOp) else (part(K, N),)
        norm = op.norm
        found[number] = LoraChange(
            parts=parts,
            gain=0.2 * torch.randn(N, generator=g) if gain else None,
            bias=0.2 * torch.randn(N, generator=g) if gain else None,
            norm=norm * (1 + 0.2 * torch.randn(len(norm), generator=g)) if norms and norm is not None else None,
        )
    return found


def run(net, batch, table, adapters, pools=None):
    adapters = torch.tensor(adapters, dtype=torch.int32)
    return net.program.run(*batch, *(pools or net.pools()), table.words, adapters)


def by_tokens(of_sequences, counts=COUNTS):
    return [a for a, n in zip(of_sequences, counts) for _ in range(n)]


@pytest.mark.parametrize(
    "options", [{"dense": True}, {"dense": True, "bias": True, "head_norms": True}, {"bits": 6, "bias": True}], ids=str
)
@pytest.mark.parametrize("extra", [{}, {"gain": True}, {"gain": True, "norms": True}], ids=str)
def test_equals_merged_weights(options, extra):
    """Two adapters and none in one batch, beside the reference that merges them into fp32 weights."""
    net = Net(pages=len(COUNTS), storages=("fp32", "fp32"), **options)
    table = LoraTable(net.program, (adapter(net.program, 1, **extra), adapter(net.program, 2, rank=8, **extra)))
    adapters = torch.tensor(by_tokens([0, 1, -1, 1, 0, -1]), dtype=torch.int32)
    batch, pools, others = prompts(net, COUNTS), net.pools(), net.pools()
    ours = net.program.run(*batch, *pools, table.words, adapters)
    plain = net.program.run(*batch, *net.pools())
    expected = REFERENCE_OPS["decode_step"](net.program.code, *batch, *others, table.words, adapters)
    tolerance = 1e-4 if options.get("dense") else 4e-3  # coded weights multiply 16-bit activations
    assert (ours - expected).abs().max() < tolerance * expected.std()
    changed = (ours - plain).abs().amax(1)
    assert bool((changed[adapters[batch[-1].long()] >= 0] > 0.1 * plain.std()).all()), "an adapter changes its rows"
    assert bool((changed[adapters[batch[-1].long()] < 0] == 0).all()), "and no others"


@pytest.mark.parametrize("dense", [False, True])
def test_same_bits_alone_and_together(dense, threads):
    net = Net(pages=len(COUNTS), dense=dense)
    table = LoraTable(net.program, tuple(adapter(net.program, seed, rank=3 + seed, gain=seed == 1, norms=True) for seed in range(3)))
    of, found = [0, 2, -1, 1, 1, 0], []
    for n in (1, 2, 3):
        threads(n)
        found.append(run(net, prompts(net, COUNTS), table, by_tokens(of)))
        assert torch.equal(found[-1], found[0])
    for i, n in enumerate(COUNTS):  # alone, and with other neighbours
        rows = [sum(COUNTS[: i + 1]) - 1]
        again = run(net, prompts(net, COUNTS, rows), table, by_tokens([a if j == i else (a + 2) % 4 - 1 for j, a in enumerate(of)]))
        all_rows = prompts(net, COUNTS)[-1].tolist()
        if rows[0] in all_rows:
            assert torch.equal(again[0], found[0][all_rows.index(rows[0])]), (i, n)


def test_no_adapter_is_no_change():
    net = Net(pages=len(COUNTS))
    table = LoraTable(net.program, (None, adapter(net.program, 1)))
    plain, pools = net.pools(), net.pools()
    expected = net.program.run(*prompts(net, COUNTS), *plain)
    assert torch.equal(run(net, prompts(net, COUNTS), table, by_tokens([0, -1, 0, -1, 0, 0]), pools), expected)
    assert same_bits(plain[0] + plain[1], pools[0] + pools[1])


def test_a_blend_is_the_weighted_sum():
    net = Net(dense=True, pages=len(COUNTS))
    one, other = adapter(net.program, 1, gain=True, norms=True), adapter(net.program, 2)
    table = LoraTable(
        net.program,
        (
            one,
            blend_adapters([(one, 1.0)], net.program),
            blend_adapters([(one, 0.0), (other, 0.0)], net.program),
            blend_adapters([(one, 0.5), (one, 0.5)], net.program),
        ),
    )
    of = {row: run(net, prompts(net, COUNTS), table, [row] * sum(COUNTS)) for row in (-1, 0, 1, 2, 3)}
    assert torch.equal(of[0], of[1])
    torch.testing.assert_close(of[2], of[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of[3], of[0], rtol=1e-3, atol=1e-3)


def test_steps_that_draw_take_adapters(threads):
    """Run to its end and run ahead: the logits of the plain step."""
    threads(2)
    net = Net(pages=4)
    table = LoraTable(net.program, (adapter(net.program, 1),))
    batch, adapters = prompts(net, [1, 1, 1, 1]), torch.tensor([0, -1, 0, 0], dtype=torch.int32)
    expected = net.program.run(*batch, *net.pools(), table.words, adapters)
    settings = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.5]] * 4, dtype=torch.float64)
    pools = net.pools()
    drawn, logits = ops.step_draw(net.program.code, *batch, *pools, settings, 0, table.words, adapters)
    assert torch.equal(logits, expected) and drawn[:, 0].tolist() == expected.argmax(1).tolist()
    pools = net.pools()
    drawn, logits = ops.draw_ahead(net.program.code, *batch, *pools, settings, 0, None, None, table.words, adapters)
    adapters.fill_(-1)  # may change as soon as it returns
    ops.join_ahead(drawn)
    assert torch.equal(logits, expected) and drawn[:, 0].tolist() == expected.argmax(1).tolist()


def test_what_does_not_fit_is_refused():
    net, other = Net(), Net(layers=1)
    table = LoraTable(net.program, (adapter(net.program, 1),))
    batch = prompts(net, [2])
    for words, adapters in ((table.words, [0, 1]), (table.words, [-2, 0]), (table.words[:-1], [0, 0]), (table.words, [0])):
        with pytest.raises((RuntimeError, ValueError), match="adapter|lora"):
            net.program.run(*batch, *net.pools(), words, torch.tensor(adapters, dtype=torch.int32))
    with pytest.raises((RuntimeError, ValueError), match="lora"):
        other.program.run(*batch, *other.pools(), table.words, torch.tensor([0, 0], dtype=torch.int32))
    with pytest.raises((RuntimeError, ValueError), match="together|both"):
        net.program.run(*batch, *net.pools(), table.words)
    good = next(change for change in adapter(net.program, 1).values() if change.parts).parts[0]
    for wrong in (
        LoraPart(a=good.a[:-1].contiguous(), b=good.b, scale=good.scale),
        LoraPart(a=good.a, b=good.b, scale=good.scale[:-1].contiguous()),
        LoraPart(a=good.a, b=good.b, scale=good.scale, first=1),
        LoraPart(a=good.a.float(), b=good.b, scale=good.scale),
    ):
        with pytest.raises(ValueError, match="LoraTable"):
            LoraTable(net.program, ({0: LoraChange(parts=(wrong,))},))


def test_which_tables_products_take():
    """Those that change matrices of layers alone, by parts in columns of eights."""
    program = Net(layers=1, scale=0.1).program
    qkv = next(number for number, op in enumerate(program.steps) if isinstance(op, ops.QkvOp))
    K, N = ops.shape(program.steps[qkv].blob)

    def fits(rank=4, columns=N, first=0, parts=1, op=qkv, **more):
        part = LoraPart.of(torch.ones(K, rank), torch.ones(rank, columns), torch.ones(rank), first)
        return LoraTable(program, (None, {op: LoraChange(parts=(part,) * parts, **more)})).fits_inside

    assert fits()
    assert fits(columns=8, first=16, parts=6)
    assert fits(rank=256)
    assert not fits(rank=257)
    assert not fits(parts=7)
    assert not fits(columns=9)
    assert not fits(columns=8, first=4)
    assert not fits(gain=torch.ones(N))
    assert not fits(norm=torch.ones(K))
    part = LoraPart.of(torch.ones(101, 4), torch.ones(4, K), torch.ones(4))
    assert not LoraTable(program, ({0: LoraChange(parts=(part,))},)).fits_inside


def matrix_of(fragments):
    """`(..., 16, 16)` from A fragments of m16n8k16, as the PTX manual lists them."""
    lane, i = torch.arange(32)[:, None], torch.arange(8)
    rows, columns = lane // 4 + 8 * (i // 2 % 2), 2 * (lane % 4) + i % 2 + 8 * (i // 4)
    found = torch.zeros(*fragments.shape[:-2], 16, 16, dtype=fragments.dtype)
    found[..., rows, columns] = fragments
    return found


@pytest.mark.parametrize("rank", [16, 21])
@pytest.mark.parametrize(("first", "columns"), [(24, 40), (0, 114), (64, 50)])
def test_strips_hold_the_part(first, columns, rank):
    """Ranks, stored rows and columns where the stream-K GEMM looks for them; zeros where there are none."""
    K, parts = 72, [(0, 40), (40, 24), (64, 50)]
    g = torch.Generator().manual_seed(rank)
    part = LoraPart.of(torch.randn(K, rank, generator=g), torch.randn(rank, columns, generator=g), torch.ones(rank), first)
    rows = torch.randperm(K + 8, generator=g).clamp(max=K)  # eight rows of padding
    strips, width = LoraStrips.of(part, rows, parts), part.a.shape[1]
    a = matrix_of(strips.a).permute(1, 3, 0, 2).reshape(-1, width)
    padded = torch.cat([part.a, torch.zeros(1, width)])
    assert torch.equal(a, padded[rows].half())
    b = matrix_of(strips.b).permute(0, 3, 1, 2).reshape(width, -1)
    places = torch.cat([torch.arange(begin, begin + count) for begin, count in parts])  # of columns in strips
    at = torch.cat([torch.arange(count) + start for (_, count), start in zip(parts, (0, 48, 80))])
    want = torch.zeros(width, 144, dtype=torch.float16)
    inside = (places >= first) & (places < first + columns)
    want[:rank, at[inside]] = part.b
    assert torch.equal(b, want[:, 16 * strips.first : 16 * strips.first + b.shape[1]])
    assert b.count_nonzero() == want.count_nonzero()
    last = strips.words(part)[-1]
    assert last[3] == strips.first | b.shape[1] // 16 << 16 | (rank - 16 * (width // 16 - 1)) << 32
    assert last[4:] == [part.a[:, width - 16 :].data_ptr(), part.a.stride(0)]
