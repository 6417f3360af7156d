"""Quantised pools: the codes themselves, and the bytes that kernels write against the torch definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb import ops
from exl2nb.ops import kv_codes
from exl2nb.ops.kv_codes import Coding

from .cases import new_pool

CODINGS = [Coding(4), Coding(8), Coding(8, float8=True)]
names = ["q4", "q8", "fp8"]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(t):
    return t.view(torch.uint8)


@pytest.mark.parametrize("D", [8, 16, 24, 32, 80, 128, 256])
def test_rotation_is_its_own_inverse_and_keeps_products(D):
    a, b = randn(5, D), randn(5, D, seed=1)
    torch.testing.assert_close(kv_codes.rotate_groups(kv_codes.rotate_groups(a)), a)
    torch.testing.assert_close((kv_codes.rotate_groups(a) * kv_codes.rotate_groups(b)).sum(-1), (a * b).sum(-1))
    one = torch.zeros(32)
    one[5] = 32**0.5
    signs = torch.tensor([(-1.0) ** bin(5 & i).count("1") for i in range(32)])
    torch.testing.assert_close(kv_codes.rotate_groups(one), signs)


@pytest.mark.parametrize(("coding", "most"), list(zip(CODINGS, (0.0070, 0.00004, 0.0007))), ids=names)
def test_error_of_gaussian_numbers(coding, most):
    """Relative squared error; 4 bits with a plain largest-number scale would be 0.0078, with a symmetric grid of 15 levels 0.0095."""
    x = randn(4000, 64).half().float()
    back = kv_codes.decode_rows(*kv_codes.encode_rows(x, coding), coding)
    assert float((back - x).square().sum() / x.square().sum()) < most


def test_known_bytes():
    """One number in a group of 32 turns into 32 of the same size: the largest level of the long side, 8 steps up or down."""
    x = torch.zeros(32)
    x[0] = 32**0.5
    codes, scale = kv_codes.encode_rows(x, Coding(4))
    assert codes.tolist() == [0xFF] * 16
    assert scale.tolist() == [torch.tensor(float(x[0].half()) / 32**0.5 / 8).half().item()]
    codes, scale = kv_codes.encode_rows(-x, Coding(4))
    assert codes.tolist() == [0xFF] * 16
    assert float(scale) < 0
    codes, _ = kv_codes.encode_rows(torch.arange(32) * 14.0, Coding(8, float8=True))
    assert codes.tolist() == (torch.arange(32) * 14 * 448 / 434).to(torch.float8_e4m3fn).view(torch.uint8).tolist()


@pytest.mark.parametrize("coding", CODINGS, ids=names)
def test_special_numbers(coding):
    zero = kv_codes.encode_rows(-torch.zeros(64), coding)
    assert zero[1].view(torch.int16).tolist() == [0, 0]
    assert (kv_codes.decode_rows(*zero, coding) == 0).all()
    x = randn(64)
    for bad in (float("nan"), float("inf"), -float("inf"), 1e6):
        x[40] = bad
        codes, scale = kv_codes.encode_rows(x, coding)
        assert scale[0].isfinite()
        assert scale[1].isnan()
        assert not codes[codes.shape[0] // 2 :].any()
    largest = 65504 * randn(32).sign()
    torch.testing.assert_close(kv_codes.decode_rows(*kv_codes.encode_rows(largest, coding), coding), largest, rtol=0.15, atol=0)
    smallest = torch.full((32,), 2.0**-24)
    assert kv_codes.decode_rows(*kv_codes.encode_rows(smallest, coding), coding).abs().max() <= 2.0**-22


def test_an_empty_pool_reads_as_zeros():
    for kind in names:
        pool = new_pool(kind, 2, 3, 40)
        bits(pool).zero_()
        assert (kv_codes.read_pages(pool, torch.tensor([1]), 40) == 0).all()


def written(x, kinds):
    """Pools of `kinds` holding x `(T, heads, D)` as K and V in slots 3, 4, .., written by the kernel."""
    T, heads, D = x.shape
    eye = torch.eye(heads * D)
    blob = ops.pack_dense(torch.cat([eye, eye, eye]))
    pools = [new_pool(kind, 1, heads, D) for kind in kinds]
    still = torch.ones(1, 0)
    where = (torch.zeros(T, dtype=torch.int32), torch.arange(3, 3 + T).int(), *pools)
    ops.QkvOp(blob=blob, cos=still, sin=still, num_heads=heads, num_kv_heads=heads, head_dim=D)(x.reshape(T, -1), *where)
    return pools


def assert_same_bytes(x, kinds=(("q4", "q8"), ("fp8", "q4"))):
    for pair in kinds:
        for kind, ours in zip(pair, written(x, pair)):
            expected = new_pool(kind, 1, x.shape[1], x.shape[2])
            kv_codes.write_slots(expected, torch.arange(3, 3 + len(x)), x)
            assert torch.equal(bits(ours), bits(expected)), kind


@pytest.mark.parametrize("D", [8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 160, 256])
def test_kernel_writes_the_bytes_of_the_definition(D):
    x = randn(9, 2, D) * torch.logspace(-8, 4, 9)[:, None, None]
    x[3, 1] = 0
    x[4, 0, : D // 2] = -1.0
    x[5, 1] = torch.arange(D).float() - 3
    assert_same_bytes(x)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 0xFFFF), min_size=32, max_size=32), st.integers(0, 2))
def test_kernel_writes_the_bytes_of_the_definition_for_any_finite_half(halves, same):
    numbers = torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = torch.where(numbers.isfinite(), numbers.float(), 1.0).view(1, 1, 32).contiguous() + 0.0  # -0 does not pass a matrix product
    x[..., : 10 * same] = x[0, 0, 0]
    assert_same_bytes(x)


def test_kernel_marks_what_is_not_finite():
    """A value too large for fp16 spoils its own group of 32 and no other; the matrix product would spread a NaN, so it is made here."""
    x = randn(2, 1, 64)
    x[0, 0, 7], x[1, 0, 60] = 7e4, -7e4
    assert_same_bytes(x)
    pool = written(x, ("q4", "q4"))[0]
    nan = kv_codes.read_pages(pool, torch.tensor([0]), 64)[0, 0, 3:5].isnan()
    assert nan.tolist() == [[True] * 32 + [False] * 32, [False] * 32 + [True] * 32]
