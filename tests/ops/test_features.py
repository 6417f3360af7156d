"""What only some architectures ask of the ops, against the references: LayerNorm, no norm, head and post norms, factors, positions."""

import itertools

import pytest
import torch

from exl2nb import ops
from exl2nb.ops._library import REFERENCES

from .cases import P, i32, single


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


NORMS = {"rms": (True, False, False), "layer": (True, False, True), "layer with bias": (True, True, True), "none": (False, False, False)}


def norm_of(kind, size, g):
    """The weight (or None) and the keywords of a norm."""
    weight, bias, layer = NORMS[kind]
    options = {"norm_bias": torch.randn(size, generator=g) if bias else None, "layer_norm": layer}
    return torch.rand(size, generator=g) if weight else None, options


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("M", [1, 5])
def test_norms_and_ungated_mlp(kind, gated, M):
    g = torch.Generator().manual_seed(M)
    blob = ops.pack_dense(torch.randn(74, 40, generator=g))
    x = 3 + torch.randn(M, 40, generator=g)
    norm, options = norm_of(kind, 40, g)
    bias = torch.randn(74, generator=g)
    y = ops.norm_gate_up(x, norm, 1e-5, blob, bias, activation="gelu_tanh", gated=gated, **options)
    assert y.shape == (M, 37 if gated else 74)
    close(y, REFERENCES["norm_gate_up"](x, norm, 1e-5, blob, bias, 2, *options.values(), gated))
    close(ops.norm_head(x, norm, 1e-5, blob, bias, **options), REFERENCES["norm_head"](x, norm, 1e-5, blob, bias, *options.values()))


def test_layer_norm_is_torchs():
    g = torch.Generator().manual_seed(0)
    x, weight, bias = 100 + torch.randn(3, 50, generator=g), torch.rand(50, generator=g), torch.randn(50, generator=g)
    y = ops.norm_head(x, weight, 1e-5, ops.pack_dense(torch.eye(50)), norm_bias=bias, layer_norm=True)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (50,), weight, bias, 1e-5), rtol=1e-4, atol=1e-4)


HEAD_NORMS = {
    "none": lambda heads, D: None,
    "one": lambda heads, D: (D,),
    "rows": lambda heads, D: (heads, D),
    "full": lambda h, D: (h * D,),
}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("head_norms", HEAD_NORMS)
@pytest.mark.parametrize(("interleaved", "clip", "half"), [(False, 0.0, 6), (True, 0.0, 12), (True, 0.7, 4), (False, 0.5, 0)])
@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 2), (2, 1)])
def test_norm_qkv_rope(kind, head_norms, interleaved, clip, half, Hq, Hkv):
    g = torch.Generator().manual_seed(Hq)
    T, H, D = 3, 40, 24
    blob = ops.pack_dense(torch.randn((Hq + 2 * Hkv) * D, H, generator=g) * 0.2)
    x = 1 + torch.randn(T, H, generator=g)
    norm, options = norm_of(kind, H, g)
    shapes = (HEAD_NORMS[head_norms](Hq, D), HEAD_NORMS[head_norms](Hkv, D))
    q_norm, k_norm = (None if shape is None else torch.rand(shape, generator=g) for shape in shapes)
    angles = torch.rand(9, half, generator=g)
    where = (angles.cos(), angles.sin(), i32([0, 5, 8]), i32([9, 4, 3]))
    pools = [torch.zeros(1, Hkv, P, D) for _ in range(4)]
    heads = {"num_heads": Hq, "num_kv_heads": Hkv, "head_dim": D, "q_norm": q_norm, "k_norm": k_norm}
    layer = ops.QKVProjection(norm, 1e-5, blob, None, *where[:2], **heads, interleaved=interleaved, clip=clip, **options)
    q = ops.norm_qkv_rope(x, layer, *where[2:], *pools[:2])
    rest = (*heads.values(), *options.values(), interleaved, clip)
    close(q, REFERENCES["norm_qkv_rope"](x, norm, 1e-5, blob, None, *where, *pools[2:], *rest))
    close(pools[0], pools[2])
    close(pools[1], pools[3])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("M", [1, 6])
