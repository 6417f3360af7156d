"""The CUDA attention kernels against the fp32 reference on the CPU, and their promises: same bits alone, in a batch, twice, in a graph."""

from copy import copy as shallow

import pytest
import torch

from exl2nb.ops import cuda_attention, kv_codes
from exl2nb.ops._library import REFERENCE_OPS

pytestmark = pytest.mark.gpu
P = 256
STORAGES = {"fp16": (16, 16), "fp32": (32, 32), "q8": (8, 8), "q8q4": (8, 4), "q4": (4, 4), "fp8": ("fp8", "fp8")}
APART = {"k16v8": (16, 8), "k16v4": (16, 4), "k8v16": (8, 16), "k4v16": (4, 16), "k4v8": (4, 8)}
STORAGES |= APART


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def new_pool(kind, pages, heads, D):
    if kind == 16 or kind == 32:
        return torch.full((pages, heads, P, D), float("nan"), dtype=torch.float16 if kind == 16 else torch.float32)
    bits = 8 if kind == "fp8" else kind
    pool = torch.full((pages, heads, kv_codes.row_bytes(D, bits)), 255, dtype=torch.uint8)  # scales are NaN: unread slots must stay unread
    return pool.view(torch.float8_e4m3fn) if kind == "fp8" else pool


class Case:
    """Random sequences in mid-decode: the cache holds everything but this step's tokens."""

    def __init__(self, contexts, queries, Hq, Hkv, D, *, storage="fp16", seed=0, half=None, **options):
        g = torch.Generator().manual_seed(seed)
        self.contexts, self.queries, self.Hq, self.Hkv, self.D = contexts, queries, Hq, Hkv, D
        needs = [-(-n // P) for n in contexts]
        total = sum(needs) + 3
        order = torch.randperm(total, generator=g)
        self.k_pool, self.v_pool = (new_pool(kind, total, Hkv, D) for kind in STORAGES[storage])
        self.table = torch.full((len(contexts), max(needs) + 1), -7, dtype=torch.int32)
        used = 0
        for b, n in enumerate(contexts):
            self.table[b, : needs[b]] = order[used : used + needs[b]].int()
            used += needs[b]
            old = torch.arange(n - queries[b])
            slots = self.table[b, old // P].long() * P + old % P
            for pool in (self.k_pool, self.v_pool):
                kv_codes.write_slots(pool, slots, torch.randn(len(old), Hkv, D, generator=g))
        T, half = sum(queries), D // 2 if half is None else half
        angles = torch.rand(max(contexts) + 1, half, generator=g) * 6.3
        self.cos, self.sin = angles.cos(), angles.sin()
        self.qkv = torch.randn(T, (Hq + 2 * Hkv) * D, generator=g)
        self.bounds, self.lens = i32([sum(queries[:i]) for i in range(len(queries) + 1)]), i32(contexts)
        self.inverse = [torch.randperm(Hq * D, generator=g).int() for _ in range(2)]
        self.options = {"q_norm": None, "k_norm": None, "eps": 1e-5, "layer_norm": False, "interleaved": False, "clip": 0.0}
        self.options |= {"scale": D**-0.5, "window": 0, "softcap": 0.0, "large_chunks": False}
        self.options.update(options)
        self.workspace = torch.zeros(1, dtype=torch.uint8)

    def cuda(self):
        other = object.__new__(Case)
        for name, value in vars(self).items():
            value = [t.cuda() for t in value] if name == "inverse" else value.cuda() if isinstance(value, torch.Tensor) else value
            setattr(other, name, value)
        other.options = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in self.options.items()}
        size = torch.ops.exl2nb.attention_workspace(other.qkv, sum(self.queries), self.Hq, self.Hkv, self.D)
        other.workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        return other

    def args(self, pdl=False):
        o = self.options
        return (
            self.qkv, self.cos, self.sin, None, self.k_pool, self.v_pool, self.table, self.bounds, self.lens, self.workspace, o["q_norm"],
            o["k_norm"], self.inverse, self.Hq, self.Hkv, self.D, o["eps"], o["layer_norm"], o["interleaved"], o["clip"], o["scale"],
            o["window"], o["softcap"], pdl, o["large_chunks"],
        )  # fmt: skip

    def run(self, pdl=False):
        return cuda_attention.attention_step(*self.args(pdl))

    def check(self, tolerance=4e-3):
        gpu = self.cuda()
        out, x = gpu.run()
        expected, _ = REFERENCE_OPS["attention_step"](*self.args())
        assert out.isfinite().all()
        error = (out.cpu() - expected).abs().max() / expected.abs().max()
        assert error < tolerance, f"relative error {error:.2e}"
        for copy, order in zip(x.cpu(), self.inverse):
            assert torch.equal(copy[:, cuda_attention.fragment_place(order.long())], out.cpu().half())
        assert (gpu.workspace.sum() >= 0).item()
        return gpu


@pytest.mark.parametrize("D", [8, 24, 64, 80, 96, 104, 112, 128, 256])
@pytest.mark.parametrize("storage", STORAGES)
def test_head_dims(D, storage):
    Case([270, 31], [1, 2], 4, 2, D, storage=storage).check()


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 4), (32, 32), (8, 2), (32, 8), (8, 1), (16, 1), (6, 2), (71, 1)])
@pytest.mark.parametrize("storage", ["fp16", "q4"])
def test_gqa(Hq, Hkv, storage):
    Case([700, 1, 65], [1, 1, 1], Hq, Hkv, 64, storage=storage).check()


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 63, 64, 65, 128, 255, 256, 257, 511, 512, 513, 2049, 5000])
@pytest.mark.parametrize("storage", ["fp16", "q8q4", "q4"])
def test_lengths(context, storage):
    Case([context], [1], 8, 2, 128, storage=storage).check()


