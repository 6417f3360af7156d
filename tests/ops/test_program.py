"""A whole step in one call: the bits of its ops one by one, at once or token by token; out of range indices; the schema of its ops."""

import pytest
import torch

from exl2nb import ops
from exl2nb.cache.spec import PAGE_STORAGES
from exl2nb.core.errors import FormatError
from exl2nb.ops.kv_codes import STORAGE_NUMBERS
from exl2nb.ops.records import OP_SCHEMA, check_schema

from .cases import NAMES, Net, P, batch, i32, prompts, same_bits, single


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dense": True},
        {"bias": True, "head_norms": True},
        {"kv_heads": 1, "window": 9, "softcap": 20.0},
        {"storages": ("fp32", "fp32")},
        {"storages": ("q4", "q4")},
        {"storages": ("q8", "q4"), "head_dim": 24},
        {"storages": ("fp8", "fp8")},
        {"storages": ("fp16", "q8")},
    ],
    ids=str,
)
def test_same_bits_as_op_by_op(options):
    net = Net(**options)
    one, other = net.pools(), net.pools()
    start = 0
    for n in (11, 1, 1, 5):
        batch = single(start, [(7 * i + start) % net.vocab for i in range(n)], [2, 0])
        assert torch.equal(net.program.run(*batch, *one), net.run(*batch, *other))
        start += n
    assert same_bits(one[0] + one[1], other[0] + other[1])


@pytest.mark.parametrize("storages", [("fp16", "fp16"), ("q4", "q4"), ("q8", "q4"), ("fp8", "fp8")], ids="-".join)
def test_at_once_in_chunks_or_token_by_token(storages):
    """290 tokens, across a page edge: logits and cache are bitwise the same."""
    net, n = Net(layers=2, storages=storages), 290
    ids = [(31 * i) % net.vocab for i in range(n)]
    pools = net.pools()
    whole = net.program.run(*single(0, ids, [3, 1]), *pools)
    for step in (1, 100, 256):
        again = net.pools()
        parts = [net.program.run(*single(a, ids[a : a + step], [3, 1]), *again) for a in range(0, n, step)]
        assert torch.equal(torch.cat(parts), whole), step
        assert same_bits(pools[0] + pools[1], again[0] + again[1])


@pytest.mark.parametrize(
    ("counts", "rows"),
    [
        ([5, 1, 4, 1, 3, 6, 4], [0, 1, 5, 9, 13, 19, 20, 23]),
        ([5, 1, 4, 1, 3, 6, 4], [23, 4, 5]),
        ([5, 1, 4, 1, 3, 6, 4], [22]),
        ([4] * 8, range(3, 32, 4)),
        ([20, 1, 1, 1, 1], [19, 20, 21, 22, 23]),
        ([24], [23]),
        ([1] * 3, [2, 0]),
    ],
    ids=["mixed", "rows out of order", "rows of one part", "equal", "one long", "one alone", "one token each"],
)
@pytest.mark.parametrize("dense", [False, True])
def test_threads_may_divide_the_sequences(counts, rows, dense, threads):
    """A batch whose sequences are shared out among threads: the bits of one thread, in logits and cache."""
    net, found = Net(dense=dense, pages=len(counts)), []
    for n in (1, 2, 3, 8):
        threads(n)
        pools = net.pools()
        found.append([net.program.run(*prompts(net, counts, rows), *pools), *pools[0], *pools[1]])
        assert same_bits(found[-1], found[0])


@pytest.mark.parametrize("storages", [("fp16", "fp16"), ("q4", "q4"), ("q8", "q4")], ids="-".join)
def test_sequences_are_independent(storages):
    """A mixed batch (a prefill and two decodes) gives each sequence the bits it gets alone."""
    net = Net(storages=storages)
    pools, alone = net.pools(), net.pools()
    texts, new = [[5, 6, 7, 8], [1, 2], [9, 10, 11]], [[12], [13], [20, 21, 22]]
    for page, text in enumerate(texts):
        for where in (pools, alone):
            net.program.run(*single(0, text, [page]), *where)
    steps = [(len(text), ids, [page]) for page, (text, ids) in enumerate(zip(texts, new))]
    expected = [net.program.run(*single(*step), *alone) for step in steps]
    assert torch.equal(net.program.run(*batch(steps), *pools), torch.cat(expected))


