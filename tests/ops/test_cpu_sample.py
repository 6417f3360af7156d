"""draw_rows and mask_logits: tokens, ranks, log probabilities and masked logits of the references; errors; rows are independent."""

import itertools
import math

import numpy as np
import pytest
import torch

from exl2nb.ops import draw_rows, mask_logits, reference
from exl2nb.ops._library import REFERENCE_OPS

NEUTRAL = (1.0, 0.0, 1.0, 0.0)
CUTS = [
    NEUTRAL,
    (0.0, 0.0, 1.0, 0.0),
    (0.7, 0.0, 1.0, 0.0),
    (1.0, 1.0, 1.0, 0.0),
    (1.3, 40.0, 1.0, 0.0),
    (1.0, 900.0, 0.8, 0.0),
    (0.9, 0.0, 0.95, 0.0),
    (2.5, 0.0, 0.3, 0.0),
    (1.0, 0.0, 1.0, 0.05),
    (0.8, 50.0, 0.9, 0.02),
    (1.5, 0.0, 0.99, 0.2),
]


def rows(count, vocab, seed=0, spread=3.0):
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def masks(count, vocab, share, seed=0):
    chance = np.random.default_rng(seed)
    packed = np.zeros((count, -(-vocab // 32) * 4), np.uint8)
    few = np.packbits(chance.random((count, vocab)) < share, axis=1, bitorder="little")
    packed[:, : few.shape[1]] = few
    packed[:, 0] |= 1
    return torch.from_numpy(packed.view(np.int32))


@pytest.mark.parametrize("share", [None, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("vocab", [1, 15, 64, 65, 513, 4096, 5001])
def test_against_the_reference(vocab, share):
    for spread, cuts in itertools.product((0.3, 3.0), CUTS):
        x, bits = rows(6, vocab, spread=spread), None if share is None else masks(6, vocab, share)
        settings = torch.tensor([[*cuts, u] for u in (0.0, 0.11, 0.37, 0.62, 0.93, 0.999)], dtype=torch.float64)
        got, wanted = draw_rows(x, settings, bits), REFERENCE_OPS["draw_rows"](x, settings, bits)
        assert torch.equal(got[:, [0, 2, 3]], wanted[:, [0, 2, 3]]), cuts
        assert torch.allclose(got[:, 1], wanted[:, 1], atol=2e-5)


def likely_padding(count, vocab, columns):
    """Rows of which every logit from `columns` on is larger than all others."""
    x = rows(count, vocab)
    x[:, columns:] += 40
    return x


@pytest.mark.parametrize("share", [None, 0.3])
@pytest.mark.parametrize(("vocab", "columns"), [(2, 1), (70, 64), (70, 69), (513, 512), (5001, 4096), (5001, 31)])
def test_columns_beyond_the_last_token(vocab, columns, share):
    """The token of the row that ends there; log probability, rank and alternatives of the whole row."""
    for cuts in CUTS:
        x, bits = likely_padding(6, vocab, columns), None if share is None else masks(6, vocab, share)
        short = None if bits is None else bits[:, : -(-columns // 32)].contiguous()
        settings = torch.tensor([[*cuts, u] for u in (0.0, 0.11, 0.37, 0.62, 0.93, 0.999)], dtype=torch.float64)
        got, wanted = (op(x, settings, bits, 2, columns) for op in (draw_rows, REFERENCE_OPS["draw_rows"]))
        assert torch.equal(got[:, [0, 2, 3, 4, 6]], wanted[:, [0, 2, 3, 4, 6]]), cuts
        assert torch.allclose(got[:, 1::2], wanted[:, 1::2], atol=2e-5)
        alone = draw_rows(x[:, :columns].contiguous(), settings, short)
        assert torch.equal(got[:, [0, 3]], alone[:, [0, 3]])
        assert got[:, 0].max() < columns
        assert got[:, 2].min() > vocab - columns
        assert got[:, 4].min() >= columns
        assert torch.allclose(got[:, 1], x.double().log_softmax(1)[torch.arange(6), got[:, 0].long()], atol=2e-5)


def test_columns_of_the_whole_row_change_nothing():
    x, bits = rows(len(CUTS), 5001), masks(len(CUTS), 5001, 0.3)
    settings = torch.tensor([[*cuts, 0.37] for cuts in CUTS], dtype=torch.float64)
    for mask_bits in (None, bits):
        wanted = draw_rows(x, settings, mask_bits, 3)
        for columns in (None, 5001, 10**9):
            assert torch.equal(draw_rows(x, settings, mask_bits, 3, columns), wanted)
            assert torch.equal(REFERENCE_OPS["draw_rows"](x, settings, mask_bits, 3, columns)[:, 0], wanted[:, 0])


def test_padding_alone_is_no_choice():
    """A row without a finite logit in front of the padding, a mask that allows padding only, and a padded logit that is no number."""
    x = likely_padding(3, 100, 90)
    x[0, :90], x[2, 95] = -torch.inf, torch.nan
    bits = masks(3, 100, 1.0)
    bits[1] = 0
    bits[1, 2], bits[1, 3] = -(1 << 26), 0b1111  # 90 to 99
    for cuts in (NEUTRAL, (0.0, 0.0, 1.0, 0.0)):
        settings = torch.tensor([[*cuts, 0.5]] * 3, dtype=torch.float64)
        for op in (draw_rows, REFERENCE_OPS["draw_rows"]):
            found = op(x, settings, bits, 0, 90)
            assert found[:, 0].tolist() == [-2, -2, -1]
            assert found[:2, 3].tolist() == [90, 0]


@pytest.mark.parametrize("vocab", [1, 15, 17, 64, 4096, 5001])
def test_alternatives(vocab):
    """Those of the reference, many of them equal; the drawn token is the same as without them."""
    settings = torch.tensor([[*cuts, 0.37] for cuts in CUTS], dtype=torch.float64)
    for x in (
        rows(len(CUTS), vocab),
        rows(len(CUTS), vocab).round(),
        torch.zeros(len(CUTS), vocab),
        -torch.arange(float(vocab)).repeat(11, 1),
    ):
        for top in {min(top, vocab) for top in (1, 6, 16, 20, 100)}:
            got, wanted = draw_rows(x, settings, None, top), REFERENCE_OPS["draw_rows"](x, settings, None, top)
            assert torch.equal(got[:, :4], draw_rows(x, settings, None))
            assert torch.equal(got[:, 4::2], wanted[:, 4::2])
            assert torch.allclose(got[:, 5::2], wanted[:, 5::2], atol=2e-5)


@pytest.mark.parametrize("cuts", [NEUTRAL, (0.8, 50.0, 1.0, 0.0), (1.0, 0.0, 0.9, 0.0), (1.0, 0.0, 0.999, 0.001)])
def test_a_large_vocabulary(cuts):
    """More candidates than are sorted, so that their leading bits are compared first."""
    x = rows(2, 128_256, seed=3, spread=2.0)
    settings = torch.tensor([[*cuts, 0.31], [*cuts, 0.77]], dtype=torch.float64)
    assert torch.equal(draw_rows(x, settings, None)[:, 0], REFERENCE_OPS["draw_rows"](x, settings, None)[:, 0])


def test_frequencies():
    """Drawn as often as the probabilities of what the cuts leave say (chi-square, 7 degrees of freedom, p = 0.001)."""
    x = torch.log(torch.tensor([0.3, 0.02, 0.2, 0.15, 0.13, 0.1, 0.06, 0.04]))
    draws = 20_000
    numbers = (np.arange(draws) + 0.5) / draws
    numbers = np.random.default_rng(0).permutation(numbers) * 0.999 + np.random.default_rng(1).random(draws) * 0.001
    settings = torch.tensor(np.column_stack([np.tile([1.0, 0.0, 1.0, 0.05], (draws, 1)), numbers]))
    got = draw_rows(x.repeat(draws, 1), settings, None)[:, 0].long().bincount(minlength=8)
    weights = torch.where(x.exp() >= 0.05 * 0.3, x.exp(), 0.0)
    wanted = weights / weights.sum() * draws
    assert got[weights == 0].sum() == 0
    assert (((got - wanted) ** 2)[weights > 0] / wanted[weights > 0]).sum() < 24.3


@pytest.mark.parametrize("top_k", [0.0, 900.0])
def test_a_top_p_next_to_one_cuts_nothing(top_k):
    """What it would cut is the difference of two sums, which rounding makes negative now and then."""
    x = rows(64, 4096, seed=3)
    settings = torch.tensor([[1.0, top_k, 1.0, 0.0, i / 64] for i in range(64)], dtype=torch.float64)
    wanted = draw_rows(x, settings, None)
    for less in (1e-16, 1e-14, 1e-12, 1e-10):
        settings[:, 2] = 1 - less
        assert torch.equal(draw_rows(x, settings, None)[:, 0], wanted[:, 0])


def test_ties_and_signs_of_zero():
    x = torch.tensor([[1.0, 2.0, 2.0, -0.0], [-0.0, 0.0, -1.0, -torch.inf]])
    greedy = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]] * 2, dtype=torch.float64)
    assert draw_rows(x, greedy, None)[:, 0].tolist() == [1, 0]
    both = torch.tensor([[1.0, 1.0, 1.0, 0.0, u] for u in (0.2, 0.7)], dtype=torch.float64)  # top_k = 1 keeps equals
    assert draw_rows(x[:1].repeat(2, 1), both, None)[:, 0].tolist() == [1, 2]


def test_rows_without_a_distribution_or_a_choice():
    x = torch.zeros(5, 40)
    x[0, 3], x[1, 39], x[2] = torch.nan, torch.inf, -torch.inf
    x[4, 20:] = -torch.inf
    bits = torch.full((5, 2), -1, dtype=torch.int32)
    bits[3] = 0
    bits[4, 0] = 1 << 25  # allowed, but its logit is -inf
    for cuts in (NEUTRAL, (0.0, 0.0, 1.0, 0.0)):
        settings = torch.tensor([[*cuts, 0.5]] * 5, dtype=torch.float64)
        for got in (draw_rows(x, settings, bits), REFERENCE_OPS["draw_rows"](x, settings, bits)):
            assert got[:, 0].tolist() == [-1, -1, -1, -2, -2]
            assert all(map(math.isnan, got[:, 1]))
        for op in (draw_rows, REFERENCE_OPS["draw_rows"]):
            assert op(x, settings, bits, 2)[:, 4:].eq(-1).all()


def test_rows_are_drawn_independently():
    x, bits = rows(9, 4096), masks(9, 4096, 0.3)
    settings = torch.tensor([[*CUTS[i], 0.1 * i] for i in range(9)], dtype=torch.float64)
    together = draw_rows(x, settings, bits)
    for i in range(9):
        assert torch.equal(draw_rows(x[i : i + 1], settings[i : i + 1], bits[i : i + 1])[0], together[i])


def test_cold_is_greedy():
    x = rows(1, 100)
    assert int(draw_rows(x, torch.tensor([[1e-38, 0.0, 1.0, 0.0, 0.9]], dtype=torch.float64), None)[0, 0]) == int(x.argmax())


@pytest.mark.parametrize("cuts", [(0.0, 1.0, 0.0), (0.0, 0.5, 0.0), (4.0, 1.0, 0.0), (4.0, 0.5, 0.1), (0.0, 1.0, 0.1)], ids=str)
@pytest.mark.parametrize("size", [1e30, -1e30])
def test_greedy_where_quotients_overflow(cuts, size):
    """By the temperature: no token has a weight then, and a cut would look for one."""
    x = torch.full((1, 700), size)
    x[0, 5] += 1e29
    settings = torch.tensor([[1e-9, *cuts, 0.3]], dtype=torch.float64)
    for found in (draw_rows(x, settings, None), REFERENCE_OPS["draw_rows"](x, settings, None)):
        assert found[0].tolist()[::2] == [5, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": torch.zeros(2, 40, dtype=torch.float64)}, "logits"),
        ({"logits": torch.zeros(40)}, "logits"),
        ({"settings": torch.zeros(2, 5)}, "settings"),
        ({"settings": torch.zeros(1, 5, dtype=torch.float64)}, "settings"),
        ({"settings": torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.5]] * 2, dtype=torch.float64)}, "out of range"),
        ({"settings": torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0]] * 2, dtype=torch.float64)}, "out of range"),
        ({"settings": torch.tensor([[math.nan, 0.0, 1.0, 0.0, 0.5]] * 2, dtype=torch.float64)}, "out of range"),
        ({"bits": torch.zeros(2, 1, dtype=torch.int32)}, "bits"),
        ({"top": -1}, "top"),
        ({"top": 41}, "top"),
        ({"columns": 0}, "columns is 0"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    given = {
        "logits": torch.zeros(2, 40),
        "settings": torch.tensor([[*NEUTRAL, 0.5]] * 2, dtype=torch.float64),
        "bits": None,
        "top": 0,
        "columns": None,
        **change,
    }
    for op in (draw_rows, REFERENCE_OPS["draw_rows"]):
        with pytest.raises((RuntimeError, ValueError), match=words):
            op(*given.values())


def test_the_reference_by_hand():
    z = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))
    assert [reference.draw(z, 1.0, 0, 0.6, 0.0, u) for u in (0.0, 0.6, 0.65, 0.99)] == [1, 1, 3, 3]
    assert [reference.draw(z, 1.0, 3, 1.0, 0.0, u) for u in (0.0, 0.53, 0.6, 0.8)] == [1, 2, 2, 3]
    assert reference.draw(z, 1.0, 0, 1.0, 0.4, 0.9) == 3


