"""Steps that run and draw on a thread of their own: the bits of `decode_step` followed by `draw_rows`."""

import pytest
import torch

from exl2nb import ops
from exl2nb.ops._library import REFERENCE_OPS
from exl2nb.ops.cpu_sample import MOST_ROWS

from .cases import NAMES, Net, P, batch, i32, prompts, same_bits, single

CONTEXTS = [5, 1, 290, 17, 256, 40]  # cached tokens of each sequence i, in the pages 2 i and 2 i + 1
IDS = [3, 1, 4, 1, 5, 9]
OPTIONS = [
    {},
    {"dense": True},
    {"bias": True, "head_norms": True},
    {"bias": True, "dense": True},
    {"kv_heads": 1, "window": 9, "softcap": 20.0},
    {"storages": ("fp32", "fp32"), "heads": 3, "kv_heads": 3, "dense": True},
    {"storages": ("q4", "q4")},
    {"storages": ("fp16", "q8")},
]


def filled(net):
    """Pools with every sequence's context."""
    pools = net.pools()
    for i, n in enumerate(CONTEXTS):
        net.program.run(*single(0, [(31 * i + 7 * t) % net.vocab for t in range(n)], [2 * i, 2 * i + 1]), *pools)
    return pools


def decodes(ids, more=0):
    """One token for each sequence, `more` places behind its context."""
    return batch([(n + more, [token], [2 * i, 2 * i + 1]) for i, (n, token) in enumerate(zip(CONTEXTS, ids, strict=True))])


def settings(rows, seed=0):
    """Greedy and drawn rows in turns."""
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(seed)).double()
    return torch.tensor([[0.0, 0, 1, 0, 0] if i % 2 else [1.1, 20, 0.9, 0.01, float(uniform[i])] for i in range(rows)], dtype=torch.float64)


def begin(net, batch, pools, wanted, top=0, feed=None, previous=None):
    return ops.draw_ahead(net.program.code, *batch, *pools, wanted, top, feed, previous)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_of_a_step_and_a_draw(options, threads):
    net = Net(pages=2 * len(CONTEXTS), **options)
    batch, wanted = decodes(IDS), settings(len(CONTEXTS))
    pools = filled(net)
    threads(1)
    logits = net.run(*batch, *pools)
    expected = [ops.draw_rows(logits, wanted, None, 3), logits, *pools[0], *pools[1]]
    for n in (1, 2, 3, 8):
        threads(n)
        pools = filled(net)
        drawn, logits = begin(net, batch, pools, wanted, 3)
        ops.join_ahead(drawn)
        assert same_bits([drawn, logits, *pools[0], *pools[1]], expected), n
        pools = filled(net)
        assert same_bits([*ops.step_draw(net.program.code, *batch, *pools, wanted, 3), *pools[0], *pools[1]], expected), n


def test_columns_beyond_the_last_token(threads):
    """Both ops, and their references, draw from the first columns alone."""
    net, batch, wanted = Net(pages=2 * len(CONTEXTS)), decodes(IDS), settings(len(CONTEXTS))
    logits = net.run(*batch, *filled(net))
    columns = max(1, int(logits.argmax(1).min()))  # no row may draw its most probable token
    expected = ops.draw_rows(logits, wanted, None, 2, columns)
    assert expected[:, 0].max() < columns <= expected[:, 4].min()
    for n in (1, 2):
        threads(n)
        code, lora = net.program.code, (None, None)
        drawn, _ = ops.draw_ahead(code, *batch, *filled(net), wanted, 2, None, None, *lora, columns)
        ops.join_ahead(drawn)
        assert torch.equal(drawn, expected)
        assert torch.equal(ops.step_draw(code, *batch, *filled(net), wanted, 2, *lora, columns)[0], expected)
    for name, more in (("step_draw", ()), ("draw_ahead", (None, None))):
        slow = REFERENCE_OPS[name](code, *batch, *filled(net), wanted, 2, *more, *lora, columns)[0]
        assert torch.equal(slow[:, [0, 2, 3, 4]], expected[:, [0, 2, 3, 4]])


@pytest.mark.parametrize("dense", [False, True])
def test_some_rows_of_prompts(dense, threads):
    """Sequences of unequal length, logits of a few tokens, in another order."""
    net = Net(dense=dense, pages=4)
    step, pools = prompts(net, [5, 1, 9, 4], [18, 4, 5]), net.pools()
    expected = [net.run(*step, *pools), *pools[0], *pools[1]]
    for n in (2, 8):
        threads(n)
        again = net.pools()
        drawn, logits = begin(net, step, again, settings(3))
        ops.join_ahead(drawn)
        assert same_bits([logits, *again[0], *again[1]], expected)


