"""What a prompt needs between torch's products: the kernels against their references, and the choice of an attention."""

import math
import sys

import pytest
import torch

from exl2nb.ops import cuda_attention, prefill_attention
from exl2nb.ops._library import REFERENCE_OPS
from exl2nb.ops.reference import ACTIVATION_NAMES

OPS = torch.ops.exl2nb
PUBLISHED = """
CALLS = []
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                    deterministic=False, return_attn_probs=False):
    import torch
    CALLS.append((causal, window_size, softcap))
    assert causal and q.dim() == 4 and k.shape == v.shape and k.shape[0] == 1
    n, length, share = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(share, 2).float() for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) * softmax_scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    behind = torch.arange(length - n, length)[:, None] - torch.arange(length)[None]
    seen = (behind >= 0) & ((behind <= window_size[0]) if window_size[0] >= 0 else True)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).to(q.dtype)
"""


def test_an_overflow_stays_finite():
    wide = torch.full((1, 4), 1e6)
    assert cuda_attention.norm_rows(wide, None, None, 1e-5, False).isfinite().all()
    assert cuda_attention.gate_rows(torch.full((1, 8), 6e4, dtype=torch.float16), 0, True).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 30, 256, 4096, 4100, 10001])
@pytest.mark.parametrize("tokens", [1, 77])
def test_rows_on_the_gpu(width, tokens):
    g = torch.Generator().manual_seed(width)
    x, weight, bias = (torch.randn(*shape, generator=g) for shape in ((tokens, width), (width,), (width,)))
    for arguments in ((weight, None, False), (weight, bias, True), (None, None, False)):
        args = (x, *arguments[:2], 1e-5, arguments[2])
        want = REFERENCE_OPS["norm_rows"](*args).float()
        got = OPS.norm_rows(*(a.cuda() if torch.is_tensor(a) else a for a in args)).cpu().float()
        assert float((got - want).abs().max()) <= 2e-3 * float(want.abs().max())
    y = torch.randn(tokens, 2 * width, generator=g).half()
    for kind in range(len(ACTIVATION_NAMES)):
        for gated in (True, False):
            want = REFERENCE_OPS["gate_rows"](y, kind, gated).float()
            got = OPS.gate_rows(y.cuda(), kind, gated).cpu().float()
            assert float((got - want).abs().max()) <= 2e-3 * float(want.abs().max())


def turn_case(T=70, Hq=6, Hkv=2, D=48):
    g = torch.Generator().manual_seed(D)
    qkv = torch.randn(T, (Hq + 2 * Hkv) * D, generator=g).half()
    angles = torch.outer(torch.arange(90.0), torch.rand(D // 2, generator=g))
    slots = torch.randperm(512, generator=g)[:T].int()
    slots[3] = -1
    places = torch.randint(0, 90, (T,), generator=g).int()
    return [qkv, angles.cos(), angles.sin(), places, slots, *(torch.zeros(2, Hkv, 256, D).half() for _ in range(2)), Hq, Hkv, D]


def test_rotation_in_place_is_that_of_rope_append():
    mine, other = turn_case(), turn_case()
    qkv, (Hq, Hkv, D) = mine[0], mine[-3:]
    OPS.rotate_rows(*mine)
    want = cuda_attention.rope_append(other[0].float(), *other[1:7], None, None, Hq, Hkv, D, 1e-5, False, False, 0.0)
    assert torch.equal(qkv.view(len(qkv), -1, D), torch.cat(want, 1))
    assert torch.equal(mine[5], other[5])
    assert torch.equal(mine[6], other[6])


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 48, 64, 80, 128, 256])
def test_rotation_on_the_gpu(D):
    cpu = turn_case(D=D)
    cuda = [a.cuda() if torch.is_tensor(a) else a for a in cpu]
    REFERENCE_OPS["rotate_rows"](*cpu)
    OPS.rotate_rows(*cuda)
    for want, got in ((cpu[i], cuda[i].cpu()) for i in (0, 5, 6)):
        assert float((got.float() - want.float()).abs().max()) <= 4e-3


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A module with flash-attn's published function, and a GPU for it."""
    (tmp_path / "flash_attn").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    prefill_attention.flash_attention.cache_clear()
    yield lambda text: (tmp_path / "flash_attn" / "__init__.py").write_text(text)
    sys.modules.pop("flash_attn", None)
    prefill_attention.flash_attention.cache_clear()