# ---- mask_logits


def mask_case(vocab, kind):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(vocab, generator=generator)
    words = -(-vocab // 32)
    bits = {
        "none": torch.zeros(words, dtype=torch.int32),
        "all": torch.full((words,), -1, dtype=torch.int32),
        "random": torch.randint(-(2**31), 2**31, (words,), generator=generator).to(torch.int32),
        "runs": torch.where(torch.rand(words, generator=generator) < 0.5, 0, -1).to(torch.int32),
        "single": (1 << torch.randint(0, 31, (words,), generator=generator)).to(torch.int32),
    }[kind]
    return logits, bits


@pytest.mark.parametrize("kind", ["none", "all", "random", "runs", "single"])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 4096, 5001])
def test_mask_against_the_reference(vocab, kind):
    logits, bits = mask_case(vocab, kind)
    before = logits.clone()
    got = mask_logits(logits, bits)
    assert torch.equal(got, reference.mask_logits(logits, bits))
    assert torch.equal(logits, before)
    assert got.tolist() == [float(x) if int(bits[i // 32]) >> (i % 32) & 1 else -torch.inf for i, x in enumerate(logits)]


def test_mask_keeps_nan_and_infinity():
    logits = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0] * 8)
    got = mask_logits(logits, torch.tensor([0b1111], dtype=torch.int32))
    assert torch.equal(got[:4].view(torch.int32), logits[:4].view(torch.int32))
    assert torch.equal(got[4:], torch.full((28,), -torch.inf))


@pytest.mark.parametrize(
    ("logits", "bits", "words"),
    [
        (torch.zeros(64), torch.zeros(3, dtype=torch.int32), r"bits .*expected .*\(2"),
        (torch.zeros(64), torch.zeros(2, dtype=torch.int64), "bits .*int32"),
        (torch.zeros(1, 64), torch.zeros(2, dtype=torch.int32), "logits"),
        (torch.zeros(64, dtype=torch.float16), torch.zeros(2, dtype=torch.int32), "logits"),
    ],
)
def test_masks_that_do_not_fit(logits, bits, words):
    for op in (mask_logits, REFERENCE_OPS["mask_logits"]):
        with pytest.raises((RuntimeError, ValueError), match=words):
            op(logits, bits)
