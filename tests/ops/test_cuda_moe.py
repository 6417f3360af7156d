"""Experts chosen on the GPU: a step of a sparse layer against its mathematics and against prefill, which reads the choice on the host."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops import gpu_prefill, reference

from .cases import exl2

pytestmark = pytest.mark.gpu
H, INNER, D = 256, 160, 64
POOL = (2, 1, 256, D)


def int32(values):
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def batch(n):
    """Positions, slots, block table, bounds, lengths and rows of n sequences of one token, all in page 1."""
    table = torch.ones(n, 1, dtype=torch.int32, device="cuda")
    return int32([0] * n), int32([256] * n), table, int32(range(n + 1)), int32([1] * n), int32(range(n))


def mixed(K, N, seed):
    """A matrix whose layout no other expert shares: widths and their order follow from the seed."""
    widths = [(2, 3, 4, 5, 6, 8)[(seed + i) % 6] for i in range(K // 32)]
    return exl2(K, N, [(bits, 32) for bits in widths], seed=seed, scale=0.4)


def packed(tensors):
    return ops.pack_exl2(*(t.cuda() for t in tensors)), ops.reconstruct(*tensors).float()


def quantised(K, N, seed):
    return packed(mixed(K, N, seed))


def alike(K, N, seed):
    """A matrix laid out as all others of its shape, its rows in an order of its own."""
    return packed(exl2(K, N, [(5, 32), (4, K - 32)], seed=seed, scale=0.4))


def dense(K, N, seed):
    weight = (torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * K**-0.5).half()
    return ops.pack_dense(weight.cuda()), weight.T.float()


class Sparse:
    """One layer whose attention adds nothing, with experts of different layouts, and its mathematics in fp32."""

    def __init__(
        self, experts, top_k, *, renormalize=0.0, shared=0, gate=False, post=False, scale=1.0, make=quantised, tied=False, layer_norm=False,
        bias=False, seed=0,
    ):  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        vector = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
        self.options = {"top_k": top_k, "renormalize": renormalize, "activation": "silu", "scale": scale}
        self.options |= {"layer_norm": layer_norm}
        self.norm = 1 + 0.2 * vector(H)
        self.bias = 0.3 * vector(H) if bias else None
        self.router = (vector(experts, H) * (0 if tied else 2 * H**-0.5)).half()
        self.post = 1 + 0.2 * vector(H) if post else None
        ups = [[make(H, INNER, seed + 7 * e + s) for s in (1, 2)] for e in range(experts)]
        downs = [make(INNER, H, seed + 7 * e + 3) for e in range(experts)]
        self.up = [torch.cat([part[1] for part in pair], 1) for pair in ups]
        self.down = [part[1] for part in downs]
        blobs = {"up": [ops.pack_concat([part[0] for part in pair]) for pair in ups], "down": [part[0] for part in downs]}
        self.shared = self.gate = None
        if shared:
            wide = [quantised(H, shared, seed + 900 + s) for s in (0, 1)]
            narrow = quantised(shared, H, seed + 950)
            self.shared = torch.cat([part[1] for part in wide], 1), narrow[1]
            blobs |= {"shared_up": ops.pack_concat([part[0] for part in wide]), "shared_down": narrow[0]}
            if gate:
                self.gate = (vector(1, H) * H**-0.5).half()
                blobs["shared_gate"] = ops.pack_dense(self.gate.cuda())
        self.table = vector(64, H) + (0.5 if layer_norm else 0.0)
        qkv = ops.pack_dense(vector(3 * D, H).cuda() * H**-0.5)
        nothing = ops.pack_dense(torch.zeros(H, D).cuda())
        p = self.program = ops.Program("cuda")
        p.add(ops.EmbedOp(table=self.table.cuda()))
        still = dict(zip(("cos", "sin"), torch.zeros(2, 16, 0).cuda()))
        for _ in range(2):  # twice, so that what the first leaves for the second's input is seen
            p.add(ops.QkvOp(norm=self.norm.cuda(), eps=1e-5, blob=qkv, **still, num_heads=1, num_kv_heads=1, head_dim=D))
            p.add(ops.AttentionOp(scale=0.1))
            p.add(ops.ResidualOp(blob=nothing))
            post_norm = None if self.post is None else self.post.cuda()
            router = ops.pack_dense(self.router.cuda())
            norm_bias = None if self.bias is None else self.bias.cuda()
            layer = {
                "norm": self.norm.cuda(),
                "norm_bias": norm_bias,
                "eps": 1e-5,
                "post_norm": post_norm,
                "post_eps": 1e-6,
                **self.options,
            }
            p.add(ops.RoutedOp(blob=router, **blobs, **layer))
        p.add(ops.HeadOp(blob=ops.pack_dense(torch.eye(H).cuda())))
        self.pools = [torch.zeros(POOL, dtype=torch.float16, device="cuda") for _ in range(2)]

    def step(self, ids, *, capacity=None):
        """Through the step kernels, every id a sequence of its own."""
        n = len(ids)
        stepper = ops.gpu.StepKernels(self.program.code, capacity or n, torch.device("cuda"))
        out = torch.empty(n, H, device="cuda")
        self.run(stepper, int32(ids), out)
        return out.cpu()

    def run(self, stepper, ids, out):
        positions, _, *rest = batch(len(out))
        stepper.run(ids, positions, *rest, self.pools[:1], self.pools[1:], (0, 0), (1, D), out)

    def prefill(self, ids):
        """Through prefill, which reads the chosen experts on the host."""
        n = len(ids)
        sequences = gpu_prefill.Sequences(list(range(n + 1)), [1] * n)
        inputs = gpu_prefill.Inputs(int32(ids), *batch(n))
        return gpu_prefill.prefill(self.program, inputs, sequences, self.pools[:1], self.pools[1:]).cpu()

    def truth(self, ids, layers=2):
        """The mathematics in fp32."""
        x = self.table[torch.tensor(ids)]
        wide, narrow = self.shared or (None, None)
        gate = None if self.gate is None else self.gate.T.float()
        shared = {"shared_up": wide, "shared_down": narrow, "shared_gate": gate}
        layer = {"norm": self.norm, "norm_bias": self.bias, "eps": 1e-5, "post_norm": self.post, "post_eps": 1e-6, **self.options, **shared}
        experts = ops.RoutedOp(blob=self.router.T.float(), up=self.up, down=self.down, **layer)
        for _ in range(layers):
            reference.routed_mlp(x, experts)
        return x


CASES = {
    "top 2 of 8": {"experts": 8, "top_k": 2, "renormalize": 1.0},
    "top 8 of 60, as they are": {"experts": 60, "top_k": 8},
    "order 2": {"experts": 16, "top_k": 4, "renormalize": 2.0},
    "all": {"experts": 3, "top_k": 3, "renormalize": 1.0},
    "shared": {"experts": 6, "top_k": 2, "shared": 96},
    "shared and weighed": {"experts": 60, "top_k": 4, "shared": 608, "gate": True},
    "post norm, scaled": {"experts": 8, "top_k": 2, "renormalize": 1.0, "post": True, "scale": 0.3},
    "equal weights": {"experts": 8, "top_k": 3, "renormalize": 1.0, "tied": True},
    "dense": {"experts": 4, "top_k": 1, "make": dense},
    "laid out alike": {"experts": 20, "top_k": 6, "make": alike},
    "alike, beside a shared one that is not": {"experts": 20, "top_k": 3, "renormalize": 1.0, "make": alike, "shared": 608, "gate": True},
    "layer norm": {"experts": 16, "top_k": 4, "renormalize": 1.0, "make": alike, "layer_norm": True},
    "layer norm with a bias": {"experts": 36, "top_k": 4, "layer_norm": True, "bias": True, "shared": 96, "gate": True},
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_its_mathematics(name):
    layer = Sparse(**CASES[name])
    ids = list(range(9))
    want, got = layer.truth(ids), layer.step(ids)
    scale = (want - layer.table[:9]).norm(dim=1)
    for found in (got, layer.prefill(ids)):
        errors = ((found - want).norm(dim=1) / scale).sort().values
        assert float(errors[-2]) < 5e-3, "one token may be so undecided that fp16 chooses another expert"
    for n in (1, 2, 8):
        assert torch.equal(layer.step(ids[:n]), got[:n]), "what a token gets depends neither on the tokens beside it nor on the capacity"
    assert torch.equal(layer.step(ids[:3], capacity=64), got[:3])
    many = [i % 64 for i in range(64)]
    assert torch.equal(layer.step(many)[:9], got)


def test_a_step_can_be_captured():
    """No synchronisation and no allocation: the graph replays with the bits of separate launches."""
    layer = Sparse(12, 4, renormalize=1.0, shared=96, gate=True)
    stepper = ops.gpu.StepKernels(layer.program.code, 4, torch.device("cuda"))
    ids, out = int32(range(4)), torch.empty(4, H, device="cuda")
    positions, _, *rest = batch(4)  # allocated before
    arguments = (ids, positions, *rest, layer.pools[:1], layer.pools[1:], (0, 0), (1, D), out)
    stepper.run(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stepper.run(*arguments)
    for first in (10, 30):
        ids.copy_(int32(range(first, first + 4)))
        graph.replay()
        assert torch.equal(out.cpu(), layer.step(range(first, first + 4)))


def test_what_no_token_chose_is_not_read():
    """Strips of every other expert are overwritten after the first step: a kernel that read them would compute something else."""
    layer = Sparse(12, 2, renormalize=1.0)
    good = layer.step([3])
    experts = next(op for op in layer.program.steps if isinstance(op, ops.RoutedOp))
    chosen = set()
    for done in range(2):
        x = reference.norm(layer.truth([3], done), layer.norm, 1e-5, None, False)
        ranked = reference.route(x @ layer.router.T.float(), 4, 1.0)[0]  # two more, should fp16 choose otherwise
        chosen |= set(ranked.flatten().tolist())
    assert len(chosen) < 12
    spoilt = 0
    for expert in set(range(12)) - chosen:
        for blob in (experts.up[expert], experts.down[expert]):
            blob[-2048:].random_(0, 256)
            spoilt += 1
    assert spoilt and torch.equal(layer.step([3]), good)


def test_an_expert_in_one_piece_is_refused():
    p = ops.Program("cuda")
    p.add(ops.EmbedOp(table=torch.zeros(4, H).cuda()))
    whole, down = ops.pack_dense(torch.zeros(2 * INNER, H).cuda()), ops.pack_dense(torch.zeros(H, INNER).cuda())
    with pytest.raises(RuntimeError, match="in two parts"):
        p.add(ops.RoutedOp(blob=ops.pack_dense(torch.zeros(1, H).cuda()), up=[whole], down=[down], top_k=1))
