"""A unit read from its slices is what the whole matrix says, at every width, group size and column."""

import numpy as np
import pytest
import torch

from exl2nb.core.errors import FormatError, OptionError
from exl2nb.quant.exl2 import Exl2Tensors, encode
from exl2nb.quant.exl2_slice import UNIT, Exl2Slices
from exl2nb.quant.pack import unpack_codes


class Store:
    """Tensors in memory that remember which rows were asked for."""

    def __init__(self, tensors):
        self.tensors, self.asked = tensors, []

    def info(self, name):
        return self.tensors[name]

    def read(self, name, *, rows=None):
        self.asked.append((name.rpartition(".")[2], rows))
        return self.tensors[name] if rows is None else self.tensors[name][rows[0] : rows[1]]


GROUPS = {
    "all widths": [(8, 32), (6, 64), (5, 32), (4, 96), (3, 32), (2, 64)],
    "one large group": [(3, 320)],
    "smallest": [(2, 32)],
}


@pytest.fixture(params=GROUPS, ids=list(GROUPS))
def made(request):
    groups = GROUPS[request.param]
    generator = torch.Generator().manual_seed(5)
    rows, columns = sum(count for _, count in groups), 64
    codes = torch.cat([torch.randint(0, 1 << bits, (count, columns), generator=generator, dtype=torch.uint8) for bits, count in groups])
    index = torch.randint(0, 16, (len(groups), columns), generator=generator, dtype=torch.uint8)
    largest = torch.rand(len(groups), generator=generator).mul(0.02).half()
    largest[0] = 0.0005  # its unit step is a subnormal
    return encode(codes, index, largest, groups, torch.randperm(rows, generator=generator))


def test_every_unit_equals_reconstruct(made: Exl2Tensors):
    store = Store(made.tensors("m"))
    slices, whole, codes = Exl2Slices(store, "m"), made.reconstruct(), made.codes()
    first = 0
    for group, (bits, count) in enumerate(made.groups):
        for unit in range(slices.units(group)):
            for column in (0, 7, 8, 63):
                one = slices.unit(group, unit, column)
                at = first + UNIT * unit
                assert (one.bits, one.first_row) == (bits, at)
                assert one.codes == tuple(codes[at : at + UNIT, column].tolist())
                expected = whole[list(one.rows), column].numpy()
                assert one.weights.dtype == np.float16
                assert one.weights.tobytes() == expected.tobytes()
                assert one.scale_index == int(made.scale_index()[group, column])
                assert one.step == float(made.steps()[group, column])
                again = torch.tensor(one.words).to(torch.int32)[:, None]
                assert unpack_codes(again, bits)[:, 0].tolist() == list(one.codes)
                assert one.scale_word >> 4 * (column % 8) & 15 == one.scale_index
        first += count


def test_locate_finds_every_row(made: Exl2Tensors):
    slices = Exl2Slices(Store(made.tensors("m")), "m")
    for row in range(0, slices.in_features, 7):
        group, unit, place = slices.locate(row)
        assert slices.unit(group, unit, 1).rows[place] == row


def test_only_slices_are_read(made: Exl2Tensors):
    store = Store(made.tensors("m"))
    slices = Exl2Slices(store, "m")
    assert {name for name, _ in store.asked} == {"q_groups", "q_invperm", "q_scale_max"}
    store.asked.clear()
    slices.unit(0, 0, 5)
    bits = made.groups[0][0]
    assert store.asked == [("q_weight", (0, bits)), ("q_scale", (0, 1))]


def test_places_that_are_none(made: Exl2Tensors):
    slices = Exl2Slices(Store(made.tensors("m")), "m")
    for arguments, message in (
        ((len(made.groups), 0, 0), "group is"),
        ((0, slices.units(0), 0), "group 0 has units 0 to"),
        ((0, 0, 64), "column is 64; expected 0 to 63"),
        ((-1, 0, 0), "group is -1"),
    ):
        with pytest.raises(OptionError, match=message):
            slices.unit(*arguments)
    with pytest.raises(OptionError, match=f"row is {slices.in_features}"):
        slices.locate(slices.in_features)


def test_a_broken_file_is_named(made: Exl2Tensors):
    tensors = made.tensors("m")
    tensors["m.q_invperm"] = torch.zeros_like(tensors["m.q_invperm"])
    with pytest.raises(FormatError, match=r"m\.q_invperm"):
        Exl2Slices(Store(tensors), "m")