def test_only_the_wanted_rows():
    net = Net()
    every, some, none = (net.program.run(*prompts(net, [4], rows), *net.pools()) for rows in (None, [3, 1], []))
    assert torch.equal(some, every[[3, 1]])
    assert none.shape == (0, net.vocab)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ids", i32([1, 101, 2]), "a token id is 101; expected 0 to 100"),
        ("ids", i32([1, -1, 2]), "a token id is -1"),
        ("positions", i32([0, 1, 4 * P]), "a position is 1024"),
        ("slots", i32([0, 1, 4 * P]), "a slot is 1024; expected 0 to 1023"),
        ("slots", i32([0, -1, 2]), "a slot is -1"),
        ("slots", i32([0, 1]), r"slots is int32 \(2\)"),
        ("slots", torch.tensor([0, 1, 2]), "slots is int64"),
        ("block_table", i32([[4]]), "a page of block_table is 4"),
        ("context_lens", i32([257]), "expected at most 256"),
        ("context_lens", i32([2]), "2 for a sequence with 3 queries"),
        ("cu_seqlens", i32([0, 4]), "end at 3"),
        ("logit_rows", i32([3]), "a row of logit_rows is 3"),
    ],
)
def test_out_of_range_raises_and_writes_nothing(name, value, message):
    net = Net()
    k, v = net.pools()
    with pytest.raises(RuntimeError, match=f"decode_step: .*{message}"):
        net.program.run(**{**dict(zip(NAMES, single(0, [1, 2, 3], [0]))), name: value}, k_pools=k, v_pools=v)
    assert all((pool == 1e3).all() for pool in k + v)


PLAIN, CODED = ("fp16", "fp16"), ("q4", "q4")
WRONG_POOLS = [
    (PLAIN, lambda k, v: (k[:1], v[:1]), "there are 1 pools; the program wants layer 1"),
    (PLAIN, lambda k, v: (k, v[:1]), "2 K and 1 V pools"),
    (
        PLAIN,
        lambda k, v: tuple([p[:, :1].contiguous() for p in pools] for pools in (k, v)),
        "the pools hold 1 heads of 32; expected 2 of 32",
    ),
    (PLAIN, lambda k, v: ([k[0], k[1].float()], v), "a K pool is float32"),
    (CODED, lambda k, v: (k, [p[..., :-1].contiguous() for p in v]), r"v_pool is uint8 \(4, 2, 4607\); .* \(pages, heads, 8704 or 4608\)"),
    (CODED, lambda k, v: (k, [v[0], v[1][:2].contiguous()]), r"a V pool is uint8 \(2, 2, 4608\)"),
    (CODED, lambda k, v: (k, [v[0], torch.zeros(4, 2, 8704, dtype=torch.uint8)]), r"a V pool is uint8 \(4, 2, 8704\)"),
    (CODED, lambda k, v: (k, [p.view(torch.float8_e4m3fn) for p in v]), r"v_pool is float8_e4m3fn \(4, 2, 4608\); expected .*8704\)"),
    (CODED, lambda k, v: (k, [p.view(torch.int8) for p in v]), "v_pool is another dtype; expected float16"),
    (CODED, lambda k, v: ([p.flatten(1) for p in k], v), r"k_pool is uint8 \(4, 9216\)"),
    (CODED, lambda k, v: ([torch.zeros(4, 2, 16, 32)] * 2, v), "page size is 16; expected 256"),
]


