"""Paged attention over pools of every storage against the reference, and the same bits however a prompt is cut."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops._library import REFERENCE_OPS

from .cases import P, attention_case, i32

PLAIN = [("fp16", "fp16"), ("fp32", "fp32")]
CODED = [("q4", "q4"), ("q8", "q4"), ("q8", "q8"), ("fp8", "fp8"), ("fp16", "q4"), ("q4", "fp32")]
CODED += [("fp16", "q8"), ("q8", "fp16"), ("q4", "fp16"), ("q4", "q8")]
pairs = pytest.mark.parametrize("pair", [*PLAIN, *CODED], ids="-".join)


def check(args, *, window=0, softcap=0.0):
    scale = args[0].shape[2] ** -0.5
    ours = ops.paged_attention(*args, scale=scale, window=window, softcap=softcap)
    expected = REFERENCE_OPS["paged_attention"](*args, scale, window, softcap)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)


@pairs
@pytest.mark.parametrize(("Hq", "Hkv"), [(2, 2), (4, 2), (4, 1), (8, 1), (6, 2)])
def test_gqa(pair, Hq, Hkv):
    check(attention_case([1, 300, 40], [1, 3, 40], Hq, Hkv, 32, pair))


@pairs
@pytest.mark.parametrize("D", [8, 24, 32, 40, 64, 72, 80, 96, 104, 128, 160, 256])
def test_head_dims(pair, D):
    check(attention_case([270], [9], 4, 2, D, pair))


@pytest.mark.parametrize("length", [1, 7, 8, 255, 256, 257, 511, 512, 513, 700])
@pytest.mark.parametrize("queries", [1, 2, 0])
def test_page_edges(length, queries):
    check(attention_case([length], [min(length, queries) or length], 4, 2, 16))


@pairs
@pytest.mark.parametrize(
    ("window", "softcap"), [*((n, 0.0) for n in (1, 5, 100, 255, 256, 257, 300, 1000)), (300, 20.0), (0, 1.0), (0, 5.0), (0, 30.0)]
)
def test_window_and_softcap(pair, window, softcap):
    check(attention_case([600, 20], [70, 1], 4, 2, 32, pair), window=window, softcap=softcap)
    check(attention_case([600], [1], 4, 2, 32, pair), window=window, softcap=softcap)


def test_scores_far_apart():
    """Large scores of both signs: the maximum moves between pages without overflow."""
    q, *rest = attention_case([700], [12], 2, 1, 32)
    check((q * 300, *rest))


def test_small_pages_and_many_sequences():
    check(attention_case([3, 17, 40, 16], [3, 1, 5, 0], 4, 2, 16, page=16))


@pytest.mark.parametrize("pair", [PLAIN[0], *CODED[:2], CODED[3]], ids="-".join)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (100, 0.0), (0, 20.0)])
def test_bits_do_not_depend_on_chunks_or_threads(pair, window, softcap, threads):
    n = 600
    q, k, v, table, _, _ = attention_case([n], [n], 8, 2, 64, pair)
    options = {"scale": 0.125, "window": window, "softcap": softcap}
    whole = ops.paged_attention(q, k, v, table, i32([0, n]), i32([n]), **options)
    steps = {1: [*range(0, n, 97), 255, 256, 257], **{step: range(0, n, step) for step in (7, 64, 256)}}
    for step, a in [(step, a) for step, starts in steps.items() for a in starts]:
        e = min(n, a + step)
        piece = ops.paged_attention(q[a:e].contiguous(), k, v, table, i32([0, e - a]), i32([e]), **options)
        assert torch.equal(piece, whole[a:e]), (step, a)
    threads(1)
    assert torch.equal(ops.paged_attention(q, k, v, table, i32([0, n]), i32([n]), **options), whole)


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
    names = ("q", "k_pool", "v_pool", "block_table", "cu_seqlens", "context_lens")
    args = {**dict(zip(names, attention_case([300], [3], 4, 2, 32))), "scale": 1.0, **change}
    with pytest.raises(RuntimeError, match=f"paged_attention: .*{message}"):
        ops.paged_attention(**args)


@pytest.mark.parametrize("attention", [torch.ops.exl2nb.paged_attention, REFERENCE_OPS["paged_attention"]], ids=["kernel", "reference"])
def test_a_coded_pool_of_another_head_dim_is_refused(attention):
    q, k, v, *rest = attention_case([5], [1], 2, 1, 32, ("q4", "q4"))
    for wrong in (torch.randn(1, 2, 64), torch.randn(1, 2, 40)):
        with pytest.raises((RuntimeError, ValueError), match=r"pool is .*uint8 \(3, 1, 4608\)"):
            attention(wrong, k, v, *rest, 1.0, 0, 0.0)
    with pytest.raises((RuntimeError, ValueError), match="v_pool is float16|pool is .*float16"):
        attention(q, k, torch.zeros(3, 1, P, 16, dtype=torch.float16), *rest, 1.0, 0, 0.0)
