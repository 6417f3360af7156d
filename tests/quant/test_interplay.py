"""Files, EXL2 codes and ops together: what is written is what is read, and nothing damaged gets past the checks."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb import ops
from exl2nb.core.errors import FormatError
from exl2nb.io.safetensors import SafetensorsFile, save
from exl2nb.quant.exl2 import Exl2Tensors, encode

from .oracle import decode, random_parts

FIELDS = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")


@st.composite
def matrices(draw, max_units=6):
    widths = sorted(draw(st.lists(st.sampled_from([2, 3, 4, 5, 6, 8]), min_size=1, max_size=4)), reverse=True)
    groups = [(bits, 32 * draw(st.integers(1, max_units))) for bits in widths]
    columns = draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes, index, scale_max, groups, perm = random_parts(rng, sum(rows for _, rows in groups), columns, groups)
    bias = torch.from_numpy(rng.standard_normal(columns).astype(np.float16)) if draw(st.booleans()) else None
    return encode(*map(torch.from_numpy, (codes, index, scale_max)), groups, torch.from_numpy(perm), bias=bias)


@settings(max_examples=40, deadline=None)
@given(matrices())
def test_through_a_file_and_back(tmp_path_factory, matrix):
    path = tmp_path_factory.mktemp("m") / "a.safetensors"
    save(path, matrix.tensors("x.q_proj"))
    with SafetensorsFile(path) as file:
        read = Exl2Tensors.read(file, "x.q_proj", in_features=matrix.in_features)
    for name, tensor in matrix.tensors("x.q_proj").items():
        assert torch.equal(read.tensors("x.q_proj")[name], tensor)
    assert read.groups == matrix.groups
    assert torch.equal(read.reconstruct(), matrix.reconstruct())


@settings(max_examples=15, deadline=None)
@given(matrices(max_units=2))
def test_scalar_decoder_and_op_agree_bit_for_bit(matrix):
    stored = [getattr(matrix, name) for name in FIELDS]
    ours = matrix.reconstruct()
    assert ours.numpy().tobytes() == decode(*(tensor.numpy() for tensor in stored)).tobytes()
    assert ops.reconstruct(*stored).numpy().tobytes() == ours.numpy().tobytes()


@settings(max_examples=15, deadline=None)
@given(matrices(), st.integers(0, 31))
def test_blob_holds_the_same_matrix(matrix, dropped):
    wanted = max(1, matrix.out_features - dropped)
    blob = ops.pack_exl2(*(getattr(matrix, name) for name in FIELDS), out_features=wanted)
    assert ops.shape(blob) == (matrix.in_features, wanted)
    found = ops.unpack(blob).half().numpy()  # the blob leaves the format's last rounding to fp16 out
    assert found.tobytes() == matrix.reconstruct()[:, :wanted].contiguous().numpy().tobytes()


@pytest.mark.parametrize("seed", range(60))
def test_damaged_tensors_are_refused_or_still_a_matrix(seed):
    """Random damage: either a named error, or values that every reader decodes alike. Never a crash, never a read outside."""
    rng = np.random.default_rng(seed)
    codes, index, scale_max, groups, perm = random_parts(rng, 32 * int(rng.integers(1, 8)), 32)
    good = encode(*map(torch.from_numpy, (codes, index, scale_max)), groups, torch.from_numpy(perm))
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
        stored = [getattr(checked, name) for name in FIELDS]
        assert ops.reconstruct(*stored).numpy().tobytes() == checked.reconstruct().numpy().tobytes()
        assert torch.isfinite(checked.reconstruct()).all()
    assert refused or field in ("q_weight", "q_scale", "q_scale_max", "q_groups")
    assert not refused or f"'x.q_proj.{field}'" in refused or field == "q_groups"


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes_and_dtypes_are_refused(seed):
    rng = np.random.default_rng(seed)
    codes, index, scale_max, groups, perm = random_parts(rng, 64, 32)
    good = encode(*map(torch.from_numpy, (codes, index, scale_max)), groups, torch.from_numpy(perm))
    field = FIELDS[int(rng.integers(len(FIELDS)))]
    tensor = getattr(good, field)
    edits = [
        tensor.unsqueeze(0),
        tensor.reshape(-1)[:-1],
        torch.cat([tensor, tensor]),
        tensor[:0],
        tensor.double(),
        tensor.to(torch.uint8),
        tensor.new_empty(0),
    ]
    with pytest.raises(FormatError, match="found .*, expected"):
        dataclasses.replace(good, **{field: edits[seed % len(edits)]}).validate()
