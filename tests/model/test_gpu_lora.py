"""Adapters in steps on the GPU: step kernels and prefill against the fp32 reference that merges them, bits alone and beside others, room.

The tests on the CPU are in tests/ops/test_lora_table.py.

Marked gpu: `make test-gpu` on a machine that has one.
"""

from dataclasses import replace

import pytest
import torch

from exl2nb import ops
from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.gpu_forward import GpuForward
from exl2nb.ops import kernel_code
from exl2nb.ops._library import REFERENCE_OPS
from exl2nb.ops.lora_table import LoraChange, LoraPart, LoraTable, blend_adapters
from tests.ops.cases import Net
from tests.ops.test_lora_table import adapter

pytestmark = pytest.mark.gpu
PAGES = 16  # one of each sequence
NETS = {
    "dense": {"dense": True},
    "dense, biases and head norms": {"dense": True, "bias": True, "head_norms": True},
    "6 bits": {"bits": 6, "bias": True},
    "4 bits, wide": {"bits": 4, "hidden": 512, "inter": 1056, "heads": 8, "kv_heads": 2, "head_dim": 64},
}
STEPS = {  # new tokens of each sequence, its adapter
    "one token": ([1], [0]),
    "a few, some without": ([1, 1, 1, 1], [0, 1, -1, 1]),
    "several tokens each": ([5, 1, 4, 1, 3, 1], [0, 1, -1, 1, 0, -1]),
    "more than one slice": ([8] * 9, [0, 1, -1] * 3),
    "prompts": ([70, 90, 30], [1, -1, 0]),
    "a prompt beside decoding": ([1, 40, 1, 1, 1, 1], [0, 1, -1, 1, 0, 0]),
}


def small(adapter, size):
    """An adapter whose products are scaled: large ones drive every attention score to one key."""
    return {
        op: replace(change, parts=tuple(replace(part, scale=part.scale * size) for part in change.parts)) for op, change in adapter.items()
    }


