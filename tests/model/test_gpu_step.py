"""Whole steps on the GPU against the fp32 reference of their program, at every width and shapes at the edges.

And the persistent GEMM chain (persistent_gemm.cuh), which steps of one to eight tokens take on Hopper, against one launch per product.

Marked gpu: `make test-gpu` on a machine that has one.
"""

import itertools
import time

import pytest
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.gpu_forward import GpuForward, cache_formats
from exl2nb.ops._library import REFERENCE_OPS
from tests.ops.cases import Net, single

pytestmark = pytest.mark.gpu
CASES = {
    **{f"{bits} bits": {"bits": bits, "hidden": 160, "inter": 224} for bits in (2, 3, 4, 5, 6, 8)},
    "mixed widths": {"hidden": 256, "inter": 416},
    "dense": {"dense": True, "hidden": 200, "inter": 104, "head_dim": 40},
    "one head": {"heads": 1, "kv_heads": 1, "head_dim": 64},
    "a KV head for 4": {"heads": 8, "kv_heads": 2, "head_dim": 64, "hidden": 512},
    "a KV head for 8": {"heads": 8, "kv_heads": 1, "head_dim": 80, "hidden": 640, "bits": 4},
    "KV heads of their own": {"heads": 8, "kv_heads": 8, "head_dim": 16, "bits": 3, "hidden": 128},
    "heads of 256": {"heads": 2, "kv_heads": 1, "head_dim": 256, "bits": 5},
    "one token in the vocabulary": {"vocab": 1},
    "odd vocabulary": {"vocab": 4099, "bits": 6},
    "biases and norms of heads": {"bias": True, "head_norms": True, "hidden": 96},
    "window and softcap": {"window": 100, "softcap": 20.0, "hidden": 96},
    "narrow": {"hidden": 64, "inter": 32, "heads": 2, "kv_heads": 1, "bits": 8},
    "many layers": {"layers": 9, "bits": 4},
}


def made(options, device="cuda"):
    return Net(**{"layers": 2, "scale": 0.1, **options}, device=device)  # larger weights would drive every score to one key


class Steps:
    """A net on the GPU, and one of the two ways through it: persistent chains, or launches of one product each."""

    def __init__(self, net, *, deterministic=False):
        self.net, self.forward = net, GpuForward(net.program, torch.device("cuda"), deterministic=deterministic)
        self.spec = CacheSpec(net.layers, net.kv_heads, net.head_dim, 9)
        self.ids = [(7 * i + 3) % net.vocab for i in range(300)]

    def fed(self, lengths):
        """Logits of one sequence in pieces of these lengths."""
        cache, out = KVCache(self.spec, "cuda"), []
        for first, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
            span = SequenceSlice(ids=self.ids[first:end], start=first, pages=[2, 0], logit_rows="all")
            out.append(self.forward.run(Batch.build([span]), cache).cpu())
        return torch.cat(out)

    def beside(self, lengths, rows="all"):
        """Logits of new sequences of these lengths in one step, each in a page of its own."""
        spans = [SequenceSlice(ids=self.ids[:n], start=0, pages=[page], logit_rows=rows) for page, n in enumerate(lengths)]
        return self.forward.run(Batch.build(spans), KVCache(self.spec, "cuda")).cpu()


@pytest.mark.parametrize("name", CASES)
def test_steps_are_their_mathematics(name):
    """A prompt at once, in steps of eight, token by token; over the border of a page; the first token alone and the last of a full page."""
    cpu, steps = made(CASES[name], "cpu"), Steps(made(CASES[name]))
    k, v = cpu.pools()
    want = REFERENCE_OPS["decode_step"](cpu.program.code, *single(0, steps.ids[:270], [2, 0]), k, v)
    ways = {
        "at once": [270],
        "by eights": [8] * 33 + [6],
        "one by one": [1] * 270,
        "a full page first": [256, 1, 8, 5],
        "by one": [255, 1, 1, 13],
    }
    found = {way: steps.fed(lengths) for way, lengths in ways.items()}
    for way, got in found.items():
        assert got.isfinite().all()
        assert float((got - want).norm() / want.norm()) < 5e-3, way
        assert float((got - want).abs().max() / want.abs().mean()) < 0.05, way
    assert torch.equal(found["by eights"], found["one by one"])
    exact = Steps(steps.net, deterministic=True)
    assert torch.equal(exact.fed([270]), exact.fed([1] * 270))


