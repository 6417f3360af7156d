"""The fused ops against their references: norm + q/k/v + rotation, norm + gate/up, norm + head, embedding."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops._library import REFERENCES

from .cases import P, exl2, i32


def close(ours, expected):
    """Within the error that 16-bit activations make."""
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("T", [1, 3, 21])
@pytest.mark.parametrize("pool", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("Hq", "Hkv", "D", "half"), [(4, 4, 32, 16), (4, 2, 40, 20), (8, 1, 64, 16), (2, 2, 128, 64)], ids=["mha", "gqa", "mqa partial", "128"]
)
@pytest.mark.parametrize("head_norms", [0, 1, 2])
def test_norm_qkv_rope(T, pool, Hq, Hkv, D, half, head_norms):
    g = torch.Generator().manual_seed(T)
    H, N = 96, (Hq + 2 * Hkv) * D
    blob = ops.pack_dense(torch.randn(N, H, generator=g) * 0.2)
    x, norm, bias = torch.randn(T, H, generator=g), torch.rand(H, generator=g), torch.randn(N, generator=g)
    cos, sin = torch.randn(600, half, generator=g), torch.randn(600, half, generator=g)
    positions, slots = torch.randperm(600, generator=g)[:T].int(), torch.randperm(3 * P, generator=g)[:T].int()
    shapes = {0: (None, None), 1: ((D,), (D,)), 2: ((Hq, D), (Hkv, D))}[head_norms]
    q_norm, k_norm = (None if s is None else torch.rand(s, generator=g) for s in shapes)
    pools = [torch.zeros(3, Hkv, P, D, dtype=pool) for _ in range(4)]
    args, heads = (norm, 1e-5, blob, bias, cos, sin), (Hq, Hkv, D, q_norm, k_norm)
    q = ops.norm_qkv_rope(x, ops.QKVProjection(*args, *heads), positions, slots, *pools[:2])
    expected = REFERENCES["norm_qkv_rope"](x, *args, positions, slots, *pools[2:], *heads)
    torch.testing.assert_close(q, expected, rtol=1e-4, atol=1e-4)
    tolerance = {"rtol": 2e-3, "atol": 1e-3} if pool == torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(pools[0], pools[2], **tolerance)
    torch.testing.assert_close(pools[1], pools[3], **tolerance)
    written = torch.zeros(3 * P, dtype=torch.bool)
    written[slots.long()] = True
    untouched = pools[0].transpose(1, 2).reshape(3 * P, -1)[~written]
    assert (untouched == 0).all()


def test_half_pools_round_to_nearest_even():
    """f16 pools hold exactly the f32 pools' values, rounded once."""
    g = torch.Generator().manual_seed(1)
    H, Hkv, D, T = 32, 2, 24, 5
    blob = ops.pack_dense(torch.randn(4 * Hkv * D, H, generator=g) * 5)
    x = torch.randn(T, H, generator=g)
    angles = torch.rand(9, D // 2, generator=g)
    pools = {dtype: [torch.zeros(1, Hkv, P, D, dtype=dtype) for _ in range(2)] for dtype in (torch.float16, torch.float32)}
    for k, v in pools.values():
        layer = ops.QKVProjection(torch.ones(H), 1e-6, blob, None, angles.cos(), angles.sin(), 2 * Hkv, Hkv, D)
        ops.norm_qkv_rope(x, layer, i32([0, 1, 2, 3, 8]), i32([9, 4, 3, 0, 7]), k, v)
    for half, single in zip(*pools.values()):
        assert torch.equal(half, single.half())


@pytest.mark.parametrize(("name", "value"), [("positions", 600), ("positions", -1), ("slots", 3 * P), ("slots", -1)])
def test_out_of_range_indices_raise_and_write_nothing(name, value):
    H, D = 32, 16
    blob = ops.pack_dense(torch.randn(3 * D, H))
    k, v = torch.zeros(3, 1, P, D), torch.zeros(3, 1, P, D)
    where = {"positions": i32([0, 1]), "slots": i32([0, 1])}
    where[name][1] = value
    layer = ops.QKVProjection(torch.ones(H), 1e-5, blob, None, torch.ones(600, 8), torch.ones(600, 8), 1, 1, D)
    with pytest.raises(RuntimeError, match=f"norm_qkv_rope: a {name[:-1]} is {value}; expected 0 to"):
        ops.norm_qkv_rope(torch.randn(2, H), layer, where["positions"], where["slots"], k, v)
    assert (k == 0).all()
    assert (v == 0).all()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("M", [1, 7])
@pytest.mark.parametrize("I", [96, 37])
def test_norm_gate_up(activation, M, I):  # noqa: E741
    g = torch.Generator().manual_seed(M)
    gate_up = ops.pack_concat([ops.pack_dense(torch.randn(I, 64, generator=g)), ops.pack_dense(torch.randn(I, 64, generator=g))])
    x, norm, bias = torch.randn(M, 64, generator=g), torch.rand(64, generator=g), torch.randn(2 * I, generator=g)
    y = ops.norm_gate_up(x, norm, 1e-6, gate_up, bias, activation=activation)
    expected = REFERENCES["norm_gate_up"](x, norm, 1e-6, gate_up, bias, ("silu", "gelu", "gelu_tanh").index(activation))
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


def test_activations_far_out():
    """Large gates of both signs neither overflow nor lose their sign."""
    gates = torch.tensor([-1e30, -200.0, -88.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 88.0, 200.0, 1e30])
    n = len(gates)
    blob = ops.pack_dense(torch.zeros(2 * n, 1))
    bias = torch.cat([gates, torch.ones(n)])
    for index, name in enumerate(("silu", "gelu", "gelu_tanh")):
        y = ops.norm_gate_up(torch.ones(1, 1), torch.ones(1), 1e-6, blob, bias, activation=name)
        expected = REFERENCES["norm_gate_up"](torch.ones(1, 1), torch.ones(1), 1e-6, blob, bias, index)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


def test_norm_gate_up_through_exl2():
    blob = ops.pack_concat([ops.pack_exl2(*exl2(256, 96, [(4, 128), (3, 128)], seed=s, scale=0.2)) for s in (1, 2)])
    x, norm = torch.randn(9, 256, generator=torch.Generator().manual_seed(0)), torch.ones(256)
    close(ops.norm_gate_up(x, norm, 1e-5, blob), REFERENCES["norm_gate_up"](x, norm, 1e-5, blob, None, 0))


@pytest.mark.parametrize("R", [0, 1, 6])
def test_norm_head(R):
    blob = ops.pack_exl2(*exl2(128, 128, [(8, 32), (6, 96)], scale=0.2), out_features=101)
    x, norm = torch.randn(R, 128), torch.rand(128)
    y = ops.norm_head(x, norm, 1e-5, blob)
    assert y.shape == (R, 101)
    if R:
        close(y, REFERENCES["norm_head"](x, norm, 1e-5, blob, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embed(dtype):
    table = torch.randn(11, 37).to(dtype)
    ids = i32([0, 10, 3, 3])
    assert torch.equal(ops.embed(table, ids), table[ids.long()].float())
    for bad in (-1, 11):
        with pytest.raises(RuntimeError, match=f"embed: a token id is {bad}; expected 0 to 10"):
            ops.embed(table, i32([0, bad]))


def test_unknown_activation():
    with pytest.raises(ValueError, match="silu, gelu, gelu_tanh"):
        ops.norm_gate_up(torch.ones(1, 1), torch.ones(1), 1e-6, ops.pack_dense(torch.ones(2, 1)), activation="relu6")
