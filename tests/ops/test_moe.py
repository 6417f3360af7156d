"""The routed MLP: against the reference, row by row, and without reading experts that were not chosen."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops._library import REFERENCE_OPS

from .cases import exl2

H, INNER, E = 64, 96, 6


def experts(*, dense=False, count=E, shared=0, gate=True, seed=0):
    """Keyword arguments of the op but for norm and routing."""
    g = torch.Generator().manual_seed(seed)

    def matrix(k, n):
        if dense:
            return ops.pack_dense(torch.randn(n, k, generator=g) * k**-0.5)
        groups = [(6, 32), *[(4, 32)] * (k // 32 - 2), (3, 32)]
        return ops.pack_exl2(*exl2(k, n, groups, seed=int(torch.randint(1 << 20, (1,), generator=g)), scale=0.5))

    def row(n):
        return ops.pack_dense((torch.randn(n, H, generator=g) * H**-0.5).half())

    found = {
        "blob": row(count),
        "up": [ops.pack_concat([matrix(H, INNER), matrix(H, INNER)]) for _ in range(count)],
        "down": [matrix(INNER, H) for _ in range(count)],
    }
    if shared:
        found |= {"shared_up": ops.pack_concat([matrix(H, shared)] * 2), "shared_down": matrix(shared, H)}
        found |= {"shared_gate": row(1)} if gate else {}
    return found


def rows(T, seed=1):
    return torch.randn(T, H, generator=torch.Generator().manual_seed(seed))


NORM = 1 + 0.1 * torch.randn(H, generator=torch.Generator().manual_seed(3))
CASES = [
    {"top_k": 2, "renormalize": 1.0},
    {"top_k": 1, "dense": True, "activation": "gelu_tanh", "layer_norm": True, "norm_bias": NORM - 1},
    {"top_k": E, "renormalize": 2.0, "dense": True, "shared": 32, "gate": False, "scale": 0.3},
    {"top_k": 3, "shared": 64, "post_norm": NORM, "post_eps": 1e-5, "activation": "gelu"},
    {"top_k": 1, "count": 1, "renormalize": 0.5},
]


def case(options):
    made = {key: options[key] for key in ("dense", "count", "shared", "gate") if key in options}
    return experts(**made) | {key: value for key, value in options.items() if key not in made}


def routed(x, a, norm=NORM):
    return ops.RoutedOp(norm=norm, eps=1e-5, **a)(x)


def positional(x, norm, eps, a):
    return ops.RoutedOp(norm=norm, eps=eps, **a).arguments(x)


@pytest.mark.parametrize("norm", [NORM, None], ids=["norm", "plain"])
@pytest.mark.parametrize("options", CASES, ids=lambda c: f"top{c['top_k']}")
def test_against_the_reference(options, norm):
    a = case(options)
    if norm is None:
        a.pop("norm_bias", None)
    ours, want = rows(37), rows(37)
    chosen = routed(ours, a, norm)
    expected = REFERENCE_OPS["routed_mlp"](*positional(want, norm, 1e-5, a))
    assert torch.equal(chosen, expected)
    assert chosen.dtype == torch.int32 and chosen.shape == (37, a["top_k"])
    added = want - rows(37)
    assert float((ours - want).abs().max() / added.std()) < (1e-5 if options.get("dense") else 2e-3)


@pytest.mark.parametrize("options", CASES, ids=lambda c: f"top{c['top_k']}")
def test_rows_are_independent(options):
    """More rows than the kernel keeps in flight, and any part of them: the same bits."""
    a, together = case(options), rows(700)
    chosen = routed(together, a)
    for first, last in ((0, 1), (1, 4), (4, 260), (260, 700)):
        part = rows(700)[first:last].clone()
        assert torch.equal(routed(part, a), chosen[first:last])
        assert torch.equal(part, together[first:last])


def test_only_chosen_experts_are_read():
    """Weights of the others are NaN, and the result is the same."""
    a = experts(dense=True) | {"top_k": 2, "renormalize": 1.0}
    good = rows(1)
    chosen = routed(good, a)[0].tolist()
    for name, outputs in (("up", 2 * INNER), ("down", H)):
        spoiled = ops.pack_dense(torch.full((outputs, INNER if name == "down" else H), torch.nan))
        a[name] = [blob if i in chosen else spoiled for i, blob in enumerate(a[name])]
    again = rows(1)
    routed(again, a)
    assert torch.equal(again, good)


def test_equal_weights_choose_the_first():
    a = experts(dense=True) | {"top_k": 3}
    a["blob"] = ops.pack_dense(torch.zeros(E, H))
    assert routed(rows(2), a).tolist() == [[0, 1, 2]] * 2


def test_nan_rows_stay_alone():
    a, x = experts() | {"top_k": 2}, rows(5)
    x[2] = torch.nan
    alone = rows(5)[3:4].clone()
    routed(x, a)
    routed(alone, a)
    assert x[2].isnan().all() and torch.equal(x[3:4], alone)
    nothing = torch.empty(0, H)
    assert routed(nothing, a).shape == (0, 2)


WRONG = {
    "top_k is 7": {"top_k": 7},
    "top_k is 0": {"top_k": 0},
    "down": {"down": []},
    "5; expected 6": {"blob": ops.pack_dense(torch.zeros(5, 5))},
    "expected \\(64, 208\\)": {"down": [ops.pack_dense(torch.zeros(H, INNER + 8))] * E},
    "activation is": {"activation": "relu"},
    "shared": {"shared_down": ops.pack_dense(torch.zeros(H, 32))},
    "post_norm": {"post_norm": torch.ones(3)},
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_named(words):
    a = {"top_k": 2, **experts(dense=True), **WRONG[words]}
    with pytest.raises((RuntimeError, ValueError), match="routed_mlp"):
        routed(rows(2), a)
    program = ops.Program()
    program.add(ops.EmbedOp(table=torch.zeros(9, H)))
    with pytest.raises(ValueError, match=words):
        program.add(ops.RoutedOp(norm=NORM, eps=1e-5, **a))