# ---- The persistent GEMM chain


TWOS = {"hidden": 2048, "heads": 32, "kv_heads": 4, "group": 128}
MANY = {"hidden": 4096, "inter": 5664, "heads": 32, "head_dim": 128, "bits": 4, "group": 128}
PERSISTENT = {
    **{f"{bits} bits, groups of {group}": {"bits": bits, "group": group} for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)},
    **{f"gptq, {bits} bits": {"bits": bits, "group": group, "gptq": True} for bits, group in ((2, 64), (3, 32), (4, 128), (8, 96))},
    **{f"items by twos, {bits} bits": {**TWOS, "inter": 5632, "bits": bits, "scale": 0.03} for bits in (2, 3, 4, 5, 6, 8)},
    "items by twos, more strips than there is room for": {**TWOS, "inter": 224, "vocab": 50720, "bits": 3},
    "mixed widths": {"hidden": 256, "inter": 416},
    "a KV head for 8": {"heads": 8, "kv_heads": 1, "head_dim": 80, "hidden": 640, "bits": 4},
    "biases": {"bias": True, "hidden": 96, "inter": 352},
    "narrow": {"hidden": 64, "inter": 32, "heads": 2, "kv_heads": 1, "bits": 8},
    "one layer": {"layers": 1, "bits": 4},
    "three layers": {"layers": 3, "bits": 4},
    "more strips than there is room for": {"inter": 8480, "vocab": 20011, "bits": 4},
    "many strips": {**MANY, "kv_heads": 8},
    "room for many KV heads": {**MANY, "kv_heads": 32},
    "wide rows": {"hidden": 8192, "inter": 10240, "heads": 32, "kv_heads": 4, "head_dim": 128, "bits": 2, "group": 64},
}


def chained(options):
    return made({"hidden": 160, "inter": 224, **options})


@pytest.mark.parametrize("name", PERSISTENT)
def test_one_launch_is_several(name):
    """Near one launch per product, but not equal: the chain was taken. The same bits for one to eight tokens and sequences; of large layers
    for one and two, and for five to eight, which stream-K multiplies, as chains would read the weights twice; three are like either.
    """
    net, large = chained(PERSISTENT[name]), PERSISTENT[name].get("hidden", 0) >= 2048
    chain, lengths, far = Steps(net), range(1, 9), 3e-3 if large else 1e-3  # stream-K rounds the scaled weights
    got, want = chain.fed(lengths), Steps(net, deterministic=True).fed(lengths)
    assert got.isfinite().all()
    assert float((got - want).norm() / want.norm()) < far
    if torch.cuda.get_device_capability()[0] == 9:
        assert not torch.equal(got, want)
    few, many = chain.fed([1] * 36), chain.fed([8, 8, 8, 7, 5])
    assert torch.equal(few, chain.fed([2] * 18))
    three = chain.fed([3] * 12)
    assert torch.equal(three, few) or (large and torch.equal(three, many))
    assert torch.equal(many, chain.fed([6] * 6))
    assert float((few - many).norm() / want.norm()) < far
    assert torch.equal(few, got) or large
    assert torch.equal(few, many) or large
    for same, row in (((2,), few), ((5, 8), chain.beside([1] * 6))):
        for count in same:
            assert torch.equal(chain.beside([1] * count), row[:1].expand(count, -1))