def test_linear_residual(norm, scale, M):
    g = torch.Generator().manual_seed(M)
    blob, x = ops.pack_dense(torch.randn(50, 30, generator=g)), torch.randn(M, 30, generator=g)
    bias, weight = torch.randn(50, generator=g), torch.rand(50, generator=g) if norm else None
    ours = torch.randn(M, 50, generator=g)
    expected = ours.clone()
    ops.linear_residual(ours, x, blob, bias, norm=weight, eps=1e-5, scale=scale)
    REFERENCES["linear_residual"](expected, x, blob, bias, weight, 1e-5, scale)
    close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embed(dtype):
    table, places = torch.randn(11, 37).to(dtype), torch.randn(6, 37).to(dtype)
    ids, positions = i32([0, 10, 3]), i32([5, 0, 2])
    got = ops.embed(table, ids, scale=6.5, position_table=places, positions=positions)
    close(got, table[ids.long()].float() * 6.5 + places[positions.long()].float())
    for bad in (-1, 6):
        with pytest.raises(RuntimeError, match=f"embed: a position is {bad}; expected 0 to 5"):
            ops.embed(table, ids, position_table=places, positions=i32([0, 1, bad]))


def everything(*, parallel):
    """A program with every feature, and the same op by op."""
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
    program.embed(table, scale=3.0, position_table=places)
    projection = ops.QKVProjection(norm, 1e-5, qkv, None, angles.cos(), angles.sin(), **heads, **options)
    program.norm_qkv_rope(projection, layer=0)
    program.paged_attention(layer=0, scale=0.25)
    if parallel:
        program.norm_gate_up(norm, 1e-5, up, aside=True, **mlp)
        program.linear_residual(o, **added)
    else:
        program.linear_residual(o, **added)
        program.norm_gate_up(norm, 1e-5, up, **mlp)
    program.linear_residual(down, aside=parallel, **added)
    program.norm_head(norm, 1e-5, head, **options)

    def step(ids, positions, slots, block_table, cu_seqlens, context_lens, rows, k_pools, v_pools):
        x = ops.embed(table, ids, scale=3.0, position_table=places, positions=positions)
        q = ops.norm_qkv_rope(x, projection, positions, slots, k_pools[0], v_pools[0])
        mixed = ops.paged_attention(q, k_pools[0], v_pools[0], block_table, cu_seqlens, context_lens, scale=0.25)
        if parallel:
            inner = ops.norm_gate_up(x, norm, 1e-5, up, **mlp)
            ops.linear_residual(x, mixed, o, **added)
        else:
            ops.linear_residual(x, mixed, o, **added)
            inner = ops.norm_gate_up(x, norm, 1e-5, up, **mlp)
        ops.linear_residual(x, inner, down, **added)
        return ops.norm_head(x[rows.long()].contiguous(), norm, 1e-5, head, **options)

    return program, step, lambda: ([torch.zeros(3, Hkv, P, D)], [torch.zeros(3, Hkv, P, D)])


@pytest.mark.parametrize("parallel", [False, True])
def test_program_equals_op_by_op(parallel):
    program, step, pools = everything(parallel=parallel)
    mine, theirs, slow = pools(), pools(), pools()
    for start, end in itertools.pairwise((0, 260, 261)):
        batch = single(start, [i % 19 for i in range(start, end)], [2, 0])
        logits = program.run(*batch, *mine)
        assert torch.equal(logits, step(*batch, *theirs))
        close(logits, REFERENCES["decode_step"](program.code, *batch, *slow))
    assert torch.equal(mine[0][0], theirs[0][0])


def test_wrong_arguments_are_named():
    blob, x, norm = ops.pack_dense(torch.randn(32, 32)), torch.randn(2, 32), torch.ones(32)
    with pytest.raises(RuntimeError, match="norm_head: norm_bias without norm"):
        ops.norm_head(x, None, 1e-5, blob, norm_bias=norm, layer_norm=True)
    with pytest.raises(RuntimeError, match="linear_residual: norm is float32"):
        ops.linear_residual(x.clone(), x, blob, norm=torch.ones(31))
    program = ops.Program()
    program.embed(torch.randn(5, 32))
    tables = (torch.ones(9, 8), torch.ones(9, 8))
    wide = ops.pack_dense(torch.randn(64, 32))
    with pytest.raises(ValueError, match=r"head norm is .*expected \(16,\), \(2, 16\) or \(32,\)"):
        program.norm_qkv_rope(ops.QKVProjection(norm, 1e-5, wide, None, *tables, 2, 1, 16, q_norm=torch.ones(8)), layer=0)
    with pytest.raises(ValueError, match="linear_residual: norm is"):
        program.linear_residual(blob, norm=torch.ones(31))
    program.linear_residual(blob, aside=True)
    program.norm_head(norm, 1e-5, blob)
    with pytest.raises(RuntimeError, match="nothing to add to the residual"):
        program.run(*single(0, [1], [0]), [torch.zeros(1, 1, P, 16)], [torch.zeros(1, 1, P, 16)])
