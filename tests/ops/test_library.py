"""Schemas, fakes and aliasing of every op, checked by torch.library.opcheck."""

import pytest
import torch

from exl2nb import ops

from .model_case import Net, P, exl2, i32, single

OPS = torch.ops.exl2nb
TESTS = ("test_schema", "test_faketensor")


def blob():
    return ops.pack_exl2(*exl2(64, 64, [(4, 64)]))


def qkv_args():
    pools = (torch.zeros(2, 1, P, 16), torch.zeros(2, 1, P, 16))
    angles = (torch.ones(9, 8), torch.ones(9, 8), i32([0, 1]), i32([0, 1]))
    return (torch.randn(2, 64), torch.ones(64), 1e-5, blob(), None, *angles, *pools, 2, 1, 16, None, torch.ones(16))


def attention_args():
    pool = torch.randn(2, 1, P, 16).half()
    return (torch.randn(2, 2, 16), pool, pool.clone(), i32([[0]]), i32([0, 2]), i32([5]), 0.25, 0, 0.0)


CASES = {
    "embed": lambda: (torch.randn(5, 8), i32([1, 2])),
    "pack_exl2": lambda: (*exl2(64, 32, [(4, 64)]), 1.0, 32),
    "pack_dense": lambda: (torch.randn(8, 16),),
    "pack_concat": lambda: ([blob(), blob()],),
    "unpack": lambda: (blob(),),
    "reconstruct": lambda: exl2(64, 32, [(4, 64)]),
    "linear": lambda: (torch.randn(2, 64), blob(), None),
    "linear_residual": lambda: (torch.randn(2, 64), torch.randn(2, 64), blob(), torch.randn(64)),
    "norm_qkv_rope": qkv_args,
    "paged_attention": attention_args,
    "norm_gate_up": lambda: (torch.randn(2, 64), torch.ones(64), 1e-5, blob(), None, 0),
    "norm_head": lambda: (torch.randn(2, 64), torch.ones(64), 1e-5, blob(), None),
    "read_memory": lambda: (torch.zeros(1 << 20, dtype=torch.uint8),),
    "isa": lambda: (torch.zeros(1),),
}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    torch.library.opcheck(getattr(OPS, name).default, CASES[name](), test_utils=TESTS)


def test_opcheck_decode_step():
    net = Net(layers=1)
    k, v = net.pools()
    torch.library.opcheck(OPS.decode_step.default, (net.program.code, *single(0, [1, 2], [0]), k, v), test_utils=TESTS)


def test_memory_is_read():
    assert ops.read_memory(torch.zeros(3 << 20, dtype=torch.uint8)) == 0
    assert ops.read_memory(torch.ones(3 << 20, dtype=torch.uint8)) != 0
