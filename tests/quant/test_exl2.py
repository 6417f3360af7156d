"""EXL2 matrices: encoded, checked, stored, read whole and in slices; every decoder against a scalar one written from the format's text."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb import ops
from exl2nb.core.errors import FormatError, OptionError
from exl2nb.io.safetensors import SafetensorsFile, save
from exl2nb.io.shards import TensorStore
from exl2nb.ops._library import REFERENCE_OPS
from exl2nb.quant.exl2 import Exl2Tensors, encode
from exl2nb.quant.exl2_slice import ROWS_PER_UNIT, Exl2Slices
from exl2nb.quant.pack import unpack_codes

DATA = Path(__file__).parents[1] / "data"
FIELDS = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
WIDTHS = (2, 3, 4, 5, 6, 8)


def decode(q_weight, q_scale, q_scale_max, q_groups, q_invperm, prescale=1.0):
    """NumPy arrays as stored -> float16 (K, N), rows in original order: slow, scalar, sharing no code with the package."""
    words = q_weight.view(np.uint32)
    scales = q_scale.view(np.uint32)
    total_words, columns = words.shape
    rows = len(q_invperm)
    stored = np.zeros((rows, columns), np.float16)
    row = 0
    for g in range(len(q_groups) // 2):
        bits, start = int(q_groups[2 * g]), int(q_groups[2 * g + 1])
        end = int(q_groups[2 * g + 3]) if 2 * g + 3 < len(q_groups) else total_words
        unit = np.float16(np.float32(q_scale_max[g]) * np.float32(prescale / 256))
        for r in range((end - start) * 32 // bits):
            for n in range(columns):
                code = 0
                for t in range(bits):
                    p = r * bits + t
                    code |= ((int(words[start + p // 32, n]) >> (p % 32)) & 1) << t
                index = (int(scales[g, n // 8]) >> (4 * (n % 8))) & 15
                step = np.float16(np.float32((index + 1) ** 2) * np.float32(unit))
                stored[row, n] = np.float16(np.float32(code - 2 ** (bits - 1)) * np.float32(step))
            row += 1
    assert row == rows
    original = np.empty_like(stored)
    for i in range(rows):
        original[i] = stored[q_invperm[i]]
    return original


def groups_of(rng, rows):
    """A random legal group table: widths falling, sizes any multiple of 32."""
    sizes = []
    while (left := rows - sum(sizes)) > 0:
        sizes.append(min(left, 32 * int(rng.integers(1, 5))))
    widths = sorted((int(b) for b in rng.choice([2, 3, 4, 5, 6, 8], len(sizes))), reverse=True)
    return list(zip(widths, sizes))


def random_parts(rng, rows, columns, groups=None):
    """Random arguments for `encode`: codes, scale_index, scale_max, groups, perm as NumPy arrays."""
    groups = groups or groups_of(rng, rows)
    codes = np.concatenate([rng.integers(0, 1 << b, (r, columns), dtype=np.uint8) for b, r in groups])
    index = rng.integers(0, 16, (len(groups), columns), dtype=np.uint8)
    scale_max = np.exp(rng.uniform(np.log(1e-5), np.log(0.5), len(groups))).astype(np.float16)
    return codes, index, scale_max, groups, rng.permutation(rows)


def stored(tensors):
    return [getattr(tensors, name) for name in FIELDS]


DECODERS = {
    "package": Exl2Tensors.reconstruct,
    "op": lambda tensors: ops.reconstruct(*stored(tensors)),
    "reference of the op": lambda tensors: REFERENCE_OPS["reconstruct"](*stored(tensors)),
}


def encoded(parts, perm=None, **options):
    """`encode` of the NumPy arrays that `random_parts` returns."""
    codes, index, scale_max, groups, order = parts
    return encode(*map(torch.from_numpy, (codes, index, scale_max)), groups, torch.from_numpy(order) if perm is None else perm, **options)


def make(seed=0, rows=128, columns=32, groups=None, bias=None):
    return encoded(random_parts(np.random.default_rng(seed), rows, columns, groups), bias=bias)


def truth(tensors, prescale=1.0):
    return decode(*(tensor.numpy() for tensor in stored(tensors)), prescale=prescale)


def same_bits(ours, theirs):
    return np.array_equal(ours.numpy().view(np.uint16), theirs.view(np.uint16))


def same_tensors(one, other):
    """Values, dtypes and shapes of all stored tensors."""
    ours, theirs = one.tensors("w"), other.tensors("w")
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) and t.dtype == theirs[n].dtype for n, t in ours.items())


def encoded_again(tensors):
    return encode(tensors.codes(), tensors.scale_index(), tensors.q_scale_max, tensors.groups, tensors.perm, bias=tensors.bias)


# ---- Decoding


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("groups", [None, [(8, 32), (6, 64), (5, 32), (4, 128), (3, 32), (2, 32)], *([(b, 64), (b, 32)] for b in WIDTHS)])
def test_decoders_equal_the_scalar_one(decoder, groups):
    for seed in range(12 if groups is None else 1):
        tensors = make(seed, 32 * (1 + seed) if groups is None else sum(rows for _, rows in groups), 32, groups)
        assert same_bits(decoder(tensors), truth(tensors))
        assert groups in (None, tensors.groups)


def test_prescale():
    tensors = make(3)
    assert same_bits(tensors.reconstruct(0.22), truth(tensors, 0.22))


def test_subnormal_units_survive_flush_to_zero():
    """The unit of small weights is a subnormal half; a process that flushes fp32 subnormals must not lose it."""
    scale_max = torch.tensor([1e-5, 3e-5], dtype=torch.float16)
    tensors = dataclasses.replace(make(1, rows=64, groups=[(8, 32), (4, 32)]), q_scale_max=scale_max)
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
    """The numbers worked out in the format's text, subnormal steps included."""
    half = torch.from_numpy(np.array([scale_max], np.uint16).view(np.float16))
    tensors = encode(
        torch.full((32, 32), code, dtype=torch.uint8), torch.full((1, 32), index, dtype=torch.uint8), half, [(bits, 32)], torch.arange(32)
    )
    assert tensors.steps().numpy().view(np.uint16)[0, 0] == step
    assert all((decoder(tensors).numpy().view(np.uint16) == weight).all() for decoder in DECODERS.values())
    assert np.float16(np.float32(half.item()) / 256).view(np.uint16) == unit


