"""The fused ops against their references: norm + q/k/v + rotation, norm + gate/up, norm + head, residual, embedding; every option."""

import itertools

import pytest
import torch

from exl2nb import ops
from exl2nb.ops._library import REFERENCE_OPS

from .cases import P, exl2, i32, new_pool, op_by_op, same_bits, single

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
NORMS = {"rms": (True, False, False), "layer": (True, False, True), "layer with bias": (True, True, True), "none": (False, False, False)}
HEAD_NORMS = {
    "none": lambda heads, D: None,
    "one": lambda heads, D: (D,),
    "rows": lambda heads, D: (heads, D),
    "full": lambda heads, D: (heads * D,),
}
ROTATIONS = [(False, 0.0, 6), (True, 0.0, 12), (True, 0.7, 4), (False, 0.5, 0)]  # interleaved, clip, rotated pairs
HEADS = [(4, 4, 32, 16), (4, 2, 40, 20), (8, 1, 64, 16), (2, 2, 128, 64)]  # query heads, KV heads, head_dim, rotated pairs
PROJECTIONS = [
    *itertools.product(NORMS, HEAD_NORMS, [(h, kv, 24, *rotation) for h, kv in ((4, 2), (2, 1)) for rotation in ROTATIONS], ["fp32"], [3]),
    *itertools.product(["rms"], HEAD_NORMS, [(h, kv, D, False, 0.0, half) for h, kv, D, half in HEADS], ["fp16", "fp32"], [1, 3, 21]),
]


def close(ours, expected, tolerance=2e-5):
    """1e-3 is within the error of 16-bit activations, which products with coded weights have."""
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def norm_of(kind, size, g):
    """The weight (or None) and the keywords of a norm."""
    weight, bias, layer = NORMS[kind]
    options = {"norm_bias": torch.randn(size, generator=g) if bias else None, "layer_norm": layer}
    return torch.rand(size, generator=g) if weight else None, options


@pytest.mark.parametrize(("norm_kind", "head_norms", "shape", "storage", "T"), PROJECTIONS)
def test_norm_qkv_rope(norm_kind, head_norms, shape, storage, T):
    g = torch.Generator().manual_seed(T)
    (Hq, Hkv, D, interleaved, clip, half), H = shape, 40
    N = (Hq + 2 * Hkv) * D
    blob, bias = ops.pack_dense(torch.randn(N, H, generator=g) * 0.2), torch.randn(N, generator=g)
    x = 1 + torch.randn(T, H, generator=g)
    norm, options = norm_of(norm_kind, H, g)
    shapes = [HEAD_NORMS[head_norms](count, D) for count in (Hq, Hkv)]
    q_norm, k_norm = (None if shape is None else torch.rand(shape, generator=g) for shape in shapes)
    angles = torch.rand(600, half, generator=g) * 6
    positions, slots = torch.randperm(600, generator=g)[:T].int(), torch.randperm(3 * P, generator=g)[:T].int()
    pools = [new_pool(storage, 3, Hkv, D, fill=0.0) for _ in range(4)]
    heads = {"num_heads": Hq, "num_kv_heads": Hkv, "head_dim": D, "q_norm": q_norm, "k_norm": k_norm}
    turned = {"cos": angles.cos(), "sin": angles.sin(), "interleaved": interleaved}
    layer = ops.QkvOp(norm=norm, eps=1e-5, blob=blob, bias=bias, **turned, **heads, clip=clip, **options)
    q = layer(x, positions, slots, *pools[:2])
    where = (angles.cos(), angles.sin(), positions, slots, *pools[2:])
    close(q, REFERENCE_OPS["norm_qkv_rope"](x, norm, 1e-5, blob, bias, *where, *heads.values(), *options.values(), interleaved, clip))
    for ours, expected in zip(pools[:2], pools[2:]):
        close(ours, expected, 2e-5 if storage == "fp32" else 2e-3)
        untouched = torch.ones(3 * P, dtype=torch.bool).index_fill(0, slots.long(), False)
        assert (ours.transpose(1, 2).reshape(3 * P, -1)[untouched] == 0).all()


