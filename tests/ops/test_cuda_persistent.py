"""A layer's products in one launch (persistent_gemm.cuh), which steps of one to eight tokens take on Hopper, against launches of their own.

Marked gpu: `make test-gpu` on a machine that has one. tests/model/test_gpu_step.py compares the same steps with their mathematics.
"""

import itertools
import time

import pytest
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.model.batch import Batch, Span
from exl2nb.model.gpu import GpuForward, formats_of

from .cases import Net

pytestmark = pytest.mark.gpu
CASES = {
    **{f"{bits} bits, groups of {group}": {"bits": bits, "group": group} for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)},
    **{f"gptq, {bits} bits": {"bits": bits, "group": group, "gptq": True} for bits, group in ((2, 64), (3, 32), (4, 128), (8, 96))},
    **{
        f"items by twos, {bits} bits": {
            "hidden": 2048,
            "inter": 5632,
            "heads": 32,
            "kv_heads": 4,
            "bits": bits,
            "group": 128,
            "scale": 0.03,
        }
        for bits in (2, 3, 4, 5, 6, 8)
    },
    "items by twos, more strips than there is room for": {
        "hidden": 2048,
        "inter": 224,
        "heads": 32,
        "kv_heads": 4,
        "vocab": 50720,
        "bits": 3,
        "group": 128,
    },
    "mixed widths": {"hidden": 256, "inter": 416},
    "a KV head for 8": {"heads": 8, "kv_heads": 1, "head_dim": 80, "hidden": 640, "bits": 4},
    "biases": {"bias": True, "hidden": 96, "inter": 352},
    "narrow": {"hidden": 64, "inter": 32, "heads": 2, "kv_heads": 1, "bits": 8},
    "one layer": {"layers": 1, "bits": 4},
    "three layers": {"layers": 3, "bits": 4},
    "more strips than there is room for": {"inter": 8480, "vocab": 20011, "bits": 4},
    "many strips": {"hidden": 4096, "inter": 5664, "heads": 32, "kv_heads": 8, "head_dim": 128, "bits": 4, "group": 128},
    "room for many KV heads": {"hidden": 4096, "inter": 5664, "heads": 32, "kv_heads": 32, "head_dim": 128, "bits": 4, "group": 128},
    "wide rows": {"hidden": 8192, "inter": 10240, "heads": 32, "kv_heads": 4, "head_dim": 128, "bits": 2, "group": 64},
}
DENSE = {"dense": True, "hidden": 128, "inter": 128, "head_dim": 32}


def made(options):
    return Net(**{"layers": 2, "hidden": 160, "inter": 224, "scale": 0.1, **options}, device="cuda")


class Steps:
    """A net and one of the two ways through it."""

    def __init__(self, net, *, chained=True):
        self.net, self.forward = net, GpuForward(net.program, torch.device("cuda"), deterministic=not chained)
        self.spec = CacheSpec(net.layers, net.kv_heads, net.head_dim, 9)
        self.ids = [(7 * i + 3) % net.vocab for i in range(40)]

    def fed(self, lengths):
        """Logits of one sequence in pieces of these lengths."""
        cache, out = KVCache(self.spec, "cuda"), []
        for first, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
            span = Span(ids=self.ids[first:end], start=first, pages=[2], logit_rows="all")
            out.append(self.forward.run(Batch.build([span]), cache).cpu())
        return torch.cat(out)


@pytest.mark.parametrize("name", CASES)
def test_one_launch_is_several(name):
    """Near what launches of their own give, which shows that the chain was taken; the same bits for one to eight tokens and sequences."""
    net = made(CASES[name])
    chain, lengths = Steps(net), range(1, 9)
    got, want = chain.fed(lengths), Steps(net, chained=False).fed(lengths)
    assert got.isfinite().all()
    assert float((got - want).norm() / want.norm()) < 1e-3
    if torch.cuda.get_device_capability()[0] == 9:
        assert not torch.equal(got, want)
    assert torch.equal(chain.fed([1] * 36), got)
    for count in (2, 5, 8):
        cache = KVCache(chain.spec, "cuda")
        spans = [Span(ids=chain.ids[:1], start=0, pages=[page], logit_rows="all") for page in range(count)]
        assert torch.equal(chain.forward.run(Batch.build(spans), cache).cpu(), got[:1].expand(count, -1))


