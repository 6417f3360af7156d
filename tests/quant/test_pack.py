"""Codes and scales packed into words, group tables of given widths, plain tensors."""

import numpy as np
import pytest
import torch

from exl2nb.core.errors import FormatError, OptionError
from exl2nb.quant.bits import CODE_WIDTHS, HEAD_MIXES, bits_per_weight, group_layout, head_mix, padded, stored_bits
from exl2nb.quant.pack import pack_codes, pack_scales, unpack_codes, unpack_scales
from exl2nb.quant.weight_source import DENSE_DTYPES, check_dense

WORDS = {  # codes r mod 2**b, codes (7r + 3) mod 2**b
    2: ("E4E4E4E4 E4E4E4E4", "1B1B1B1B 1B1B1B1B"),
    3: ("88FAC688 C688FAC6 FAC688FA", "53977053 70539770 97705397"),
    4: ("76543210 FEDCBA98 76543210 FEDCBA98", "4D6F81A3 C5E7092B 4D6F81A3 C5E7092B"),
    5: ("8A418820 C5A92839 CA307B9A 38BDAB49 FFBBCDEB", "4DFC4543 78245BA3 0753617D 4B276CF4 E55C7066"),
    6: ("440C2040 A2481C61 3CE34C2C 544D2450 A6585D65 7DE75C6D", "9F611283 90BBD2D9 B2579740 8F201EB3 9CAB91D5 71538703"),
    8: (
        "03020100 07060504 0B0A0908 0F0E0D0C 13121110 17161514 1B1A1918 1F1E1D1C",
        "18110A03 342D261F 5049423B 6C655E57 88817A73 A49D968F C0B9B2AB DCD5CEC7",
    ),
}


@pytest.mark.parametrize("bits", CODE_WIDTHS)
def test_worked_words(bits):
    rows = np.arange(32)
    for codes, text in zip((rows, 7 * rows + 3), WORDS[bits]):
        packed = pack_codes(torch.tensor(codes % (1 << bits), dtype=torch.uint8)[:, None], bits)
        assert [f"{word:08X}" for word in packed.numpy().view(np.uint32).ravel()] == text.split()


@pytest.mark.parametrize("bits", CODE_WIDTHS)
@pytest.mark.parametrize("rows", [32, 64, 160])
def test_round_trip_and_stream_rule(bits, rows):
    rng = np.random.default_rng(bits * 1000 + rows)
    codes = rng.integers(0, 1 << bits, (rows, 40), dtype=np.uint8)
    packed = pack_codes(torch.from_numpy(codes), bits)
    assert packed.shape == (rows * bits // 32, 40) and packed.dtype == torch.int32 and packed.is_contiguous()
    assert torch.equal(unpack_codes(packed, bits), torch.from_numpy(codes))
    stream = np.unpackbits(packed.numpy().view(np.uint8).reshape(-1, 40, 4).transpose(1, 0, 2).reshape(40, -1), axis=1, bitorder="little")
    for column in range(40):
        for row in range(rows):
            field = stream[column, row * bits : (row + 1) * bits]
            assert int(field @ (1 << np.arange(bits))) == codes[row, column]


def test_extreme_codes_keep_the_sign_bit_of_a_word_apart():
    for bits in CODE_WIDTHS:
        full = torch.full((32, 3), (1 << bits) - 1, dtype=torch.uint8)
        assert torch.equal(pack_codes(full, bits), torch.full((bits, 3), -1, dtype=torch.int32))
        assert torch.equal(unpack_codes(torch.full((bits, 3), -1, dtype=torch.int32), bits), full)


def test_scales():
    index = torch.arange(8, dtype=torch.uint8)[None]
    assert pack_scales(index).item() == 0x76543210
    rng = np.random.default_rng(1)
    index = torch.from_numpy(rng.integers(0, 16, (5, 64), dtype=np.uint8))
    packed = pack_scales(index)
    assert packed.shape == (5, 8) and torch.equal(unpack_scales(packed), index)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pack_codes(torch.zeros(32, 1, dtype=torch.uint8), 7), "found 7 bits, expected one of 2, 3, 4, 5, 6, 8"),
        (lambda: unpack_codes(torch.zeros(32, 1, dtype=torch.int32), 1), "found 1 bits"),
        (lambda: pack_codes(torch.zeros(32, 1, dtype=torch.int32), 4), "found torch.int32"),
        (lambda: pack_codes(torch.zeros(16, 1, dtype=torch.uint8), 4), "found 16 rows, expected a multiple of 32"),
        (lambda: pack_codes(torch.full((32, 1), 16, dtype=torch.uint8), 4), "found the code 16, expected codes below 16"),
        (lambda: unpack_codes(torch.zeros(4, 1, dtype=torch.int32), 3), "found 4 rows of words, expected a multiple of 3"),
        (lambda: pack_scales(torch.full((1, 8), 16, dtype=torch.uint8)), "found 16, expected 0..15"),
        (lambda: pack_scales(torch.zeros(1, 9, dtype=torch.uint8)), "N a multiple of 8"),
    ],
)
def test_codes_that_cannot_be_packed(call, text):
    with pytest.raises(FormatError, match=text):
        call()


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
def test_group_tables_that_cannot_be(args, text):
    with pytest.raises(OptionError, match=text):
        group_layout(*args)
    with pytest.raises(OptionError, match="head_bits is 7"):
        head_mix(7)


def test_plain_tensors_are_checked():
    for dtype in DENSE_DTYPES:
        check_dense(torch.ones(8, 16, dtype=dtype), "b.weight", (8, 16))
    with pytest.raises(FormatError, match=r"^f: tensor 'b.weight': found shape \(8, 16\), expected \(8, 17\)"):
        check_dense(torch.ones(8, 16), "b.weight", (8, 17), file="f")
    with pytest.raises(FormatError, match=r"'b.weight': found dtype torch.int32, expected float16, bfloat16 or float32"):
        check_dense(torch.ones(8, 16).int(), "b.weight", (8, 16))