def test_half_pools_round_to_nearest_even():
    """f16 pools hold exactly the f32 pools' values, rounded once."""
    g = torch.Generator().manual_seed(1)
    H, Hkv, D, T = 32, 2, 24, 5
    blob = ops.pack_dense(torch.randn(4 * Hkv * D, H, generator=g) * 5)
    x = torch.randn(T, H, generator=g)
    angles = torch.rand(9, D // 2, generator=g)
    pools = {dtype: [torch.zeros(1, Hkv, P, D, dtype=dtype) for _ in range(2)] for dtype in (torch.float16, torch.float32)}
    for k, v in pools.values():
        heads = {"num_heads": 2 * Hkv, "num_kv_heads": Hkv, "head_dim": D}
        layer = ops.QkvOp(norm=torch.ones(H), eps=1e-6, blob=blob, cos=angles.cos(), sin=angles.sin(), **heads)
        layer(x, i32([0, 1, 2, 3, 8]), i32([9, 4, 3, 0, 7]), k, v)
    for half, full in zip(*pools.values()):
        assert torch.equal(half, full.half())


@pytest.mark.parametrize(("name", "value"), [("positions", 600), ("positions", -1), ("slots", 3 * P), ("slots", -1)])
def test_out_of_range_indices_raise_and_write_nothing(name, value):
    H, D = 32, 16
    blob = ops.pack_dense(torch.randn(3 * D, H))
    k, v = torch.zeros(3, 1, P, D), torch.zeros(3, 1, P, D)
    where = {"positions": i32([0, 1]), "slots": i32([0, 1])}
    where[name][1] = value
    tables = {"cos": torch.ones(600, 8), "sin": torch.ones(600, 8)}
    layer = ops.QkvOp(norm=torch.ones(H), eps=1e-5, blob=blob, **tables, num_heads=1, num_kv_heads=1, head_dim=D)
    with pytest.raises(RuntimeError, match=f"norm_qkv_rope: a {name[:-1]} is {value}; expected 0 to"):
        layer(torch.randn(2, H), where["positions"], where["slots"], k, v)
    assert (k == 0).all()
    assert (v == 0).all()


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("M", [1, 7])
@pytest.mark.parametrize("I", [96, 37])
def test_norm_gate_up(kind, gated, activation, M, I):  # noqa: E741
    g = torch.Generator().manual_seed(M)
    blob = ops.pack_concat([ops.pack_dense(torch.randn(I, 64, generator=g)) for _ in range(1 + gated)])
    x, bias = 3 + torch.randn(M, 64, generator=g), torch.randn((1 + gated) * I, generator=g)
    norm, options = norm_of(kind, 64, g)
    y = ops.GateUpOp(norm=norm, eps=1e-6, blob=blob, bias=bias, activation=activation, gated=gated, **options)(x)
    assert y.shape == (M, I)
    close(y, REFERENCE_OPS["norm_gate_up"](x, norm, 1e-6, blob, bias, ACTIVATIONS.index(activation), *options.values(), gated))


def test_activations_far_out():
    """Large gates of both signs neither overflow nor lose their sign."""
    gates = torch.tensor([-1e30, -200.0, -88.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 88.0, 200.0, 1e30])
    n = len(gates)
    blob = ops.pack_dense(torch.zeros(2 * n, 1))
    bias = torch.cat([gates, torch.ones(n)])
    for index, name in enumerate(ACTIVATIONS):
        y = ops.GateUpOp(norm=torch.ones(1), eps=1e-6, blob=blob, bias=bias, activation=name)(torch.ones(1, 1))
        expected = REFERENCE_OPS["norm_gate_up"](torch.ones(1, 1), torch.ones(1), 1e-6, blob, bias, index)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


def test_norm_gate_up_through_exl2():
    blob = ops.pack_concat([ops.pack_exl2(*exl2(256, 96, [(4, 128), (3, 128)], seed=s, scale=0.2)) for s in (1, 2)])
    x, norm = torch.randn(9, 256, generator=torch.Generator().manual_seed(0)), torch.ones(256)
    close(ops.GateUpOp(norm=norm, eps=1e-5, blob=blob)(x), REFERENCE_OPS["norm_gate_up"](x, norm, 1e-5, blob, None, 0), 1e-3)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("R", [0, 1, 6])
def test_norm_head(kind, coded, R):
    g = torch.Generator().manual_seed(R)
    dense = ops.pack_dense(torch.randn(101, 128, generator=g))
    blob = ops.pack_exl2(*exl2(128, 128, [(8, 32), (6, 96)], scale=0.2), out_features=101) if coded else dense
    x, bias = 3 + torch.randn(R, 128, generator=g), torch.randn(101, generator=g)
    norm, options = norm_of(kind, 128, g)
    y = ops.HeadOp(norm=norm, eps=1e-5, blob=blob, bias=bias, **options)(x)
    assert y.shape == (R, 101)
    if R:
        close(y, REFERENCE_OPS["norm_head"](x, norm, 1e-5, blob, bias, *options.values()), 1e-3 if coded else 2e-5)


def test_layer_norm_is_torchs():
    g = torch.Generator().manual_seed(0)
    x, weight, bias = 100 + torch.randn(3, 50, generator=g), torch.rand(50, generator=g), torch.randn(50, generator=g)
    y = ops.HeadOp(norm=weight, eps=1e-5, blob=ops.pack_dense(torch.eye(50)), norm_bias=bias, layer_norm=True)(x)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (50,), weight, bias, 1e-5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("M", [1, 6])
def test_linear_residual(norm, scale, M):
    g = torch.Generator().manual_seed(M)
    blob, x = ops.pack_dense(torch.randn(50, 30, generator=g)), torch.randn(M, 30, generator=g)
    bias, weight = torch.randn(50, generator=g), torch.rand(50, generator=g) if norm else None
    ours = torch.randn(M, 50, generator=g)
    expected = ours.clone()
    ops.ResidualOp(blob=blob, bias=bias, norm=weight, eps=1e-5, scale=scale)(ours, x)
    REFERENCE_OPS["linear_residual"](expected, x, blob, bias, weight, 1e-5, scale)
    close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embed(dtype):
    table, places = torch.randn(11, 37).to(dtype), torch.randn(6, 37).to(dtype)
    ids, positions = i32([0, 10, 3]), i32([5, 0, 2])
    assert torch.equal(ops.EmbedOp(table=table)(ids), table[ids.long()].float())
    placed = ops.EmbedOp(table=table, scale=6.5, position_table=places)
    got = placed(ids, positions)
    close(got, table[ids.long()].float() * 6.5 + places[positions.long()].float())
    for bad in (-1, 11):
        with pytest.raises(RuntimeError, match=f"embed: a token id is {bad}; expected 0 to 10"):
            ops.EmbedOp(table=table)(i32([0, bad]))
    for bad in (-1, 6):
        with pytest.raises(RuntimeError, match=f"embed: a position is {bad}; expected 0 to 5"):
            placed(ids, i32([0, 1, bad]))


def everything(*, parallel):
    """A program with every feature, and pools for it."""
    g = torch.Generator().manual_seed(3)
    H, D, Hq, Hkv, I, V = 32, 16, 2, 1, 48, 19  # noqa: E741
    table, places = torch.randn(V, H, generator=g), torch.randn(600, H, generator=g)
    qkv, o, up, down, head = (
        ops.pack_dense(torch.randn(n, k, generator=g) * k**-0.5) for k, n in ((H, 4 * D), (Hq * D, H), (H, I), (I, H), (H, V))
    )
    norm, bias, post = torch.rand(H, generator=g), torch.randn(H, generator=g), torch.rand(H, generator=g)
    q_norm, k_norm = torch.rand(Hq * D, generator=g), torch.rand(Hkv, D, generator=g)
    angles = torch.rand(600, 4, generator=g)
    options = {"norm_bias": bias, "layer_norm": True}
    heads = {"num_heads": Hq, "num_kv_heads": Hkv, "head_dim": D, "q_norm": q_norm, "k_norm": k_norm, "interleaved": True, "clip": 2.0}
    mlp = {"activation": "gelu", "gated": False, **options}
    added = {"norm": post, "eps": 1e-6, "scale": 0.4}
    program = ops.Program()
    program.add(ops.EmbedOp(table=table, scale=3.0, position_table=places))
    program.add(ops.QkvOp(norm=norm, eps=1e-5, blob=qkv, cos=angles.cos(), sin=angles.sin(), **heads, **options))
    program.add(ops.AttentionOp(scale=0.25))
    inside = [ops.ResidualOp(blob=o, **added), ops.GateUpOp(norm=norm, eps=1e-5, blob=up, side=parallel, **mlp)]
    program.add(*(reversed(inside) if parallel else inside))
    program.add(ops.ResidualOp(blob=down, side=parallel, **added))
    program.add(ops.HeadOp(norm=norm, eps=1e-5, blob=head, **options))
    return program, lambda: ([torch.zeros(3, Hkv, P, D)], [torch.zeros(3, Hkv, P, D)])


@pytest.mark.parametrize("parallel", [False, True])
def test_program_equals_op_by_op(parallel):
    program, pools = everything(parallel=parallel)
    mine, theirs, slow = pools(), pools(), pools()
    for start, end in itertools.pairwise((0, 260, 261)):
        batch = single(start, [i % 19 for i in range(start, end)], [2, 0])
        logits = program.run(*batch, *mine)
        assert torch.equal(logits, op_by_op(program, *batch, *theirs))
        close(logits, REFERENCE_OPS["decode_step"](program.code, *batch, *slow))
    assert same_bits(mine[0] + mine[1], theirs[0] + theirs[1])


def test_wrong_arguments_are_named():
    blob, x, norm = ops.pack_dense(torch.randn(32, 32)), torch.randn(2, 32), torch.ones(32)
    with pytest.raises(ValueError, match="silu, gelu, gelu_tanh"):
        ops.GateUpOp(norm=norm, eps=1e-6, blob=blob, activation="relu6")
    with pytest.raises(RuntimeError, match="norm_head: norm_bias without norm"):
        ops.HeadOp(eps=1e-5, blob=blob, norm_bias=norm, layer_norm=True)(x)
    with pytest.raises(RuntimeError, match="linear_residual: norm is float32"):
        ops.ResidualOp(blob=blob, norm=torch.ones(31))(x.clone(), x)
    program = ops.Program()
    program.add(ops.EmbedOp(table=torch.randn(5, 32)))
    made = {"cos": torch.ones(9, 8), "sin": torch.ones(9, 8), "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    wide = ops.pack_dense(torch.randn(64, 32))
    with pytest.raises(ValueError, match=r"head norm is .*expected \(16,\), \(2, 16\) or \(32,\)"):
        program.add(ops.QkvOp(norm=norm, eps=1e-5, blob=wide, **made, q_norm=torch.ones(8)))
    with pytest.raises(ValueError, match="linear_residual: norm is"):
        program.add(ops.ResidualOp(blob=blob, norm=torch.ones(31)))
    program.add(ops.ResidualOp(blob=blob, side=True))
    program.add(ops.HeadOp(norm=norm, eps=1e-5, blob=blob))
    with pytest.raises(RuntimeError, match="nothing to add to the residual"):
        program.run(*single(0, [1], [0]), [torch.zeros(1, 1, P, 16)], [torch.zeros(1, 1, P, 16)])