def test_worked_group_tables():
    table = make(rows=128, groups=[(4, 32), (3, 32), (3, 32), (3, 32)])
    assert table.q_groups.tolist() == [4, 0, 3, 4, 3, 7, 3, 10] and table.q_weight.shape[0] == 13
    assert make(rows=64, groups=[(5, 32), (2, 32)]).q_groups.numpy().tobytes() == bytes.fromhex("0500000002000500")


def test_permutation_example():
    perm = torch.tensor([2, 0, 3, 1, *list(range(4, 32))])
    tensors = encoded(random_parts(np.random.default_rng(2), 32, 32), perm)
    assert tensors.q_invperm[:4].tolist() == [1, 3, 0, 2] and torch.equal(tensors.perm, perm)
    assert torch.equal(
        tensors.reconstruct()[2, 0], (tensors.codes()[0, 0].float() - (1 << (tensors.groups[0][0] - 1))).half() * tensors.steps()[0, 0]
    )


# ---- Encoding and checking


def test_encode_pads_columns_with_the_zero_code():
    tensors = make(3, 96, 50, [(8, 32), (3, 64)], bias=torch.ones(50, dtype=torch.float16))
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


@pytest.mark.parametrize("seed", range(60))
def test_damaged_tensors_are_refused_or_still_a_matrix(seed):
    """Random damage: either a named error, or values that every reader decodes alike. Never a crash, never a read outside."""
    rng = np.random.default_rng(seed)
    good = encoded(random_parts(rng, 32 * int(rng.integers(1, 8)), 32))
    field = FIELDS[seed % len(FIELDS)]
    tensor = getattr(good, field).clone()
    flat = tensor.view(torch.uint8).reshape(-1)
    for _ in range(int(rng.integers(1, 4))):
        flat[int(rng.integers(len(flat)))] ^= 1 << int(rng.integers(8))
    bad = dataclasses.replace(good, **{field: tensor})
    try:
        checked = bad.validate("x.q_proj", file="f")
    except FormatError as error:
        refused = str(error)
    else:
        refused = ""
        assert ops.reconstruct(*stored(checked)).numpy().tobytes() == checked.reconstruct().numpy().tobytes()
        assert torch.isfinite(checked.reconstruct()).all()
    assert refused or field in ("q_weight", "q_scale", "q_scale_max", "q_groups")
    assert not refused or f"'x.q_proj.{field}'" in refused or field == "q_groups"


