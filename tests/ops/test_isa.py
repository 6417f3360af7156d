"""Every instruction set gives the same bits, and the torch references run without the library."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exl2nb.ops import _load

LEVELS = ("base", "avx2", "avx512")
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 13, 30)  # every way in which rows are cut into blocks


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def digest() -> str:
    """Bits of a run through every op and width."""
    from exl2nb import ops

    from .cases import Net, exl2, gptq, single

    h = hashlib.sha256()

    def take(t):
        h.update(t.contiguous().view(torch.uint8).numpy().tobytes())

    blobs = [ops.pack_exl2(*exl2(192, 64, [(bits, 128), (bits, 64)], seed=bits), out_features=55) for bits in (2, 3, 4, 5, 6, 8)]
    for options in ({}, {"zeros": False, "wide": True}, {"act_order": True}):
        blobs += [gptq(160, 55, bits, 48, seed=bits, **options).pack() for bits in (2, 3, 4, 8)]
    blobs += [ops.pack_dense(randn(70, 50, seed=1).to(dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    for blob in blobs:
        for M in ROWS:
            take(ops.linear(randn(M, ops.shape(blob)[0], seed=M), blob))
    for bits in (2, 3, 4, 5, 6, 8):  # one row over several tiles at once, short and long ones
        for K in (192, 4224):
            take(
                ops.linear(randn(1, K, seed=bits), ops.pack_exl2(*exl2(K, 608, [(bits, K - 96), (bits, 96)], seed=bits), out_features=600))
            )
    take(ops.linear(randn(1, 2400, seed=1), gptq(2400, 600, 4, 48, seed=1).pack()))
    x = randn(3, 96, seed=2)
    for activation in ("silu", "gelu", "gelu_tanh"):
        gate_up = ops.pack_dense(randn(140, 96, seed=3))
        take(ops.GateUpOp(norm=torch.ones(96), eps=1e-5, blob=gate_up, activation=activation)(x))
    for norm in (torch.ones(96), None):
        up = ops.pack_dense(randn(70, 96, seed=4))
        take(ops.GateUpOp(norm=norm, eps=1e-5, blob=up, activation="gelu", gated=False, layer_norm=norm is not None)(x))
    qkv = ops.pack_dense(randn(4 * 24, 96, seed=5))
    experts = [ops.pack_dense(randn(n, k, seed=n)) for k, n in [(96, 48), (24, 96)] * 4]
    router = ops.pack_dense(randn(4, 96, seed=6))
    shared = {"shared_up": experts[0], "shared_down": experts[1], "shared_gate": ops.pack_dense(torch.ones(1, 96))}
    layer = {"norm": torch.ones(96), "eps": 1e-5, "blob": router, "up": experts[::2], "down": experts[1::2]}
    take(ops.RoutedOp(**layer, top_k=2, renormalize=2.0, **shared)(y := x.clone()))
    take(y)
    angles = torch.arange(54).view(9, 6) * 0.1
    for full in (False, True):
        pools = [torch.zeros(1, 1, 256, 24, dtype=torch.float16) for _ in range(2)]
        options = {"q_norm": torch.ones(48 if full else 24), "layer_norm": not full, "interleaved": full, "clip": 2.0}
        tables = {"cos": angles.cos(), "sin": angles.sin()}
        layer = ops.QkvOp(norm=torch.ones(96), eps=1e-5, blob=qkv, **tables, num_heads=2, num_kv_heads=1, head_dim=24, **options)
        take(layer(x, torch.arange(3).int(), torch.arange(3).int(), *pools))
        take(pools[0])
    for options in (
        {},
        {"dense": True, "head_dim": 40, "head_norms": True},
        {"storages": ("fp32", "fp32"), "softcap": 9.0, "window": 50},
        {"storages": ("q4", "q8")},
        {"storages": ("q8", "q4"), "head_dim": 24},
        {"storages": ("fp8", "fp8"), "head_dim": 16},
    ):
        net = Net(**options)
        pools = net.pools()
        for start, n in ((0, 270), (270, 1)):
            take(net.program.run(*single(start, [(3 * i) % net.vocab for i in range(n)], [1, 3]), *pools))
        for pool in pools[0] + pools[1]:
            take(pool)
    return h.hexdigest()


def run(code: str, **env: str) -> str:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'tests'); {code}"]
    done = subprocess.run(command, cwd=root, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("level", [level for level in LEVELS if LEVELS.index(level) < LEVELS.index(_load.load_libraries().isa)])
def test_same_bits(level):
    out = run(
        f"from ops import test_isa as t; from exl2nb.ops import _load; assert _load.load_libraries().isa == {level!r}; print(t.digest())",
        EXL2NB_ISA=level,
    )
    assert out == digest()


def test_reference_engine():
    """EXL2NB_ENGINE=reference never loads the library and still answers."""
    code = "import torch; from exl2nb import ops; from exl2nb.ops import _load; from ops.cases import *; n = Net(); "
    code += "print(_load.load_libraries().loaded, tuple(n.program.run(*single(0, [1, 2], [0]), *n.pools()).shape))"
    assert run(code, EXL2NB_ENGINE="reference") == "() (2, 101)"