def heads(n, length, Hq, Hkv, D=16):
    g = torch.Generator().manual_seed(n)
    return [torch.randn(rows, count, D, generator=g).half() for rows, count in ((n, Hq), (length, Hkv), (length, Hkv))]


@pytest.mark.parametrize(("n", "length"), [(9, 9), (3, 20)])
def test_flash_attn_and_torch_give_the_same(installed, n, length):
    q, k, v = heads(n, length, 4, 2)
    installed("raise ImportError('undefined symbol')")
    assert not prefill_attention.can_attend(16, window=4)
    assert "undefined symbol" in prefill_attention.flash_attention().why
    plain = prefill_attention.attend_prefix(q, k, v, scale=0.3)
    prefill_attention.flash_attention.cache_clear()
    sys.modules.pop("flash_attn", None)
    installed(PUBLISHED)
    assert prefill_attention.can_attend(16, window=4, softcap=20.0)
    got = prefill_attention.attend_prefix(q, k, v, scale=0.3)
    assert got.shape == (n, 64)
    assert float((got - plain).abs().max()) < 4e-3
    pools = [torch.zeros(1, 2, 256, 16) for _ in range(2)]
    for pool, rows in zip(pools, (k, v)):
        pool[0, :, :length] = rows.transpose(0, 1).float()
    places = [torch.tensor(values, dtype=torch.int32) for values in ([[0]], [0, n], [length])]
    want = REFERENCE_OPS["paged_attention"](q.float(), *pools, *places, 0.3, 4, 20.0)
    assert float((prefill_attention.attend_prefix(q, k, v, scale=0.3, window=4, softcap=20.0) - want).abs().max()) < 4e-3
    assert sys.modules["flash_attn"].CALLS == [(True, (-1, -1), 0.0), (True, (3, 0), 20.0)]


def test_on_hopper_torch_computes_what_it_computes_sooner(installed, monkeypatch):
    installed(PUBLISHED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for n, length, kv_heads, window, calls in (
        (512, 512, 4, 0, 0),
        (512, 512, 2, 0, 1),
        (511, 511, 4, 0, 2),
        (512, 512, 4, 100, 3),
        (9, 512, 4, 0, 4),
    ):
        prefill_attention.attend_prefix(*heads(n, length, 4, kv_heads), scale=0.3, window=window)
        assert len(sys.modules["flash_attn"].CALLS) == calls


def test_runs_of_keys_are_put_together():
    """Attention to runs of keys, weighted by their sums, is attention to all of them."""
    q, k, v = (t.float() for t in heads(5, 40, 4, 4))
    whole, parts, lse = torch.einsum("qhd,khd->hqk", q, k), [], []
    for first, end in ((0, 24), (24, 32), (32, 40)):
        scores = whole[:, :, first:end]
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[first:end]).half())
        lse.append(scores.logsumexp(-1))
    want = torch.einsum("hqk,khd->qhd", whole.softmax(-1), v)
    assert float((cuda_attention.merge_parts(parts, lse).float() - want).abs().max()) < 4e-3


def test_blocks_of_keys_have_lengths_that_recur():
    assert prefill_attention.blocks_before(2048, 32768) == [16384, 8192, 4096, 2048]
    assert prefill_attention.blocks_before(1024, 1024 + 2048 + 700) == [2048]  # the rest goes with the piece
    assert prefill_attention.blocks_before(2048, 2048 + 2047) == []
    assert prefill_attention.blocks_before(1000, 20000) == []
    seen = {block for length in range(2048, 1 << 17, 256) for block in prefill_attention.blocks_before(2048, length)}
    assert seen == {2048, 4096, 8192, 16384, 32768, 65536}


