"""The knapsack against brute force, and the menu it chooses from."""

import itertools
import random

import pytest

from exl2nb.converter.allocation import allocate
from exl2nb.converter.options import menu
from exl2nb.core.errors import ConversionError
from exl2nb.quant.bits import stored_bits


def brute(menus, budget):
    totals = [(sum(o[1] for o in pick), sum(o[0] for o in pick)) for pick in itertools.product(*menus)]
    return min(error for error, bits in totals if bits <= budget)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed):
    rng = random.Random(seed)
    menus = [
        [(rng.randint(1, 60), rng.random() * 10 ** rng.randint(-3, 0)) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 5))
    ]
    least, most = sum(min(o[0] for o in m) for m in menus), sum(max(o[0] for o in m) for m in menus)
    budget = rng.randint(least, most)
    picks = allocate(menus, budget)
    assert sum(m[i][0] for m, i in zip(menus, picks)) <= budget
    assert sum(m[i][1] for m, i in zip(menus, picks)) == pytest.approx(brute(menus, budget), rel=1e-12)
    assert picks == allocate(menus, budget)


def test_equal_errors_and_zero_errors_are_fine():
    menus = [[(10, 0.0), (20, 0.0)], [(5, 1.0), (6, 1.0)]]
    assert allocate(menus, 15) == [0, 0]


def test_large_instances_stay_exact_enough_and_fast():
    rng = random.Random(1)
    menus = [[(b * 1000 + rng.randint(0, 300), rng.uniform(0.5, 2) * 4.0**-b) for b in range(2, 9) for _ in range(12)] for _ in range(200)]
    budget = 4_100_000 // 4
    picks = allocate(menus, budget)
    bits = sum(m[i][0] for m, i in zip(menus, picks))
    assert budget - 300 <= bits <= budget


def test_out_of_reach_names_the_range():
    with pytest.raises(ConversionError, match="at least 12 .up to 25"):
        allocate([[(10, 1.0), (20, 0.1)], [(2, 1.0), (5, 0.0)]], 11)


def anchors(k, seed=0):
    rng = random.Random(seed)
    table = {}
    for bits in (2, 3, 4, 5, 6, 8):
        for size in (32, 128):
            table[bits, size] = []
            for first in range(0, k, size):
                size_of_inputs = sum(1.0 / (1 + row) for row in range(first, min(k, first + size)))
                table[bits, size].append(size_of_inputs * (1 + size / 500) * 4.0**-bits * rng.uniform(0.9, 1.1))
    return table


@pytest.mark.parametrize("k", [32, 96, 256, 352])
def test_menu_is_legal_dense_and_honest(k):
    options = menu(k, 64, anchors(k))
    for option in options:
        widths = [bits for bits, _ in option.groups]
        assert widths == sorted(widths, reverse=True)
        assert sum(rows for _, rows in option.groups) == k
        assert all(rows % 32 == 0 for _, rows in option.groups)
        assert option.bits == stored_bits(option.groups, 64)
    pairs = list(itertools.pairwise(options))
    assert all(low.bits < high.bits and low.error > high.error for low, high in pairs), "what is beaten is left out"
    assert {bits for bits, _ in options[0].groups} == {2}
    assert {bits for bits, _ in options[-1].groups} == {8}
    assert len(options) >= 6


def test_uniform_options_cost_what_was_measured():
    table = anchors(256)
    by_groups = {o.groups: o for o in menu(256, 64, table)}
    option = by_groups[tuple((8, 32) for _ in range(8))]
    assert option.error == pytest.approx(sum(table[8, 32]))
