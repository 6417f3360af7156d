"""Steps that draw their own tokens on a thread of their own: the bits of `decode_step` and `draw_rows`, one behind the other."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops._library import REFERENCES
from exl2nb.ops.ahead import MOST_ROWS

from .model_case import Net, P, i32, single

CONTEXTS = [5, 1, 290, 17, 256, 40]  # tokens that are there; a sequence has the pages 2 i and 2 i + 1
OPTIONS = [
    {},
    {"dense": True},
    {"bias": True, "head_norms": True},
    {"bias": True, "dense": True},
    {"kv_heads": 1, "window": 9, "softcap": 20.0},
    {"pool": torch.float32, "heads": 3, "kv_heads": 3, "dense": True},
    {"coded": ("q4", "q4")},
    {"coded": ("fp16", "q8")},
]


def filled(net):
    """Pools with every sequence's context."""
    pools = net.pools()
    for i, n in enumerate(CONTEXTS):
        net.program.run(*single(0, [(31 * i + 7 * t) % net.vocab for t in range(n)], [2 * i, 2 * i + 1]), *pools)
    return pools


def decodes(ids, more=0):
    """One token for each sequence, `more` places behind its context."""
    at = [n + more for n in CONTEXTS]
    slots = [(2 * i + n // P) * P + n % P for i, n in enumerate(at)]
    table = [[2 * i, 2 * i + 1] for i in range(len(at))]
    return i32(ids), i32(at), i32(slots), i32(table), i32(range(len(at) + 1)), i32([n + 1 for n in at]), i32(range(len(at)))


def settings(rows, seed=0):
    """Greedy and drawn rows in turns."""
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(seed)).double()
    return torch.tensor([[0.0, 0, 1, 0, 0] if i % 2 else [1.1, 20, 0.9, 0.01, float(uniform[i])] for i in range(rows)], dtype=torch.float64)


def begin(net, batch, pools, wanted, top=0, feed=None, previous=None):
    return ops.draw_ahead(net.program.code, *batch, *pools, wanted, top, feed, previous)


def equal(one, other):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_of_a_step_and_a_draw(options, threads):
    net = Net(pages=2 * len(CONTEXTS), **options)
    batch, wanted = decodes([3, 1, 4, 1, 5, 9]), settings(len(CONTEXTS))
    pools = filled(net)
    threads(1)
    logits = net.run(*batch, *pools)
    expected = [ops.draw_rows(logits, wanted, None, 3), logits, *pools[0], *pools[1]]
    for n in (1, 2, 3, 8):
        threads(n)
        pools = filled(net)
        drawn, logits = begin(net, batch, pools, wanted, 3)
        ops.join_ahead(drawn)
        assert equal([drawn, logits, *pools[0], *pools[1]], expected), n
        pools = filled(net)
        assert equal([*ops.step_draw(net.program.code, *batch, *pools, wanted, 3), *pools[0], *pools[1]], expected), n


@pytest.mark.parametrize("dense", [False, True])
def test_some_rows_of_texts_of_several_tokens(dense, threads):
    """Sequences of unequal length, logits of a few tokens, in another order."""
    net = Net(dense=dense, pages=4)
    counts, rows = [5, 1, 9, 4], [18, 4, 5]
    at = [i for n in counts for i in range(n)]
    slots = [page * P + i for page, n in enumerate(counts) for i in range(n)]
    bounds = [sum(counts[:i]) for i in range(5)]
    batch = (i32([(17 * i) % net.vocab for i in range(19)]), i32(at), i32(slots), i32([[i] for i in range(4)]), i32(bounds), i32(counts))
    pools = net.pools()
    expected = [net.run(*batch, i32(rows), *pools), *pools[0], *pools[1]]
    for n in (2, 8):
        threads(n)
        again = net.pools()
        drawn, logits = begin(net, (*batch, i32(rows)), again, settings(3))
        ops.join_ahead(drawn)
        assert equal([logits, *again[0], *again[1]], expected)


@pytest.mark.parametrize("dense", [False, True])
def test_a_step_takes_what_the_one_before_it_draws(dense):
    """Five steps, all begun before any is read; sequence 1 gets a token from the host each time, and 0 and 2 change places."""
    net, steps = Net(dense=dense, pages=2 * len(CONTEXTS)), 5
    pools, again = filled(net), filled(net)
    feed = torch.tensor([0, -1, 2, 3, 4, 5], dtype=torch.int32)
    ids, expected = [3, 1, 4, 1, 5, 9], []
    for step in range(steps):
        drawn = ops.draw_rows(net.program.run(*decodes(ids, step), *again), settings(6, step), None, step)
        expected.append(drawn)
        ids = [int(row[0]) if i != 1 else 50 + step for i, row in enumerate(drawn)]
    batch, flying = [part.clone() for part in decodes([3, 1, 4, 1, 5, 9])], []
    for step in range(steps):
        known = [0, 49 + step, 0, 0, 0, 0] if step else [3, 1, 4, 1, 5, 9]
        for buffer, part in zip(batch, decodes(known, step)):
            buffer.copy_(part)  # while the steps before still run
        fed = (feed, flying[-1][0]) if step else (None, None)
        flying.append(begin(net, batch, pools, settings(6, step), step, *fed))
    for (drawn, _), wanted in zip(flying, expected):
        ops.join_ahead(drawn)
        ops.join_ahead(drawn)
        assert torch.equal(drawn, wanted)
    assert equal(pools[0] + pools[1], again[0] + again[1])


def test_what_nobody_waits_for_ends_by_itself():
    net = Net(pages=2 * len(CONTEXTS))
    batch, pools = decodes([3, 1, 4, 1, 5, 9]), filled(net)
    expected = begin(net, batch, filled(net), settings(6))
    ops.join_ahead(expected[0])
    for _ in range(20):
        begin(net, batch, filled(net), settings(6))  # its tensors are dropped while it runs
    drawn, logits = begin(net, batch, pools, settings(6))
    ops.join_ahead(drawn)
    assert equal([drawn, logits], expected)


def test_a_row_without_a_distribution():
    """It draws nothing; a step that is fed from it runs all the same."""
    net = Net(pages=2 * len(CONTEXTS), dense=True)
    pools = filled(net)
    pools[1][0][4] = float("nan")  # a page of sequence 2
    drawn, logits = begin(net, decodes([3, 1, 4, 1, 5, 9]), pools, settings(6))
    after, _ = begin(net, decodes([0] * 6, 1), pools, settings(6), 0, torch.arange(6, dtype=torch.int32), drawn)
    ops.join_ahead(after)
    assert drawn[:, 0].tolist()[2] == -1
    assert bool(logits[2].isnan().all())
    assert min(drawn[[0, 1, 3, 4, 5], 0].tolist()) >= 0
    assert after[2, 0] == -1


def test_the_reference_runs_at_once():
    net = Net(pages=2 * len(CONTEXTS), bias=True)
    batch, pools = decodes([3, 1, 4, 1, 5, 9]), filled(net)
    reference = REFERENCES["draw_ahead"]
    drawn, logits = begin(net, batch, pools, settings(6), 2)
    ops.join_ahead(drawn)
    slow, expected = reference(net.program.code, *batch, *filled(net), settings(6), 2, None, None)
    torch.testing.assert_close(logits, expected, rtol=5e-3, atol=5e-3 * float(expected.std()))
    assert slow.shape == drawn.shape
    assert equal(REFERENCES["step_draw"](net.program.code, *batch, *filled(net), settings(6), 2), [slow, expected])
    feed = torch.tensor([5, -1, -1, -1, -1, 0], dtype=torch.int32)
    fed = reference(net.program.code, *decodes([7, 1, 4, 1, 5, 7], 1), *filled(net), settings(6), 0, feed, slow)[1]
    ids = [int(slow[5, 0]), 1, 4, 1, 5, int(slow[0, 0])]
    assert torch.equal(fed, reference(net.program.code, *decodes(ids, 1), *filled(net), settings(6), 0, None, None)[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": i32([0, 0, 101, 0, 0, 0])}, "a token id is 101"),
        ({"slots": i32([0, 0, 0, 0, 0, 99 * P])}, "a slot is"),
        ({"settings": settings(5)}, r"settings is float64 \(5, 5\)"),
        ({"settings": settings(6) * -1}, "settings are out of range"),
        ({"top": 102}, "top is 102; expected 0 to 101"),
        ({"feed": i32([0] * 6)}, "together or not at all"),
        ({"feed": i32([0, 0, 0, 0, 0, 6]), "previous": torch.zeros(6, 4, dtype=torch.float64)}, "feed is 6; expected -1 to 5"),
        ({"feed": i32([0, -2, 0, 0, 0, 0]), "previous": torch.zeros(6, 4, dtype=torch.float64)}, "feed is -2"),
        ({"feed": i32([0] * 5), "previous": torch.zeros(6, 4, dtype=torch.float64)}, "feed is int32"),
        ({"feed": i32([0] * 6), "previous": torch.zeros(6, 4)}, "previous is float32"),
    ],
)
def test_what_is_refused(change, message):
    """Before anything is begun: the pools stay as they were."""
    net = Net(pages=2 * len(CONTEXTS))
    names = ("ids", "positions", "slots", "block_table", "cu_seqlens", "context_lens", "logit_rows")
    batch = dict(zip(names, decodes([3, 1, 4, 1, 5, 9])))
    rest = {"settings": settings(6), "top": 0, "feed": None, "previous": None}
    batch.update({k: v for k, v in change.items() if k in names})
    rest.update({k: v for k, v in change.items() if k in rest})
    pools = net.pools()
    with pytest.raises(RuntimeError, match=message):
        ops.draw_ahead(net.program.code, *batch.values(), *pools, *rest.values())
    assert equal(pools[0] + pools[1], net.pools()[0] + net.pools()[1])


def test_too_many_rows_or_none():
    net, n = Net(), MOST_ROWS + 1
    with pytest.raises(RuntimeError, match=f"the step has {n} tokens"):
        begin(net, single(0, [1] * n, [0]), net.pools(), settings(n))
    with pytest.raises(RuntimeError, match="4 tokens and 0 rows"):
        begin(net, (*single(0, [1] * 4, [0])[:6], i32([])), net.pools(), torch.zeros(0, 5, dtype=torch.float64))