def dense(q, k, v, scale):
    """Causal attention of the last tokens in fp32, `(n, Hq * D)`."""
    share = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(share, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill_(~seen, -torch.inf).softmax(-1), v).flatten(1)


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(8, 2, 128), (4, 4, 64), (6, 2, 80)])
@pytest.mark.parametrize(("n", "length"), [(1024, 1024), (1024, 3072), (1024, 7400), (2048, 8192), (1000, 7000), (77, 500)])
def test_attention_of_a_piece(n, length, Hq, Hkv, D):
    """Whatever kernels run: near fp32, the same bits twice."""
    q, k, v = (t.cuda() for t in heads(n, length, Hq, Hkv, D))
    want, got = dense(q, k, v, D**-0.5), prefill_attention.attend_prefix(q, k, v, scale=D**-0.5)
    assert float((got.float() - want).abs().max()) < 2e-3 * float(want.abs().max())
    assert torch.equal(prefill_attention.attend_prefix(q, k, v, scale=D**-0.5), got)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 16])
def test_runs_of_keys_on_the_gpu(count):
    g = torch.Generator().manual_seed(count)
    parts, lse = (
        [torch.randn(70, 6, 40, generator=g).half() for _ in range(count)],
        [9 * torch.randn(6, 70, generator=g) for _ in range(count)],
    )
    want = REFERENCE_OPS["merge_parts"](parts, lse).float()
    got = OPS.merge_parts([t.cuda() for t in parts], [t.cuda() for t in lse]).cpu().float()
    assert float((got - want).abs().max()) <= 2e-3 * float(want.abs().max())


def test_a_flash_attn_that_is_too_old(installed):
    installed("def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False): ...")
    assert "window_size" in prefill_attention.flash_attention().why
    assert math.prod(prefill_attention.attend_prefix(*heads(2, 2, 1, 1), scale=1.0).shape) == 32


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("n", "length", "window", "softcap"), [
    (1, 1, 0, 0.0), (77, 77, 0, 0.0), (512, 512, 0, 0.0), (3, 300, 0, 0.0), (270, 1000, 0, 0.0), (270, 1000, 64, 0.0), (270, 1000, 0, 30.0),
    (300, 300, 100, 30.0),
])  # fmt: skip
def test_flash_attn_as_it_is_installed(n, length, window, softcap, D):
    """Against the reference in fp32; heads one to one, and four queries to a KV head."""
    if prefill_attention.flash_attention().call is None:
        pytest.skip(f"flash-attn: {prefill_attention.flash_attention().why}")
    for kv_heads in (4, 1):
        q, k, v = heads(n, length, 4, kv_heads, D)
        got = prefill_attention.attend_prefix(q.cuda(), k.cuda(), v.cuda(), scale=D**-0.5, window=window, softcap=softcap)
        pages = -(-length // 256)
        pools = [torch.zeros(pages, kv_heads, 256, D) for _ in range(2)]
        for pool, rows in zip(pools, (k, v)):
            for page in range(pages):
                part = rows[page * 256 : (page + 1) * 256]
                pool[page, :, : len(part)] = part.transpose(0, 1).float()
        places = [torch.tensor(values, dtype=torch.int32) for values in ([list(range(pages))], [0, n], [length])]
        want = REFERENCE_OPS["paged_attention"](q.float(), *pools, *places, D**-0.5, window, softcap)
        assert float((got.cpu().float() - want.view(n, -1)).abs().max()) < 2e-3 * float(want.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("length", [60, 300, 700])
def test_prompts_through_flash_attn(length, monkeypatch):
    """The demo model's logits behind a prompt are those without flash-attn, but for rounding."""
    if prefill_attention.flash_attention().call is None:
        pytest.skip(f"flash-attn: {prefill_attention.flash_attention().why}")
    import exl2nb as ex

    with ex.demo(progress=None, device="cuda") as llm:
        ids = [3 + i * 7 % 1000 for i in range(length)]
        llm.cache.reuse = False
        flash = torch.from_numpy(llm.generate(ids, max_tokens=1, temperature=0, return_logits=True).logits)
        monkeypatch.setattr(prefill_attention, "flash_attention", lambda: prefill_attention.FlashAttention(None, why="left out"))
        plain = torch.from_numpy(llm.generate(ids, max_tokens=1, temperature=0, return_logits=True).logits)
        again = torch.from_numpy(llm.generate(ids, max_tokens=1, temperature=0, return_logits=True).logits)
    assert torch.equal(plain, again)
    kl = (plain.log_softmax(-1).exp() * (plain.log_softmax(-1) - flash.log_softmax(-1))).sum()
    assert abs(float(kl)) < 1e-4
