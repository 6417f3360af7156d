import dataclasses

import numpy as np
import pytest
import torch

from exl2nb.core.errors import FormatError
from exl2nb.quant.exl2 import Exl2Tensors, encode

from .oracle import decode, random_parts


def make(seed=0, rows=128, columns=32, groups=None, bias=None):
    codes, index, scale_max, groups, perm = random_parts(np.random.default_rng(seed), rows, columns, groups)
    return encode(*map(torch.from_numpy, (codes, index, scale_max)), groups, torch.from_numpy(perm), bias=bias)


def truth(tensors, prescale=1.0):
    arrays = [getattr(tensors, name).numpy() for name in ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")]
    return decode(*arrays, prescale=prescale)


def same_bits(ours, theirs):
    return np.array_equal(ours.numpy().view(np.uint16), theirs.view(np.uint16))


@pytest.mark.parametrize("seed", range(12))
def test_reconstruct_equals_the_scalar_decoder(seed):
    tensors = make(seed, rows=32 * (1 + seed), columns=32)
    assert same_bits(tensors.reconstruct(), truth(tensors))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_width_alone(bits):
    tensors = make(bits, rows=96, groups=[(bits, 64), (bits, 32)])
    assert same_bits(tensors.reconstruct(), truth(tensors))
    assert tensors.groups == [(bits, 64), (bits, 32)]


def test_prescale():
    tensors = make(3)
    assert same_bits(tensors.reconstruct(0.22), truth(tensors, 0.22))


def test_subnormal_units_survive_flush_to_zero():
    """The unit of small weights is a subnormal half; a process that flushes fp32 subnormals must not lose it."""
    scale_max = torch.tensor([1e-5, 3e-5], dtype=torch.float16)
    codes, index, _, groups, perm = random_parts(np.random.default_rng(1), 64, 32, [(8, 32), (4, 32)])
    tensors = encode(torch.from_numpy(codes), torch.from_numpy(index), scale_max, groups, torch.from_numpy(perm))
    expected = truth(tensors)
    torch.set_flush_denormal(True)
    try:
        assert same_bits(tensors.reconstruct(), expected)
    finally:
        torch.set_flush_denormal(False)
    assert np.count_nonzero(expected)


@pytest.mark.parametrize(
    ("scale_max", "index", "bits", "code", "unit", "step", "weight"),
    [
        (0x3800, 9, 4, 13, 0x1800, 0x3240, 0x3BD0),
        (0x22CF, 9, 4, 13, 0x0368, 0x1D52, 0x26A6),
        (0x1019, 15, 8, 255, 0x0021, 0x1020, 0x2C18),
    ],
)
def test_worked_numbers(scale_max, index, bits, code, unit, step, weight):
    half = torch.from_numpy(np.array([scale_max], np.uint16).view(np.float16))
    tensors = encode(
        torch.full((32, 32), code, dtype=torch.uint8), torch.full((1, 32), index, dtype=torch.uint8), half, [(bits, 32)], torch.arange(32)
    )
    assert tensors.steps().numpy().view(np.uint16)[0, 0] == step
    assert tensors.reconstruct().numpy().view(np.uint16)[5, 7] == weight
    assert np.float16(np.float32(half.item()) / 256).view(np.uint16) == unit


def test_worked_group_tables():
    table = make(rows=128, groups=[(4, 32), (3, 32), (3, 32), (3, 32)])
    assert table.q_groups.tolist() == [4, 0, 3, 4, 3, 7, 3, 10] and table.q_weight.shape[0] == 13
    assert make(rows=64, groups=[(5, 32), (2, 32)]).q_groups.numpy().tobytes() == bytes.fromhex("0500000002000500")


def test_permutation_example():
    perm = torch.tensor([2, 0, 3, 1, *list(range(4, 32))])
    codes, index, scale_max, groups, _ = random_parts(np.random.default_rng(2), 32, 32)
    tensors = encode(*map(torch.from_numpy, (codes, index, scale_max)), groups, perm)
    assert tensors.q_invperm[:4].tolist() == [1, 3, 0, 2] and torch.equal(tensors.perm, perm)
    assert torch.equal(
        tensors.reconstruct()[2, 0], (tensors.codes()[0, 0].float() - (1 << (groups[0][0] - 1))).half() * tensors.steps()[0, 0]
    )


def test_encode_pads_columns_with_the_zero_code():
    codes, index, scale_max, groups, perm = random_parts(np.random.default_rng(3), 96, 50, [(8, 32), (3, 64)])
    bias = torch.ones(50, dtype=torch.float16)
    tensors = encode(*map(torch.from_numpy, (codes, index, scale_max)), groups, torch.from_numpy(perm), bias=bias)
    assert tensors.out_features == 64 and tensors.bias is not None and tensors.bias[50:].count_nonzero() == 0
    assert torch.equal(tensors.codes()[:32, 50:], torch.full((32, 14), 128, dtype=torch.uint8))
    assert torch.equal(tensors.codes()[32:, 50:], torch.full((64, 14), 4, dtype=torch.uint8))
    assert tensors.scale_index()[:, 50:].count_nonzero() == 0 and tensors.reconstruct()[:, 50:].count_nonzero() == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"groups": [(7, 64), (3, 64)]}, "group 0 of 7 bits"),
        ({"groups": [(0, 64), (3, 64)]}, "group 0 of 0 bits"),
        ({"groups": [(3, 64), (4, 64)]}, "widths that never rise"),
        ({"groups": [(4, 48), (4, 80)]}, "group 0 of 6 word rows at 4 bits"),
        ({"groups": [(4, 64), (3, 32)]}, "found 128 rows, expected 96"),
        ({"groups": []}, "found 128 rows, expected 0"),
        ({"perm": torch.zeros(128, dtype=torch.int64)}, "expected a permutation"),
        ({"perm": torch.arange(96)}, "found 96 rows, expected 128"),
        ({"codes": torch.full((128, 32), 16, dtype=torch.uint8)}, "found the code 16, expected codes below 16"),
        ({"codes": torch.zeros(96, 32, dtype=torch.uint8)}, "q_groups|q_invperm"),
        ({"scale_index": torch.full((2, 32), 16, dtype=torch.uint8)}, "found 16, expected 0..15"),
        ({"scale_index": torch.zeros(3, 32, dtype=torch.uint8)}, "one per group of q_scale"),
        ({"scale_max": torch.tensor([1.0, -1.0]).half()}, "found -1.0 in group 1"),
        ({"scale_max": torch.tensor([1.0, 1.0])}, "found float32"),
    ],
)
def test_encode_refuses(changes, text):
    good = {
        "codes": torch.zeros(128, 32, dtype=torch.uint8),
        "scale_index": torch.zeros(2, 32, dtype=torch.uint8),
        "scale_max": torch.ones(2).half(),
        "groups": [(4, 64), (3, 64)],
        "perm": torch.arange(128),
    }
    encode(**good)
    with pytest.raises(FormatError, match=text):
        encode(**good | changes)