@pytest.mark.parametrize("field", FIELDS)
def test_other_shapes_and_dtypes_are_refused(field):
    good = make(rows=64)
    t = getattr(good, field)
    for wrong in (t.unsqueeze(0), t.reshape(-1)[:-1], torch.cat([t, t]), t[:0], t.double(), t.to(torch.uint8), t.new_empty(0)):
        with pytest.raises(FormatError, match="found .*, expected"):
            dataclasses.replace(good, **{field: wrong}).validate()


# ---- Files and blobs


class Store(dict):
    """Tensors in memory, and what was read of which."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.asked = []

    def info(self, name):
        if name not in self:
            raise FormatError(f"tensor {name!r}: found none")
        return self[name]

    def read(self, name, *, rows=None):
        self.asked.append((name.rpartition(".")[2], rows))
        return self[name] if rows is None else self[name][rows[0] : rows[1]]


def test_read_from_any_store():
    good = make(bias=torch.zeros(32, dtype=torch.float16))
    store = Store(good.tensors("a.q_proj") | {"a.q_proj.q_perm": torch.ones(1)})  # a stored q_perm means nothing
    read = Exl2Tensors.read(store, "a.q_proj", in_features=128, out_features=32)
    assert torch.equal(read.reconstruct(), good.reconstruct()) and read.bias is not None
    del store["a.q_proj.q_invperm"]
    with pytest.raises(FormatError, match="q_invperm"):
        Exl2Tensors.read(store, "a.q_proj")


@st.composite
def matrices(draw):
    widths = sorted(draw(st.lists(st.sampled_from([2, 3, 4, 5, 6, 8]), min_size=1, max_size=4)), reverse=True)
    groups = [(bits, 32 * draw(st.integers(1, 6))) for bits in widths]
    columns = draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bias = torch.from_numpy(rng.standard_normal(columns).astype(np.float16)) if draw(st.booleans()) else None
    return encoded(random_parts(rng, sum(rows for _, rows in groups), columns, groups), bias=bias)


@settings(max_examples=40, deadline=None)
@given(matrices(), st.integers(0, 31))
def test_file_op_and_blob_hold_the_same_matrix(tmp_path_factory, matrix, dropped):
    path = tmp_path_factory.mktemp("m") / "a.safetensors"
    save(path, matrix.tensors("x.q_proj"))
    with SafetensorsFile(path) as file:
        read = Exl2Tensors.read(file, "x.q_proj", in_features=matrix.in_features)
    assert same_tensors(read, matrix) and same_tensors(encoded_again(matrix), matrix)
    assert read.groups == matrix.groups
    expected = matrix.reconstruct().numpy()
    assert all(decoder(read).numpy().tobytes() == expected.tobytes() for decoder in DECODERS.values())
    wanted = max(1, matrix.out_features - dropped)
    blob = ops.pack_exl2(*stored(matrix), out_features=wanted)
    assert ops.shape(blob) == (matrix.in_features, wanted)
    found = ops.unpack(blob).half().numpy()  # the blob leaves the format's last rounding to fp16 out
    assert np.array_equal(found.view(np.uint16), expected[:, :wanted].view(np.uint16))


# ---- Slices: one unit of a matrix in a file


GROUPS = {
    "all widths": [(8, 32), (6, 64), (5, 32), (4, 96), (3, 32), (2, 64)],
    "one large group": [(3, 320)],
    "smallest": [(2, 32)],
}


@pytest.fixture(params=GROUPS, ids=list(GROUPS))
def made(request):
    groups = GROUPS[request.param]
    tensors = make(5, sum(count for _, count in groups), 64, groups)
    tensors.q_scale_max[0] = 0.0005  # its unit step is a subnormal
    return tensors


def test_every_unit_equals_reconstruct(made):
    store = Store(made.tensors("m"))
    slices, whole, codes = Exl2Slices(store, "m"), made.reconstruct(), made.codes()
    first = 0
    for group, (bits, count) in enumerate(made.groups):
        for unit in range(slices.units(group)):
            for column in (0, 7, 8, 63):
                one = slices.unit(group, unit, column)
                at = first + ROWS_PER_UNIT * unit
                assert (one.bits, one.first_row) == (bits, at)
                assert one.codes == tuple(codes[at : at + ROWS_PER_UNIT, column].tolist())
                expected = whole[list(one.rows), column].numpy()
                assert one.weights.dtype == np.float16
                assert one.weights.tobytes() == expected.tobytes()
                assert one.scale_index == int(made.scale_index()[group, column])
                assert one.step == float(made.steps()[group, column])
                again = torch.tensor(one.words).to(torch.int32)[:, None]
                assert unpack_codes(again, bits)[:, 0].tolist() == list(one.codes)
                assert one.scale_word >> 4 * (column % 8) & 15 == one.scale_index
        first += count


def test_locate_finds_every_row(made):
    slices = Exl2Slices(Store(made.tensors("m")), "m")
    for row in range(0, slices.in_features, 7):
        group, unit, place = slices.locate(row)
        assert slices.unit(group, unit, 1).rows[place] == row


def test_only_slices_are_read(made):
    store = Store(made.tensors("m"))
    slices = Exl2Slices(store, "m")
    assert {name for name, _ in store.asked} == {"q_groups", "q_invperm", "q_scale_max"}
    store.asked.clear()
    slices.unit(0, 0, 5)
    bits = made.groups[0][0]
    assert store.asked == [("q_weight", (0, bits)), ("q_scale", (0, 1))]


def test_places_that_are_none(made):
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


def test_a_broken_file_is_named(made):
    tensors = made.tensors("m")
    tensors["m.q_invperm"] = torch.zeros_like(tensors["m.q_invperm"])
    with pytest.raises(FormatError, match=r"m\.q_invperm"):
        Exl2Slices(Store(tensors), "m")


# ---- The model that exllamav2 made: read, checked, decoded to committed checksums, and encoded again byte for byte


@pytest.fixture(scope="module")
def store():
    with TensorStore(DATA / "demo-exl2-4.0bpw") as store:
        yield store


def prefixes(store):
    return sorted(name.removesuffix(".q_weight") for name in store.names() if name.endswith(".q_weight"))


def test_reconstruction_checksums(store):
    lines = (DATA / "demo-exl2-4.0bpw.reconstruct.sha256").read_text().splitlines()
    expected = dict(reversed(line.split()) for line in lines)
    found = {p: hashlib.sha256(Exl2Tensors.read(store, p).reconstruct().numpy().tobytes()).hexdigest()[:16] for p in prefixes(store)}
    assert len(found) == 85 and found == expected


def test_encoding_again_gives_the_same_bytes(store):
    for prefix in prefixes(store):
        read = Exl2Tensors.read(store, prefix)
        for name, tensor in encoded_again(read).tensors(prefix).items():
            original = store.read(name)
            assert tensor.dtype == original.dtype and tensor.shape == original.shape
            assert tensor.numpy().tobytes() == original.numpy().tobytes(), name


@pytest.mark.parametrize("prefix", ["model.layers.0.self_attn.k_proj", "model.layers.7.self_attn.k_proj"])
def test_scalar_decoder_agrees(store, prefix):
    read = Exl2Tensors.read(store, prefix)
    assert truth(read).tobytes() == read.reconstruct().numpy().tobytes()