def plain(program, seed, rank):
    """Random parts of the layers' matrices, as persistent chains and stream-K GEMMs take them; q, k, v, gate and up have one each."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for number, op in enumerate(program.steps):
        if not isinstance(op, (ops.QkvOp, ops.ResidualOp, ops.GateUpOp)):
            continue
        K, N = ops.shape(op.blob)
        firsts = [0, N // 2, N * 3 // 4] if isinstance(op, ops.QkvOp) else [0, N // 2] if isinstance(op, ops.GateUpOp) else [0]
        parts = []
        for first, end in zip(firsts, [*firsts[1:], N]):
            a, b = torch.randn(K, rank, generator=g) * 0.3, torch.randn(rank, end - first, generator=g) * 0.3
            parts.append(LoraPart.of(a, b, 0.5 + torch.rand(rank, generator=g), first))
        found[number] = LoraChange(parts=tuple(parts))
    return found


class Pair:
    """A net on the GPU and the same one on the CPU, with two adapters each."""

    def __init__(self, options, *, deterministic=False, rank=8, inside=False, **extra):
        options = {"layers": 2, "scale": 0.1, "pages": PAGES, **options}
        self.net, self.plain = Net(**options, device="cuda"), Net(**options, storages=("fp32", "fp32"))
        self.forward = GpuForward(self.net.program, torch.device("cuda"), deterministic=deterministic)
        program = self.plain.program
        if inside:
            self.made = [small(plain(program, 1, 5), 0.05), small(plain(program, 2, rank), 0.15 * rank**-0.5)]
        else:
            self.made = [small(adapter(program, 1, **extra), 0.05), small(adapter(program, 2, rank=rank, **extra), 0.15 * rank**-0.5)]
        self.table = LoraTable(program, tuple(self.made))
        self.on_gpu = self.moved(self.made)
        self.spec = CacheSpec(self.net.layers, self.net.kv_heads, self.net.head_dim, PAGES)

    def moved(self, adapters):
        return LoraTable(self.net.program, tuple({op: change.to("cuda") for op, change in one.items()} for one in adapters))

    def batch(self, counts, adapters, rows="all"):
        spans = [
            SequenceSlice(
                ids=[(7 * i + 3 + 11 * page) % self.net.vocab for i in range(n)], start=0, pages=[page], logit_rows=rows, adapter=of
            )
            for page, (n, of) in enumerate(zip(counts, adapters))
        ]
        return Batch.build(spans)

    def found(self, counts, adapters, rows="all", table=None):
        cache = KVCache(self.spec, "cuda")
        return self.forward.run(self.batch(counts, adapters, rows), cache, lora=table or self.on_gpu).cpu()

    def wanted(self, counts, adapters, rows="all"):
        b = self.batch(counts, adapters, rows)
        tensors = (b.input_ids, b.positions, b.slot_mapping, b.block_table, b.cu_seqlens, b.context_lens, b.logit_rows)
        lora = (None, None) if b.adapters is None else (self.table.words, b.adapters)
        return REFERENCE_OPS["decode_step"](self.plain.program.code, *tensors, *self.plain.pools(), *lora)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("extra", [{}, {"gain": True, "norms": True}], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_equals_merged_weights(name, extra, step):
    pair, (counts, adapters) = Pair(NETS[name], **extra), STEPS[step]
    for rows in ("all", "last"):
        got, want = pair.found(counts, adapters, rows), pair.wanted(counts, adapters, rows)
        assert got.isfinite().all()
        assert float((got - want).norm() / want.norm()) < 5e-3, rows
        without = pair.wanted(counts, [-1] * len(counts), rows)
        assert float((want - without).norm() / want.norm()) > 0.05, "the adapters change the logits"


INSIDE = {
    "three widths": {},
    "three layers": {"bits": 3, "layers": 3, "bias": True},
    "4 bits, wide": NETS["4 bits, wide"],
    "several rounds": {"bits": 4, "hidden": 512, "inter": 8192, "heads": 8, "kv_heads": 2, "head_dim": 64},
}
INSIDE_STEPS = {  # new tokens of each sequence, its adapter, the kernel that adds it on Hopper
    "one": ([1], [1], "persistent_lora<4"),
    "two": ([1, 1], [1, 0], "persistent_lora<2"),
    "three, one without": ([1, 1, 1], [0, -1, 1], "persistent_lora<1"),
    "four": ([1, 3], [1, 0], "persistent_lora<1"),
    "seven": ([4, 1, 2], [1, -1, 0], "persistent_lora<"),
    "sixteen": ([1] * 16, [0, 1, -1, 1] * 4, "stream_k_lora<2>"),
    "thirty": ([5] * 6, [0, 1, -1] * 2, "stream_k_wgmma_lora<4>"),
    "sixty-four": ([8] * 8, [0, 1, -1, 1] * 2, "stream_k_wgmma_lora<8>"),
}


@pytest.mark.parametrize("step", INSIDE_STEPS)
@pytest.mark.parametrize("rank", [16, 40])
@pytest.mark.parametrize("name", INSIDE)
def test_inside_the_products(name, rank, step, monkeypatch):
    """Adapters of layers alone need no launches behind the products; steps one after the other leave nothing behind."""
    monkeypatch.setenv("EXL2NB_LORA_INSIDE", "1")
    pair, (counts, adapters, kernel) = Pair(INSIDE[name], inside=True, rank=rank), INSIDE_STEPS[step]
    assert pair.on_gpu.fits_inside
    for rows in ("all", "last"):
        want, got = pair.wanted(counts, adapters, rows), [pair.found(counts, adapters, rows) for _ in range(3)]
        assert float((got[0] - want).norm() / want.norm()) < 5e-3
        assert torch.equal(got[0], got[1])
        assert torch.equal(got[0], got[2])
        without = pair.wanted(counts, [-1] * len(counts), rows)
        assert float((want - without).norm() / want.norm()) > 0.03, "the adapters change the logits"
    if torch.cuda.get_device_capability()[0] == 9:
        made = [one.name for one in kernel_code.kernels_of_run(lambda: pair.found(counts, adapters))]
        assert any(one.startswith(kernel) for one in made), made
        assert len(counts) < 9 or "lora_expand" not in made
        assert ("lora_sums" in made) == (sum(counts) > 16), "up to 16 rows x a is in the products, too"


@pytest.mark.parametrize(("bits", "kernel"), [(2, "persistent_lora<4, exl2nb::kExl2>"), (3, "persistent_lora<4, exl2nb::kFromThree>")])
def test_code_for_two_bits_where_there_are_some(bits, kernel, monkeypatch):
    monkeypatch.setenv("EXL2NB_LORA_INSIDE", "1")
    pair = Pair({"bits": bits, "hidden": 512, "inter": 1056, "heads": 8, "kv_heads": 2, "head_dim": 64}, inside=True)
    got, want = pair.found([1], [1]), pair.wanted([1], [1])
    assert float((got - want).norm() / want.norm()) < 5e-3
    if torch.cuda.get_device_capability()[0] == 9:
        made = [one.name for one in kernel_code.kernels_of_run(lambda: pair.found([1], [1]))]
        assert {one for one in made if one.startswith("persistent_lora")} == {kernel}


@pytest.mark.parametrize("name", ["4 bits, wide", "several rounds"])
@pytest.mark.parametrize("rank", [8, 32])
def test_sixteen_adapters(name, rank, monkeypatch):
    """One for each row of a step, the last one a blend of two."""
    monkeypatch.setenv("EXL2NB_LORA_INSIDE", "1")
    pair = Pair(INSIDE[name], inside=True)
    program = pair.plain.program
    made = [small(plain(program, seed, rank), 0.15 * rank**-0.5) for seed in range(15)]
    made.append(blend_adapters([(made[0], 0.7), (made[1], -0.4)], program))
    pair.table, table = LoraTable(program, tuple(made)), pair.moved(made)
    assert table.fits_inside
    counts, adapters = [1] * 16, [(5 * row) % 16 for row in range(16)]
    got, want = pair.found(counts, adapters, table=table), pair.wanted(counts, adapters)
    apart = (got - want).norm(dim=1) / want.norm(dim=1)
    assert float(apart.max()) < 2e-2, apart
    assert float((got - want).norm() / want.norm()) < 5e-3
    others = pair.found(counts, adapters[1:] + adapters[:1], table=table)
    assert float(((others - got).norm(dim=1) / want.norm(dim=1)).min()) > 0.01, "each row has its own"


def test_few_rows_of_a_large_layer(monkeypatch):
    """Six rows, which one chain does not take, run in the stream-K GEMM with their adapters: as near to launches behind the products."""
    large = {"hidden": 4096, "inter": 5664, "heads": 32, "kv_heads": 8, "head_dim": 128, "bits": 4, "group": 128, "layers": 1}
    counts, adapters, found = [4, 1, 1], [1, -1, 0], []
    pair = Pair(large, inside=True, rank=16)
    for inside in ("0", "1"):
        monkeypatch.setenv("EXL2NB_LORA_INSIDE", inside)
        found.append(pair.found(counts, adapters, table=pair.moved(pair.made)))
    behind, within = found
    assert float((within - behind).norm() / behind.norm()) < 5e-3
    assert float((pair.found(counts, [-1, -1, -1]) - behind).norm() / behind.norm()) > 0.02, "the adapters change the logits"
    if torch.cuda.get_device_capability()[0] == 9:
        made = [one.name for one in kernel_code.kernels_of_run(lambda: pair.found(counts, adapters))]
        assert "stream_k_lora<2>" in made, made


def test_tables_of_both_kinds_by_turns(monkeypatch):
    """Launches behind the products and inside them share memory."""
    monkeypatch.setenv("EXL2NB_LORA_INSIDE", "1")
    options = INSIDE["4 bits, wide"]
    inside, every = Pair(options, inside=True, rank=16), Pair(options, rank=16, gain=True, norms=True)
    for counts in ([1, 1, 1], [1] * 16):
        adapters = [i % 2 for i in range(len(counts))]
        want = [pair.wanted(counts, adapters) for pair in (inside, every)]
        for turn in (0, 1, 0, 1, 1, 0):
            table = every.moved((inside, every)[turn].made)
            got = every.found(counts, adapters, table=table)
            assert float((got - want[turn]).norm() / want[turn].norm()) < 5e-3, turn
        plain_steps = every.found(counts, [-1] * len(counts))
        expected = every.wanted(counts, [-1] * len(counts))
        assert float((plain_steps - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize("rank", [1, 16, 17, 70, 300])
def test_ranks(rank):
    pair = Pair(NETS["dense"], rank=rank)
    for counts, adapters in (([1, 1], [1, 0]), ([70], [1])):
        got, want = pair.found(counts, adapters), pair.wanted(counts, adapters)
        assert float((got - want).norm() / want.norm()) < 5e-3


@pytest.mark.parametrize("name", NETS)
def test_same_bits_alone_and_together(name):
    """Deterministic: in steps of any size, beside rows with and without adapters, after other adapters were loaded."""
    pair = Pair(NETS[name], deterministic=True, gain=True, norms=True)
    counts, adapters = [5, 1, 4, 1, 3, 1, 12], [0, 1, -1, 1, 0, -1, 1]
    together = pair.found(counts, adapters).split(counts)
    more = pair.moved(pair.made * 20)
    for i, (n, of) in enumerate(zip(counts, adapters)):
        alone = pair.batch(counts, adapters).select([i])[0]
        for table in (pair.on_gpu, more):
            got = pair.forward.run(alone, KVCache(pair.spec, "cuda"), lora=table).cpu()
            assert torch.equal(got, together[i]), (i, n, of)


def test_no_adapter_is_no_change():
    pair = Pair(NETS["6 bits"], deterministic=True)
    empty = LoraTable(pair.net.program, (None,))
    counts = [5, 1, 4]
    plain = pair.forward.run(pair.batch(counts, [-1] * 3), KVCache(pair.spec, "cuda")).cpu()
    got = pair.found(counts, [0, 0, 0], table=empty)
    assert float((got - plain).norm() / plain.norm()) < 5e-3
    assert torch.equal(pair.found([5, 1, 4, 1], [-1, -1, -1, 0])[: sum(counts)], plain)


def test_room_grows_and_stays():
    pair = Pair(NETS["dense"])
    buffers = pair.forward.lora_buffers(pair.on_gpu)
    assert pair.forward.lora_buffers(pair.moved([adapter(pair.plain.program, 3)] * 16)) is buffers, "there is room for sixteen"
    larger = pair.forward.lora_buffers(pair.moved([adapter(pair.plain.program, 3)] * 17))
    assert larger is not buffers and larger.adapters == 32
    assert pair.forward.lora_buffers(pair.on_gpu) is larger, "it does not shrink"
    wide = pair.forward.lora_buffers(pair.moved([adapter(pair.plain.program, 3, rank=40)]))
    assert wide.width >= 96 and wide.adapters == 32