@pytest.mark.parametrize("dense", [False, True])
def test_a_step_takes_what_the_one_before_it_draws(dense):
    """Five steps, all begun before any is read; sequence 1 gets its token from the host each time."""
    net, steps = Net(dense=dense, pages=2 * len(CONTEXTS)), 5
    pools, again = filled(net), filled(net)
    feed = torch.tensor([0, -1, 2, 3, 4, 5], dtype=torch.int32)
    ids, expected = IDS, []
    for step in range(steps):
        drawn = ops.draw_rows(net.program.run(*decodes(ids, step), *again), settings(6, step), None, step)
        expected.append(drawn)
        ids = [int(row[0]) if i != 1 else 50 + step for i, row in enumerate(drawn)]
    batch, inflight = [part.clone() for part in decodes(IDS)], []
    for step in range(steps):
        known = [0, 49 + step, 0, 0, 0, 0] if step else IDS
        for buffer, part in zip(batch, decodes(known, step)):
            buffer.copy_(part)  # while the steps before still run
        fed = (feed, inflight[-1][0]) if step else (None, None)
        inflight.append(begin(net, batch, pools, settings(6, step), step, *fed))
    for (drawn, _), wanted in zip(inflight, expected):
        ops.join_ahead(drawn)
        ops.join_ahead(drawn)
        assert torch.equal(drawn, wanted)
    assert same_bits(pools[0] + pools[1], again[0] + again[1])


def test_steps_that_are_not_joined_end_by_themselves():
    net = Net(pages=2 * len(CONTEXTS))
    batch, pools = decodes(IDS), filled(net)
    expected = begin(net, batch, filled(net), settings(6))
    ops.join_ahead(expected[0])
    for _ in range(20):
        begin(net, batch, filled(net), settings(6))  # its tensors are dropped while it runs
    drawn, logits = begin(net, batch, pools, settings(6))
    ops.join_ahead(drawn)
    assert same_bits([drawn, logits], expected)


def test_a_row_without_a_distribution():
    """It draws nothing; a step that is fed from it runs all the same."""
    net = Net(pages=2 * len(CONTEXTS), dense=True)
    pools = filled(net)
    pools[1][0][4] = float("nan")  # a page of sequence 2
    drawn, logits = begin(net, decodes(IDS), pools, settings(6))
    after, _ = begin(net, decodes([0] * 6, 1), pools, settings(6), 0, torch.arange(6, dtype=torch.int32), drawn)
    ops.join_ahead(after)
    assert drawn[:, 0].tolist()[2] == -1
    assert bool(logits[2].isnan().all())
    assert min(drawn[[0, 1, 3, 4, 5], 0].tolist()) >= 0
    assert after[2, 0] == -1


def test_the_reference_runs_at_once():
    net = Net(pages=2 * len(CONTEXTS), bias=True)
    batch, pools = decodes(IDS), filled(net)
    reference = REFERENCE_OPS["draw_ahead"]
    drawn, logits = begin(net, batch, pools, settings(6), 2)
    ops.join_ahead(drawn)
    slow, expected = reference(net.program.code, *batch, *filled(net), settings(6), 2, None, None)
    torch.testing.assert_close(logits, expected, rtol=5e-3, atol=5e-3 * float(expected.std()))
    assert slow.shape == drawn.shape
    assert same_bits(REFERENCE_OPS["step_draw"](net.program.code, *batch, *filled(net), settings(6), 2), [slow, expected])
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
def test_wrong_arguments_are_named(change, message):
    """Before anything is begun: the pools stay as they were."""
    net = Net(pages=2 * len(CONTEXTS))
    given = {**dict(zip(NAMES, decodes(IDS))), "k_pools": None, "v_pools": None}
    pools = given["k_pools"], given["v_pools"] = net.pools()
    given |= {"settings": settings(6), "top": 0, "feed": None, "previous": None, **change}
    with pytest.raises(RuntimeError, match=message):
        ops.draw_ahead(net.program.code, *given.values())
    assert same_bits(pools[0] + pools[1], net.pools()[0] + net.pools()[1])


def test_too_many_rows_or_none():
    net, n = Net(), MOST_ROWS + 1
    with pytest.raises(RuntimeError, match=f"the step has {n} tokens"):
        begin(net, single(0, [1] * n, [0]), net.pools(), settings(n))
    with pytest.raises(RuntimeError, match="4 tokens and 0 rows"):
        begin(net, (*single(0, [1] * 4, [0])[:6], i32([])), net.pools(), torch.zeros(0, 5, dtype=torch.float64))
