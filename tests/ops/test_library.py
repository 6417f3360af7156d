"""Schemas, fakes and aliasing of every op, checked by torch.library.opcheck; the probes of memory and instruction set."""

import pytest
import torch

from exl2nb import ops
from exl2nb.converter.hessian import factorize
from exl2nb.ops import cuda_attention  # noqa: F401  defines the ops of prompts

from .cases import Net, exl2, gptq, i32, new_pool, single


def blob(K=64, N=64):
    return ops.pack_exl2(*exl2(K, N, [(4, K)]))


def pools(kind, D=32):
    made = [new_pool(kind, 2, 1, D) for _ in range(2)]
    for pool in made:
        pool.view(torch.uint8).zero_()
    return made


def projection(kind):
    table, at = torch.ones(9, 8), i32([0, 1])
    return (torch.randn(2, 64), torch.ones(64), 1e-5, blob(N=128), None, table, table, at, at, *pools(kind), 2, 1, 32, None, torch.ones(32))


def attention(kind):
    return (torch.randn(2, 2, 32), *pools(kind), i32([[0]]), i32([0, 2]), i32([5]), 0.25, 0, 0.0)


def draw(top=5):
    settings = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.5]] * 3, dtype=torch.float64)
    return (torch.randn(3, 100), settings, torch.full((3, 4), -1, dtype=torch.int32), top)


def quantisation():
    factor = factorize(torch.eye(32, dtype=torch.float64))
    return (torch.randn(32, 8), factor.upper, torch.ones(8), i32([4, 32]))


def experts():
    matrices = {"up": [blob(N=128)] * 3, "down": [blob()] * 3, "shared_up": blob(N=128), "shared_down": blob(), "shared_gate": blob(N=32)}
    matrices |= {"blob": ops.pack_dense(torch.randn(3, 64)), "shared_gate": ops.pack_dense(torch.randn(1, 64))}
    return ops.RoutedOp(norm=torch.ones(64), eps=1e-5, top_k=2, **matrices).arguments(torch.randn(3, 64))


def rotation(T=3, D=16):
    table, at = torch.ones(9, D // 2), i32(range(T))
    return (torch.randn(T, 4 * D).half(), table, table, at, at, *(torch.zeros(1, 1, 256, D).half() for _ in range(2)), 2, 1, D)


NET = Net(layers=1)
CASES = {
    "embed": lambda: (torch.randn(5, 8), i32([1, 2])),
    "pack_exl2": lambda: (*exl2(64, 32, [(4, 64)]), 1.0, 32),
    "pack_gptq": lambda: (*gptq(64, 32, 4, 32, act_order=True).arguments, 4, 64),
    "pack_gptq, wide scales": lambda: (*gptq(64, 32, 4, 32, zeros=False, wide=True).arguments, 4, 64),
    "pack_dense": lambda: (torch.randn(8, 16),),
    "pack_concat": lambda: ([blob(), blob()],),
    "unpack": lambda: (blob(),),
    "reconstruct": lambda: exl2(64, 32, [(4, 64)]),
    "gptq_quantize": quantisation,
    "linear": lambda: (torch.randn(2, 64), blob(), None),
    "linear_residual": lambda: (torch.randn(2, 64), torch.randn(2, 64), blob(), torch.randn(64)),
    # float8 pools are left out: opcheck multiplies them, which torch cannot
    **{f"norm_qkv_rope, {kind}": lambda kind=kind: projection(kind) for kind in ("fp32", "q4", "q8")},
    **{f"paged_attention, {kind}": lambda kind=kind: attention(kind) for kind in ("fp16", "q4", "q8")},
    "norm_gate_up": lambda: (torch.randn(2, 64), torch.ones(64), 1e-5, blob(), None, 0),
    "routed_mlp": experts,
    "norm_head": lambda: (torch.randn(2, 64), torch.ones(64), 1e-5, blob(), None),
    "norm_rows": lambda: (torch.randn(3, 8), torch.ones(8), None, 1e-5, False),
    "gate_rows": lambda: (torch.randn(3, 8).half(), 0, True),
    "rotate_rows": rotation,
    "merge_parts": lambda: ([torch.randn(3, 2, 8).half() for _ in range(2)], [torch.randn(2, 3) for _ in range(2)]),
    "draw_rows": draw,
    "mask_logits": lambda: (torch.randn(100), torch.tensor([5, -1, 0, 7], dtype=torch.int32)),
    "decode_step": lambda: (NET.program.code, *single(0, [1, 2], [0]), *NET.pools()),
    "read_memory": lambda: (torch.zeros(1 << 20, dtype=torch.uint8),),
    "isa": lambda: (torch.zeros(1),),
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    name = case.partition(",")[0]
    utils = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    utils = utils[:2] if name in ("isa", "decode_step") else utils  # AOT dispatch does not keep what these two answer about
    found = torch.library.opcheck(getattr(torch.ops.exl2nb, name).default, CASES[case](), test_utils=utils)
    assert set(found.values()) == {"SUCCESS"}


def test_memory_is_read():
    assert ops.read_memory(torch.zeros(3 << 20, dtype=torch.uint8)) == 0
    assert ops.read_memory(torch.ones(3 << 20, dtype=torch.uint8)) != 0