@pytest.mark.parametrize(("storages", "change", "message"), WRONG_POOLS)
def test_wrong_pools_are_named(storages, change, message):
    net = Net(storages=storages)
    with pytest.raises(RuntimeError, match=message):
        net.program.run(*single(0, [1, 2, 3], [0]), *change(*net.pools()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[:4], "not the code of a Program"),
        (lambda c: torch.cat([c, c[:1]]), "not the code of a Program"),
        (lambda c: c.index_fill(0, torch.tensor([0]), 5), "not the code of a Program"),
        (lambda c: c.index_fill(0, torch.tensor([5]), 77), "unknown op"),
        (lambda c: c.index_fill(0, torch.tensor([5]), 6), "starts with embed"),
    ],
)
def test_a_wrong_program_is_refused(change, message):
    net = Net()
    code = change(net.program.code.clone()).contiguous()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.exl2nb.decode_step(code, *single(0, [1, 2, 3], [0]), *net.pools())


def test_program_checks_what_it_is_given():
    net, p = Net(), ops.Program()
    with pytest.raises(ValueError, match="table dtype"):
        ops.EmbedOp(table=net.table.double())
    p.add(ops.EmbedOp(table=net.table))
    with pytest.raises(ValueError, match="norm is"):
        p.add(ops.HeadOp(norm=torch.ones(63), eps=1e-5, blob=net.head))
    with pytest.raises(ValueError, match="dtype of a norm"):
        p.add(ops.HeadOp(norm=torch.ones(64).half(), eps=1e-5, blob=net.head))
    with pytest.raises(ValueError, match="outputs of the blob"):
        p.add(ops.ResidualOp(blob=net.head))
    with pytest.raises(ValueError, match="contiguous"):
        p.add(ops.HeadOp(norm=torch.ones(128)[::2], eps=1e-5, blob=net.head))
    with pytest.raises(ValueError, match="activation"):
        ops.GateUpOp(norm=torch.ones(64), eps=1e-5, blob=net.weights[0]["gate_up"], activation="tanh")


def library_schema() -> str:
    return bytes(torch.ops.exl2nb.program_schema(torch.empty(0)).tolist()).decode()


def test_the_library_has_the_same_schema():
    text = library_schema()
    check_schema(text)
    assert set(STORAGE_NUMBERS) == set(PAGE_STORAGES)
    assert {line.split()[0] for line in text.splitlines()} == {*OP_SCHEMA, "cache_formats"}


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ("norm_head 6 norm:address eps:real", "norm_head 6 eps:real norm:address", "has eps:real in op norm_head .* has norm:address"),
        ("linear_residual 4", "linear_residual 9", "has 9 in op linear_residual where this package has 4"),
        ("fp16:0 fp32:1", "fp32:0 fp16:1", "has fp32:0 in cache_formats where this package has fp16:0"),
        ("clip:real", "", "has None in op norm_qkv_rope where this package has clip:real"),
    ],
)
def test_a_schema_of_another_version_is_named(ours, theirs, message):
    text = library_schema()
    assert ours in text
    with pytest.raises(FormatError, match=message):
        check_schema(text.replace(ours, theirs))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dense": True, "bias": True},
        {"headed": False, "head_norms": True},
        {"inter": 8704, "layers": 1},  # more inputs than a thread quantises for itself
        {"window": 2, "storages": ("q8", "q4")},
    ],
    ids=str,
)
def test_one_row_on_many_threads(options, threads):
    """From eight threads on a step of one row of a large program is fused; its bits are those of one thread."""
    net, found = Net(**{"hidden": 512, "inter": 4096, "layers": 3} | options), []
    for n in (1, 8, 11, 8):
        threads(n)
        pools = net.pools()
        rows = [net.program.run(*single(0, [i % net.vocab for i in range(P - 2)], [2, 0]), *pools)]
        rows += [net.program.run(*single(start, [7 * start % net.vocab], [2, 0]), *pools) for start in range(P - 2, P + 2)]
        found.append([*rows, *pools[0], *pools[1]])
        assert same_bits(found[-1], found[0])