def test_the_head_makes_the_rows_that_are_wanted():
    """A step of several sequences, of which only the last rows are asked for: the same bits, whichever rows they are."""
    steps = Steps(made({"bits": 6, "group": 128, "vocab": 4099}))
    lengths = [3, 1, 2]

    def run(rows):
        spans = [Span(ids=steps.ids[:n], start=0, pages=[page], logit_rows=rows) for page, n in enumerate(lengths)]
        return steps.forward.run(Batch.build(spans), KVCache(steps.spec, "cuda")).cpu()

    every, last = run("all"), run("last")
    assert torch.equal(last, every[[2, 3, 5]])


def test_dense_weights_have_launches_of_their_own():
    net = made(DENSE)
    assert torch.equal(Steps(net).fed(range(1, 9)), Steps(net, chained=False).fed(range(1, 9)))


def test_memory_of_larger_steps():
    """A workspace for more tokens, which a step of twelve has used before: the same bits."""
    net = made({"bits": 4})
    want, chain = Steps(net).fed(range(1, 9)), Steps(net)
    chain.forward._steppers = dict.fromkeys((1, 2, 4, 8, 16), chain.forward.stepper(16))
    spans = [Span(ids=chain.ids[:2], start=0, pages=[page], logit_rows="last") for page in range(6)]
    chain.forward.run(Batch.build(spans), KVCache(chain.spec, "cuda"))
    assert torch.equal(chain.fed(range(1, 9)), want)


def arguments(steps, cache, count):
    """Of a step of so many sequences at their first token, and its logits."""
    spans = [Span(ids=steps.ids[page : page + 1], start=0, pages=[page], logit_rows="all") for page in range(count)]
    i, out = steps.forward._inputs(Batch.build(spans), None), torch.zeros(count, steps.forward.vocab, device="cuda")
    inputs = i.ids, i.positions, i.block_table, i.cu_seqlens, i.context_lens, i.logit_rows, cache.k, cache.v, formats_of(cache)
    return (*inputs, (cache.spec.num_kv_heads, cache.spec.head_dim), out), out


@pytest.mark.parametrize("count", [1, 3, 8])
def test_in_graphs(count):
    """Three steps in a graph, replayed, with a step between that was launched alone."""
    steps = Steps(made({"bits": 4, "group": 128}))
    inputs, out = arguments(steps, KVCache(steps.spec, "cuda"), count)
    kernels, graph = steps.forward.stepper(count), torch.cuda.CUDAGraph()
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
    """Every launch needs all multiprocessors at once: in two streams, one more urgent, none may wait for the other for ever."""
    both, streams = [Steps(made({"bits": bits, "layers": 6})) for bits in (4, 6)], [torch.cuda.Stream(priority=p) for p in (0, -1)]
    given = [arguments(steps, KVCache(steps.spec, "cuda"), count) for steps, count in zip(both, (1, 8))]
    alone = []
    for steps, (inputs, out) in zip(both, given):
        steps.forward.stepper(len(out)).run(*inputs)
        alone.append(out.clone())
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, steps, (inputs, out) in zip(streams, both, given):
            with torch.cuda.stream(stream):
                steps.forward.stepper(len(out)).run(*inputs)
    ended = [stream.record_event() for stream in streams]
    until = time.monotonic() + 30
    while not all(event.query() for event in ended):
        assert time.monotonic() < until, "two steps wait for one another"
        time.sleep(0.01)
    assert all(torch.equal(out, want) for (_, out), want in zip(given, alone))