def test_few_rows_of_a_large_layer():
    """Near a step of sixteen rows, whose kernels they share on Hopper; also where few rows of logits are wanted, by a skinny product."""
    steps = Steps(chained({**MANY, "kv_heads": 8}))
    want = steps.beside([2] * 8)[:8]
    for got, rows in (
        (steps.beside([2] * 4), want),
        (steps.beside([2] * 4, "last"), want[1::2]),
        (steps.beside([6, 2], "last"), want[-1:]),
    ):
        assert float((got[-len(rows) :] - rows).abs().max() / want.std()) < 1e-2


def test_the_head_makes_the_rows_that_are_wanted():
    """A step of several sequences, of which only the last rows are asked for: the same bits, whichever rows they are."""
    steps = Steps(chained({"bits": 6, "group": 128, "vocab": 4099}))
    assert torch.equal(steps.beside([3, 1, 2], "last"), steps.beside([3, 1, 2])[[2, 3, 5]])


def test_dense_weights_have_launches_of_their_own():
    net = chained({"dense": True, "hidden": 128, "inter": 128, "head_dim": 32})
    assert torch.equal(Steps(net).fed(range(1, 9)), Steps(net, deterministic=True).fed(range(1, 9)))


def test_memory_of_larger_steps():
    """A workspace for more tokens, which a step of twelve has used before: the same bits."""
    net = chained({"bits": 4})
    want, chain = Steps(net).fed(range(1, 9)), Steps(net)
    chain.forward.least_tokens = 16
    chain.beside([2] * 6, "last")
    assert torch.equal(chain.fed(range(1, 9)), want)


def arguments(steps, cache, count):
    """Of a step of so many sequences at their first token, and its logits."""
    spans = [SequenceSlice(ids=steps.ids[page : page + 1], start=0, pages=[page], logit_rows="all") for page in range(count)]
    i, out = steps.forward.inputs(Batch.build(spans), None), torch.zeros(count, steps.forward.vocab, device="cuda")
    inputs = i.ids, i.positions, i.block_table, i.cu_seqlens, i.context_lens, i.logit_rows, cache.k, cache.v, cache_formats(cache)
    return (*inputs, (cache.spec.num_kv_heads, cache.spec.head_dim), out), out


@pytest.mark.parametrize("count", [1, 3, 8])
def test_in_graphs(count):
    """Three steps in a graph, replayed, with a step between that was launched alone."""
    steps = Steps(chained({"bits": 4, "group": 128}))
    inputs, out = arguments(steps, KVCache(steps.spec, "cuda"), count)
    kernels, graph = steps.forward.step_kernels(count), torch.cuda.CUDAGraph()
    kernels.run(*inputs)
    once = out.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(3):
            kernels.run(*inputs)
    for _ in range(4):
        out.zero_()
        graph.replay()
        assert torch.equal(out, once)
        out.zero_()
        kernels.run(*inputs)
        assert torch.equal(out, once)


def test_two_models_at_the_same_time():
    """Every launch needs all multiprocessors at once: in two streams, one of higher priority, neither may deadlock the other."""
    both, streams = [Steps(chained({"bits": bits, "layers": 6})) for bits in (4, 6)], [torch.cuda.Stream(priority=p) for p in (0, -1)]
    given = [arguments(steps, KVCache(steps.spec, "cuda"), count) for steps, count in zip(both, (1, 8))]
    alone = []
    for steps, (inputs, out) in zip(both, given):
        steps.forward.step_kernels(len(out)).run(*inputs)
        alone.append(out.clone())
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, steps, (inputs, out) in zip(streams, both, given):
            with torch.cuda.stream(stream):
                steps.forward.step_kernels(len(out)).run(*inputs)
    ended = [stream.record_event() for stream in streams]
    until = time.monotonic() + 30
    while not all(event.query() for event in ended):
        assert time.monotonic() < until, "two steps wait for one another"
        time.sleep(0.01)
    assert all(torch.equal(out, want) for (_, out), want in zip(given, alone))