@pytest.mark.parametrize("queries", range(1, 9))
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(4, 4, 128), (8, 2, 64), (16, 2, 64), (8, 1, 80), (8, 1, 128)])
def test_several_queries(queries, Hq, Hkv, D):
    Case([queries, 256 + queries // 2, 700], [queries] * 3, Hq, Hkv, D).check()
    Case([queries, 256 + queries // 2, 700], [queries] * 3, Hq, Hkv, D, storage="q4").check()


@pytest.mark.parametrize("storage", ["q4", *APART])
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
def test_pairs_apart(D, storage):
    """Many rows of a query, chunks joined, several tokens, a page's border, a window: whatever chooses code inside a kernel."""
    Case([257, 700, 9], [1, 8, 3], 8, 1, D, storage=storage).check()
    Case([2049], [1], 16, 1, D, storage=storage, softcap=30.0).check()
    Case([600, 20, 1500], [1, 2, 4], 4, 4, D, storage=storage, window=300).check()


@pytest.mark.parametrize("context", [258, 514, 700, 1026])
@pytest.mark.parametrize(
    ("storage", "D", "tokens"), [("fp16", 128, 5), ("q4", 128, 5), ("q4", 128, 2), ("q4", 64, 8), ("q4", 96, 2), ("q4", 256, 2)]
)
@pytest.mark.parametrize("Hq", [8, 16])  # of 16, 64 dims each, a CTA has all warps of a multiprocessor
def test_newer_tokens_do_not_change_a_row(Hq, storage, D, tokens, context):
    """However a sequence is cut into steps: the bits of a token are the same with newer tokens in its step and alone."""
    whole = Case([context], [tokens], Hq, 2, D, storage=storage)
    alone = shallow(whole)
    alone.queries, alone.bounds, alone.lens = [1], i32([0, 1]), i32([context - tokens + 1])
    alone.qkv = whole.qkv[:1].contiguous()
    assert torch.equal(alone.cuda().run()[0][0], whole.cuda().run()[0][0])


@pytest.mark.parametrize("window", [1, 5, 64, 255, 256, 257, 1000])
def test_window(window):
    Case([600, 20, 1500], [1, 2, 4], 4, 2, 64, window=window).check()


@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap(softcap):
    Case([300, 4], [3, 1], 4, 1, 128, softcap=softcap).check()


@pytest.mark.parametrize("D", [40, 128])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [0, 4, 10, 20])
def test_rotation(D, interleaved, half):
    Case([40, 300], [2, 1], 4, 2, D, half=half, interleaved=interleaved).check()


@pytest.mark.parametrize("D", [48, 64])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("shape", ["head", "heads", "whole"])
@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_norms_and_clip(D, layer_norm, shape, clip):
    weights = [torch.rand({"head": (D,), "heads": (n, D), "whole": (n * D,)}[shape]) + 0.5 for n in (4, 2)]
    Case([40, 300], [2, 1], 4, 2, D, q_norm=weights[0], k_norm=weights[1], layer_norm=layer_norm, clip=clip).check()


@pytest.mark.parametrize("D", [40, 64, 80, 128, 256])
@pytest.mark.parametrize("storage", STORAGES)
def test_the_cache_holds_the_formats_bytes(D, storage):
    """Without rotation the numbers that are stored are the inputs themselves, so every byte must be the reference's."""
    case = Case([300, 5, 257], [1, 3, 8], 2, 2, D, storage=storage, half=0)
    case.qkv[0, 3 * D :] = 0.0
    case.qkv[1, 3 * D :] *= 1e-6
    case.qkv[2, 3 * D :] *= 1e4
    gpu = case.check(tolerance=2e-2)
    for ours, expected in ((gpu.k_pool, case.k_pool), (gpu.v_pool, case.v_pool)):
        assert torch.equal(ours.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("storage", ["q4", "k16v4"])
@pytest.mark.parametrize("large", [30.0, 3e3, 1e4])
def test_large_values_beside_small_ones(storage, large):
    """A probability times a value's scale may pass fp16's largest number, late or early in a row, and then be small again."""
    for at in (slice(0, 3), slice(300, 302), slice(-2, None)):
        case = Case([700, 40], [2, 1], 8, 2, 128, storage=storage, half=0)
        values = torch.randn(690, 2, 128, generator=torch.Generator().manual_seed(3))
        values[at] *= large
        slots = case.table[0, torch.arange(690) // P].long() * P + torch.arange(690) % P
        kv_codes.write_slots(case.v_pool, slots, values)
        case.qkv[0, 10 * 128 :] *= large
        case.check(tolerance=2e-2)


@pytest.mark.parametrize("storage", ["fp16", "q8", "q8q4", "q4"])
@pytest.mark.parametrize(("sequences", "Hkv"), [(9, 2), (24, 8), (67, 8)])
def test_many_sequences(storage, sequences, Hkv):
    """Shared out by their number: few to a multiprocessor or several, keys in equal parts or whole."""
    contexts = [(37 * b * b) % 200 + 1 for b in range(sequences)]
    contexts[1] = 1500
    case = Case(contexts, [1] * sequences, 4 * Hkv, Hkv, 128, storage=storage, large_chunks=True)
    gpu = case.check()
    assert torch.equal(gpu.run()[0], gpu.run()[0])


@pytest.mark.parametrize(("storage", "heads"), [("fp16", 4), ("q4", 4), ("q4", 16)])
def test_scores_far_apart(storage, heads):
    case = Case([1500], [2], heads, 2, 128, storage=storage)
    case.qkv *= 30
    case.check(tolerance=3e-2)


@pytest.mark.parametrize("D", [64, 128])
def test_queries_of_any_size(D):
    """A row of 4 bits' queries has one unit: rows of any size, one of nothing, and dims that are far larger than their neighbours."""
    case = Case([700, 40], [2, 1], 8, 2, D, storage="q4", half=0)
    queries = case.qkv[:, : 8 * D].view(3, 8, D)
    queries[0, 1], queries[0, 2], queries[0, 3] = 0.0, queries[0, 2] * 1e-6, queries[0, 3] * 1e-20
    queries[1, 0, 5], queries[1, 1, 40] = 40.0, -100.0
    queries[2] *= 8
    case.check(tolerance=1e-2)


@pytest.mark.parametrize("storage", ["fp16", "q4", *APART])
@pytest.mark.parametrize(("Hq", "D"), [(8, 72), (8, 128), (16, 64)])
def test_bits_do_not_depend_on_the_batch(storage, Hq, D):
    contexts, queries = [700, 3, 2000, 64, 257], [1, 2, 1, 4, 1]
    case = Case(contexts, queries, Hq, 2, D, storage=storage)
    gpu = case.cuda()
    together, _ = gpu.run()
    again, _ = gpu.run()
    assert torch.equal(together, again)
    _same_alone(case, together)


def _same_alone(case, together):
    for b in range(len(case.contexts)):
        alone = case.cuda()
        lo, hi = case.bounds[b], case.bounds[b + 1]
        alone.qkv, alone.table, alone.lens = alone.qkv[lo:hi].clone(), alone.table[b : b + 1].clone(), alone.lens[b : b + 1].clone()
        alone.bounds, alone.queries = i32([0, hi - lo]).cuda(), [int(hi - lo)]
        assert torch.equal(alone.run()[0], together[lo:hi])


@pytest.mark.parametrize("storage", ["fp16", "q8", "q8q4", "q4"])
@pytest.mark.parametrize(
    ("Hq", "D", "queries", "options"),
    [
        (32, 128, [1, 1, 1, 1], {}),
        (128, 128, [1, 1, 1, 1], {}),
        (32, 64, [1, 4, 1, 2], {}),
        (32, 64, [3, 3, 3, 3], {"softcap": 30.0}),
        (32, 64, [1, 1, 1, 1], {"window": 1200}),
    ],
)
def test_several_chunks_a_cta(storage, Hq, D, queries, options):
    """More chunks than CTAs: a CTA takes several chunks in turn, with the bits of chunks in CTAs of their own.

    Of 513 and 1025 tokens the newest ones lie on both sides of a chunk's border.
    """
    case = Case([1300, 1025, 513, 2600], queries, Hq, 32, D, storage=storage, **options)
    gpu = case.check()
    together, _ = gpu.run()
    assert torch.equal(together, gpu.run(pdl=True)[0])
    _same_alone(case, together)


def test_chunks_of_a_cta_in_many_pages():
    """More pages than a warp knows at a time; more runs of chunks than CTAs, where some have two."""
    for contexts in [20000] * 3, [1300] * 5:
        case = Case(contexts, [1] * len(contexts), 32, 32, 64)
        _same_alone(case, case.check().run()[0])


def test_unused_rows_are_left_alone():
    case = Case([40, 30], [1, 1], 4, 2, 64)
    gpu = case.cuda()
    whole, _ = gpu.run()
    part = case.cuda()
    part.lens = i32([40, 0]).cuda()
    part.table[1] = 1 << 28
    out, _ = part.run()
    assert torch.equal(out[0], whole[0])


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("storage", ["fp16", "q4", "k4v16"])
def test_a_graph_gives_the_same(pdl, storage):
    case = Case([2000, 300], [1, 2], 8, 2, 128, storage=storage)
    eager = case.cuda()
    expected, expected_x = eager.run()
    gpu = case.cuda()
    gpu.run(pdl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.run(pdl)
        gpu.run(pdl)
        out, x = gpu.run(pdl)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert torch.equal(x, expected_x)
    gpu.lens.sub_(7)  # lengths are read on the device
    graph.replay()
    eager.lens.sub_(7)
    assert torch.equal(out, eager.run()[0])


@pytest.mark.parametrize(("Hq", "Hkv", "D", "T"), [(4, 2, 64, 40), (8, 8, 128, 300), (4, 1, 40, 30)])
@pytest.mark.parametrize("storage", ["fp16", "q8", "k16v4"])
def test_paged_attention_of_any_length(Hq, Hkv, D, T, storage):
    case = Case([T, 270], [T, 1], Hq, Hkv, D, storage=storage)
    gpu = case.cuda()
    q, _, _ = _append(gpu, T)
    out = torch.ops.exl2nb.paged_attention(q.float(), gpu.k_pool, gpu.v_pool, gpu.table, gpu.bounds, gpu.lens, D**-0.5, 0, 0.0)
    expected, _ = REFERENCE_OPS["attention_step"](*case.args())
    assert (out.cpu() - expected).abs().max() / expected.abs().max() < 4e-3


def _append(case, T):
    place = torch.cat([torch.arange(T), torch.tensor([269])]).cuda()
    page = torch.cat([case.table[0, place[:T] // P], case.table[1, place[T:] // P]])
    slots = page.int() * P + (place % P).int()
    o = case.options
    return cuda_attention.rope_append(
        case.qkv, case.cos, case.sin, place.int(), slots, case.k_pool, case.v_pool, None, None, case.Hq, case.Hkv, case.D, o["eps"], False,
        False, 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("D", [40, 128])
def test_gather(storage, D):
    case = Case([600], [1], 4, 2, D, storage=storage)
    gpu = case.cuda()
    ours = cuda_attention.gather_cache(gpu.k_pool, gpu.v_pool, gpu.table[0, :3].contiguous(), 599, D)
    expected = REFERENCE_OPS["gather_cache"](case.k_pool, case.v_pool, case.table[0, :3], 599, D)
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-3, atol=1e-4)


def test_append_and_gather_are_inverse():
    case = Case([300, 270], [300, 1], 4, 2, 64)
    gpu = case.cuda()
    _, k, v = _append(gpu, 300)
    ours = cuda_attention.gather_cache(gpu.k_pool, gpu.v_pool, gpu.table[0, :2].contiguous(), 300, 64)
    assert torch.equal(ours[0], k[:300])
    assert torch.equal(ours[1], v[:300])


def test_bad_input_is_refused():
    gpu = Case([40], [1], 4, 2, 64).cuda()
    gpu.workspace = gpu.workspace[:16].clone()
    with pytest.raises(RuntimeError, match="workspace"):
        gpu.run()
    gpu = Case([40], [1], 4, 2, 64).cuda()
    gpu.k_pool = gpu.k_pool[:, :, :100].contiguous()
    with pytest.raises(RuntimeError, match="pool"):
        gpu.run()


def test_one_workspace_serves_steps_of_any_size():
    cases = [Case([700, 300], [8, 8], 8, 2, 64), Case([400], [1], 8, 2, 64, seed=1)]
    size = torch.ops.exl2nb.attention_workspace(torch.zeros(1, device="cuda"), 16, 8, 2, 64)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
    first = [case.cuda() for case in cases]
    expected = [gpu.run()[0] for gpu in first]
    for _ in range(2):
        for gpu, out in zip(first, expected):
            gpu.workspace = workspace
            assert torch.equal(gpu.run()[0], out)