@pytest.mark.parametrize("seed", range(10))
def test_unpack_then_encode_is_the_identity(seed):
    tensors = make(seed + 100, rows=32 * (1 + seed), columns=64, bias=torch.zeros(64, dtype=torch.float16))
    again = encode(tensors.codes(), tensors.scale_index(), tensors.q_scale_max, tensors.groups, tensors.perm, bias=tensors.bias)
    for name, tensor in tensors.tensors("w").items():
        assert torch.equal(again.tensors("w")[name], tensor) and again.tensors("w")[name].dtype == tensor.dtype


def test_bpw_counts_everything_but_the_bias():
    tensors = make(rows=128, groups=[(4, 128)], bias=torch.zeros(32, dtype=torch.float16))
    assert tensors.bpw == pytest.approx((tensors.nbytes - 64) * 8 / (128 * 32))


def change(**changes):
    return lambda t: dataclasses.replace(t, **{name: value(getattr(t, name)) for name, value in changes.items()})


def put(index, value):
    def edit(tensor):
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return edit


# a matrix of 128 rows in groups (4, 64), (3, 64): words 0..7 and 8..13
BROKEN = {
    "q_weight dtype": (change(q_weight=lambda t: t.long()), "q_weight.*found int64 .*expected int32"),
    "q_weight rank": (change(q_weight=lambda t: t.reshape(-1)), "q_weight.*expected int32 with 2"),
    "q_scale dtype": (change(q_scale=lambda t: t.short()), "q_scale'.*found int16"),
    "q_scale_max dtype": (change(q_scale_max=lambda t: t.float()), "q_scale_max.*found float32.*expected float16"),
    "q_scale_max bf16": (change(q_scale_max=lambda t: t.bfloat16()), "q_scale_max.*found bfloat16"),
    "q_groups dtype": (change(q_groups=lambda t: t.int()), "q_groups.*found int32"),
    "q_invperm dtype": (change(q_invperm=lambda t: t.half()), "q_invperm.*found float16"),
    "bias dtype": (change(bias=lambda t: torch.zeros(32)), "bias.*found float32"),
    "bias length": (change(bias=lambda t: torch.zeros(31).half()), r"bias.*found shape \(31,\), expected 32"),
    "columns": (change(q_weight=lambda t: t[:, :24]), r"q_weight.*found shape \(14, 24\).*multiple of 32 columns"),
    "no columns": (change(q_weight=lambda t: t[:, :0]), "q_weight.*positive multiple of 32 columns"),
    "q_scale width": (change(q_scale=lambda t: t[:, :3]), "q_scale.*expected 4 words per group"),
    "q_scale groups": (change(q_scale=lambda t: t[:1]), "q_scale_max.*expected 1, one per group"),
    "no groups": (lambda t: dataclasses.replace(t, q_scale=t.q_scale[:0]), "q_scale.*at least one group"),
    "q_groups length": (change(q_groups=lambda t: t[:3]), "q_groups.*expected 4, two per group"),
    "K not in 32s": (change(q_invperm=lambda t: t[:80]), "q_invperm.*multiple of 32 up to 65536"),
    "K too large": (change(q_invperm=lambda t: torch.arange(65568)), "q_invperm.*multiple of 32 up to 65536"),
    "K empty": (change(q_invperm=lambda t: t[:0]), "q_invperm.*positive multiple of 32"),
    "K short": (change(q_invperm=lambda t: torch.arange(96)), "q_invperm.*found 96 rows, expected 128"),
    "width 7": (change(q_groups=put(0, 7)), "q_groups.*group 0 of 7 bits, expected one of"),
    "width 1": (change(q_groups=put(2, 1)), "group 1 of 1 bits"),
    "width 0": (change(q_groups=put(0, 0)), "group 0 of 0 bits"),
    "negative width": (change(q_groups=put(0, -4)), "group 0 of -4 bits"),
    "rising": (
        change(q_groups=lambda t: torch.tensor([3, 0, 4, 6], dtype=torch.int16)),
        "group 1 of 4 bits after one of 3, expected widths",
    ),
    "first start": (change(q_groups=put(1, 1)), "group 0 starting at word row 1, expected 0"),
    "empty group": (change(q_groups=put(3, 0)), "group 0 from word row 0 to 0 of 14, expected at least"),
    "backwards": (change(q_groups=put(3, -8)), "group 0 from word row 0 to -8"),
    "beyond": (change(q_groups=put(3, 20)), "group 1 from word row 20 to 14"),
    "16 rows": (change(q_groups=put(3, 10)), "group 0 of 10 word rows at 4 bits, expected a multiple of 4"),
    "row missing": (change(q_weight=lambda t: t[:13]), "group 1 of 5 word rows at 3 bits"),
    "unit missing": (change(q_weight=lambda t: t[:11]), "q_invperm.*found 128 rows, expected 96"),
    "twice": (change(q_invperm=lambda t: torch.zeros_like(t)), "q_invperm.*the value 0 128 times, expected a permutation"),
    "negative row": (change(q_invperm=put(3, -1)), "q_invperm.*values from -1"),
    "row too high": (change(q_invperm=put(3, 128)), "q_invperm.*to 128, expected a permutation of 0..127"),
    "nan": (change(q_scale_max=put(1, float("nan"))), "q_scale_max.*found nan in group 1 of 3 bits"),
    "inf": (change(q_scale_max=put(0, float("inf"))), "q_scale_max.*found inf in group 0"),
    "negative": (change(q_scale_max=put(0, -0.5)), "q_scale_max.*found -0.5"),
    "overflow": (change(q_scale_max=put(0, 8192.0)), "q_scale_max.*found 8192.0 in group 0.*below 65504 / 8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_rule_is_checked(name):
    edit, text = BROKEN[name]
    good = make(rows=128, groups=[(4, 64), (3, 64)], bias=torch.zeros(32, dtype=torch.float16))
    with pytest.raises(FormatError, match=text) as caught:
        edit(good).validate("layer.q_proj", file="x.safetensors")
    assert str(caught.value).startswith("x.safetensors: tensor 'layer.q_proj.")


def test_architecture_extents_are_checked():
    good = make(rows=128, columns=64)
    good.validate(in_features=128, out_features=50)
    with pytest.raises(FormatError, match="expected 256, the layer's in_features"):
        good.validate(in_features=256)
    with pytest.raises(FormatError, match="expected 96 columns, the layer's 65 out_features padded to 32"):
        good.validate(out_features=65)


def test_q_invperm_of_any_integer_width_becomes_int32():
    good = make()
    for dtype in (torch.int16, torch.int64):
        assert dataclasses.replace(good, q_invperm=good.q_invperm.to(dtype)).validate().q_invperm.dtype == torch.int32


class Memory(dict):
    """The smallest store."""

    def info(self, name):
        if name not in self:
            raise FormatError(f"tensor {name!r}: found none")
        return self[name]

    read = info


def test_read_from_any_store():
    good = make(bias=torch.zeros(32, dtype=torch.float16))
    store = Memory(good.tensors("a.q_proj") | {"a.q_proj.q_perm": torch.ones(1)})  # a stored q_perm means nothing
    read = Exl2Tensors.read(store, "a.q_proj", in_features=128, out_features=32)
    assert torch.equal(read.reconstruct(), good.reconstruct()) and read.bias is not None
    del store["a.q_proj.q_invperm"]
    with pytest.raises(FormatError, match="q_invperm"):
        Exl2Tensors.read(store, "a.q_proj")
