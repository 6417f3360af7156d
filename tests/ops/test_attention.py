"""Paged attention against the reference, and the same bits however a prompt is cut."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops._library import REFERENCES

from .model_case import P, i32


def case(lengths, queries, Hq, Hkv, D, *, dtype=torch.float16, page=P, seed=0):
    """Random q and pools; unused pages and slots hold NaN, which must not be read into a result."""
    g = torch.Generator().manual_seed(seed)
    max_pages = max(-(-n // page) for n in lengths)
    total = sum(-(-n // page) for n in lengths) + 2
    order = torch.randperm(total, generator=g)
    k, v = (torch.full((total, Hkv, page, D), float("nan"), dtype=dtype) for _ in range(2))
    table = torch.full((len(lengths), max_pages), -7, dtype=torch.int32)
    used = 0
    for b, n in enumerate(lengths):
        for i in range(-(-n // page)):
            table[b, i] = order[used]
            filled = min(page, n - i * page)
            for pool in (k, v):
                pool[order[used], :, :filled] = torch.randn(Hkv, filled, D, generator=g).to(dtype)
            used += 1
    q = torch.randn(sum(queries), Hq, D, generator=g)
    bounds = [sum(queries[:i]) for i in range(len(queries) + 1)]
    return q, k, v, table, i32(bounds), i32(lengths)


def check(args, *, window=0, softcap=0.0):
    scale = args[0].shape[2] ** -0.5
    ours = ops.paged_attention(*args, scale=scale, window=window, softcap=softcap)
    expected = REFERENCES["paged_attention"](*args, scale, window, softcap)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("Hq", "Hkv"), [(2, 2), (4, 2), (4, 1), (8, 1), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gqa(Hq, Hkv, dtype):
    check(case([1, 300, 40], [1, 3, 40], Hq, Hkv, 32, dtype=dtype))


@pytest.mark.parametrize("D", [8, 24, 32, 40, 64, 72, 80, 96, 104, 128, 160, 256])
def test_head_dims(D):
    check(case([270], [9], 4, 2, D))


@pytest.mark.parametrize("length", [1, 7, 8, 255, 256, 257, 511, 512, 513, 700])
@pytest.mark.parametrize("queries", [1, 2, 0])
def test_page_edges(length, queries):
    check(case([length], [min(length, queries) or length], 4, 2, 16))


@pytest.mark.parametrize("window", [1, 5, 255, 256, 257, 300, 1000])
def test_window(window):
    check(case([600, 20], [70, 1], 4, 2, 32), window=window)
    check(case([600], [1], 4, 2, 32), window=window)


@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap(softcap):
    check(case([300, 4], [50, 4], 2, 1, 32), softcap=softcap)


def test_scores_far_apart():
    """Large scores of both signs: the maximum moves between pages without overflow."""
    q, k, v, table, bounds, lens = case([700], [12], 2, 1, 32)
    check((q * 300, k, v, table, bounds, lens))


def test_small_pages_and_many_sequences():
    check(case([3, 17, 40, 16], [3, 1, 5, 0], 4, 2, 16, page=16))


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (100, 0.0), (0, 20.0)])
def test_bits_do_not_depend_on_chunks_or_threads(window, softcap):
    n, Hq = 600, 8
    q, k, v, table, _, _ = case([n], [n], Hq, 2, 64)
    options = {"scale": 0.125, "window": window, "softcap": softcap}
    whole = ops.paged_attention(q, k, v, table, i32([0, n]), i32([n]), **options)
    for step in (1, 7, 64, 256):
        starts = range(0, n, step)
        if step == 1:
            starts = [*range(0, n, 97), 255, 256, 257]
        for a in starts:
            e = min(n, a + step)
            piece = ops.paged_attention(q[a:e].contiguous(), k, v, table, i32([0, e - a]), i32([e]), **options)
            assert torch.equal(piece, whole[a:e]), (step, a)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.paged_attention(q, k, v, table, i32([0, n]), i32([n]), **options), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": i32([[0, 9]])}, "a page of block_table is 9; expected 0 to 3"),
        ({"block_table": i32([[-1, 0]])}, "a page of block_table is -1"),
        ({"block_table": i32([[0]])}, "expected at most 256"),
        ({"cu_seqlens": i32([0, 2])}, "must start at 0 and end at 3"),
        ({"cu_seqlens": i32([1, 3])}, "must start at 0"),
        ({"context_lens": i32([2])}, "context_lens is 2 for a sequence with 3 queries"),
        ({"window": -1}, "window is -1"),
        ({"q": torch.zeros(3, 3, 32)}, "q has 3 heads"),
        ({"q": torch.zeros(3, 4, 16)}, "k_pool is float16"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    q, k, v, table, bounds, lens = case([300], [3], 4, 2, 32)
    args = {"q": q, "k_pool": k, "v_pool": v, "block_table": table, "cu_seqlens": bounds, "context_lens": lens, "scale": 1.0, **change}
    with pytest.raises(RuntimeError, match=f"paged_attention: .*{message}"):
        ops.paged_attention(**args)
