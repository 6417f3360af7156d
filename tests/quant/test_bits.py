import doctest

import numpy as np
import pytest

from exl2nb.core.errors import OptionError
from exl2nb.quant import bits
from exl2nb.quant.bits import HEAD_MIXES, bits_per_weight, group_layout, head_mix, padded, stored_bits


def test_doctests():
    assert doctest.testmod(bits).failed == 0


@pytest.mark.parametrize(("head_bits", "bpw"), [(2, 2.74), (3, 3.28), (4, 4.44), (5, 5.19), (6, 6.34), (8, 8.03)])
def test_head_table(head_bits, bpw):
    groups = head_mix(head_bits).groups(4096)
    assert round(bits_per_weight(groups, 32000), 2) == bpw
    assert set(HEAD_MIXES) == {2, 3, 4, 5, 6, 8}


def test_measurement_file_totals():
    layer = dict(bits=[3, 2], bits_prop=[0.1, 0.9], group_size={"3": 64, "2": 64})
    shapes = [(128, 128), (128, 64), (128, 64), (128, 128)]
    assert sum(stored_bits(group_layout(k, **layer), n) for k, n in shapes) == 142720
    four = group_layout(128, [4], [1], {"4": 128})
    down = group_layout(352, [8, 4], [0.05, 0.95], {"8": 32, "4": 128})
    assert 2 * stored_bits(four, 352) + stored_bits(down, 128) == 581664


@pytest.mark.parametrize("seed", range(40))
def test_layout_always_covers_the_rows(seed):
    rng = np.random.default_rng(seed)
    widths = sorted((int(b) for b in rng.choice([2, 3, 4, 5, 6, 8], rng.integers(1, 5), replace=False)), reverse=True)
    share = rng.dirichlet(np.ones(len(widths)))
    sizes = [32 * int(rng.integers(1, 9)) for _ in widths]
    rows = 32 * int(rng.integers(1, 200))
    groups = group_layout(rows, widths, [float(s) for s in share], sizes)
    assert sum(r for _, r in groups) == rows
    assert all(r > 0 and r % 32 == 0 for _, r in groups)
    assert [b for b, _ in groups] == sorted((b for b, _ in groups), reverse=True)


def test_small_matrix_drops_the_last_width():
    assert group_layout(32, [8, 4], [0.15, 0.85], 128) == [(8, 32)]
    assert padded(32000) == 32000 and padded(4097) == 4128


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((100, [4], [1.0], 32), "in_features is 100"),
        ((128, [4, 5], [0.5, 0.5], 32), "strictly falling"),
        ((128, [7], [1.0], 32), "strictly falling"),
        ((128, [5, 4], [1.0], 32), "as many shares"),
        ((128, [5, 4], [0.5, 0.4], 32), "add up to 1"),
        ((128, [4], [1.0], 48), "positive multiple of 32"),
        ((128, [5, 4], [0.5, 0.5], {"5": 32}), "positive multiple of 32"),
    ],
)
def test_refusals(args, text):
    with pytest.raises(OptionError, match=text):
        group_layout(*args)
    with pytest.raises(OptionError, match="head_bits is 7"):
        head_mix(7)
