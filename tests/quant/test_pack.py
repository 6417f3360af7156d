import numpy as np
import pytest
import torch

from exl2nb.core.errors import FormatError
from exl2nb.quant.bits import WIDTHS
from exl2nb.quant.pack import pack_codes, pack_scales, unpack_codes, unpack_scales

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


@pytest.mark.parametrize("bits", WIDTHS)
def test_worked_words(bits):
    rows = np.arange(32)
    for codes, text in zip((rows, 7 * rows + 3), WORDS[bits]):
        packed = pack_codes(torch.tensor(codes % (1 << bits), dtype=torch.uint8)[:, None], bits)
        assert [f"{word:08X}" for word in packed.numpy().view(np.uint32).ravel()] == text.split()


def test_first_bytes_of_the_three_bit_example():
    packed = pack_codes((torch.arange(32) % 8).to(torch.uint8)[:, None], 3)
    assert packed.numpy().tobytes()[:4] == bytes.fromhex("88c6fa88")


@pytest.mark.parametrize("bits", WIDTHS)
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
    for bits in WIDTHS:
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
def test_refusals(call, text):
    with pytest.raises(FormatError, match=text):
        call()
