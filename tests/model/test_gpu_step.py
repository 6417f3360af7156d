"""Whole steps on the GPU against the fp32 reference of their program: every width, and shapes at the edges. Marked gpu: `make test-gpu`."""

import itertools

import pytest
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.cache.spec import CacheSpec
from exl2nb.model.batch import Batch, Span
from exl2nb.model.gpu import GpuForward
from exl2nb.ops._library import REFERENCES
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


class Both:
    """A net on the GPU, and what its mathematics gives."""

    def __init__(self, name):
        options = {"layers": 2, "scale": 0.1, **CASES[name]}  # larger weights would drive every score to one key
        self.cpu, self.net = Net(**options), Net(**options, device="cuda")
        self.spec = CacheSpec(self.net.layers, self.net.kv_heads, self.net.head_dim, self.net.pages)
        self.ids = [(7 * i + 3) % self.net.vocab for i in range(300)]

    def truth(self, n):
        """Logits of the first n tokens in fp32."""
        k, v = self.cpu.pools()
        return REFERENCES["decode_step"](self.cpu.program.code, *single(0, self.ids[:n], [2, 0]), k, v)

    def fed(self, lengths, *, deterministic=False):
        """Logits through the GPU's own steps, in pieces of these lengths."""
        forward = GpuForward(self.net.program, torch.device("cuda"), deterministic=deterministic)
        cache, out = KVCache(self.spec, "cuda"), []
        for first, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
            batch = Batch.build([Span(ids=self.ids[first:end], start=first, pages=[2, 0], logit_rows="all")])
            out.append(forward.run(batch, cache).cpu())
        return torch.cat(out)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_their_mathematics(name):
    """A prompt at once, in steps of eight, token by token; over the border of a page; the first token alone and the last of a full page."""
    both = Both(name)
    want = both.truth(270)
    ways = {
        "at once": [270],
        "by eights": [8] * 33 + [6],
        "one by one": [1] * 270,
        "a full page first": [256, 1, 8, 5],
        "by one": [255, 1, 1, 13],
    }
    found = {way: both.fed(lengths) for way, lengths in ways.items()}
    for way, got in found.items():
        assert got.isfinite().all()
        assert float((got - want).norm() / want.norm()) < 5e-3, way
        assert float((got - want).abs().max() / want.abs().mean()) < 0.05, way
    assert torch.equal(found["by eights"], found["one by one"])
    assert torch.equal(both.fed([270], deterministic=True), both.fed([1] * 270, deterministic=True))
