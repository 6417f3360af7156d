"""Sampling on the GPU against `exl2nb.sampling`, which defines it, and against its own promises."""

import numpy as np
import pytest
import torch

from exl2nb.ops._library import REFERENCE_OPS
from exl2nb.ops.cuda_sample import Row, pack_cuts, pack_rows, sample_rows
from exl2nb.sampling.chain import filtered, sample_row
from exl2nb.sampling.draw import uniform
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.sampler_state import SamplerState

SETTINGS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"temperature": 1.7, "top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "top_p": 0.9},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "top_k": 20},
    {"temperature": 0.0, "banned_tokens": range(0, 300, 2)},
    {"banned_tokens": [5, 9], "logit_bias": {7: 3.0, 11: -2.0}, "repetition_penalty": 1.3, "top_p": 0.9},
    {"allowed_tokens": range(40), "temperature": 1.5, "top_k": 12},
]
PROMPT, TEXT = [1, 5, 5, 9, 200], [5, 7, 7, 7]
gpu = pytest.mark.gpu


def run(logits, rows, *, counts=None, ring=1, following=None, bias=None, into=None):
    following = following or {}
    arguments = [following.get(name) for name in ("step", "ids", "positions", "context_lens", "slots", "block_table")]
    return sample_rows(logits, pack_rows(rows).to(logits.device), counts, *arguments, ring, False, bias, into)


def bias_of(settings, rows, vocab):
    """What masks and logit_bias of `settings` add."""
    bias = torch.zeros(rows, vocab)
    if "allowed_tokens" in settings:
        bias[:] = -torch.inf
        bias[:, list(settings["allowed_tokens"])] = 0
    for token, amount in settings.get("logit_bias", {}).items():
        bias[:, token] += amount
    bias[:, list(settings.get("banned_tokens", ()))] = -torch.inf
    return bias


def history(vocab):
    counts = torch.zeros(vocab, dtype=torch.int16)
    for t in TEXT:
        counts[t] += 1
    for t in set(PROMPT):
        counts[t] += -32768
    return counts


def state_of(seed, **settings):
    state = SamplerState(SamplingParams(seed=seed, **settings), PROMPT)
    for t in TEXT:
        state.push(t)
    return state


def check(device, vocab, settings, *, spread=3.0, draws=40):
    """The same tokens as the definition's, except where its own rounding decides: the draw falls within 1e-5 of a token's border."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(draws, vocab, generator=g) * spread
    biases = {name: settings[name] for name in ("banned_tokens", "allowed_tokens", "logit_bias") if name in settings}
    plain = {name: value for name, value in settings.items() if name not in biases}
    rows = [Row(seed=s, counter=len(TEXT), top=s % 4, **plain) for s in range(draws)]
    bias = bias_of(settings, draws, vocab).to(device) if biases else None
    counts = history(vocab).repeat(draws, 1)
    results, top_ids, top_logprobs = (t.cpu() for t in run(logits.to(device), rows, counts=counts.to(device), bias=bias))
    wrong = 0
    for r, (x, row) in enumerate(zip(logits.numpy(), rows)):
        token, rank, _, _ = results[0, r].tolist()
        logprob = float(results[0, r, 2:3].view(torch.float32))
        state = state_of(r, **settings)
        left = filtered(x, state_of(r, **settings))
        expected = sample_row(x, state, top=row.top)
        wrong += token != expected.id
        assert np.isfinite(left[token])
        if token == expected.id:
            assert rank == expected.rank
            assert abs(logprob - expected.logprob) < 1e-4
        assert [i for i, _ in expected.top] == top_ids[r, : row.top].tolist()
        np.testing.assert_allclose(top_logprobs[r, : row.top].numpy(), [p for _, p in expected.top], atol=1e-4)
    assert wrong <= draws // 20, f"{wrong} of {draws} draws differ"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_reference_is_the_definition(settings):
    check("cpu", 300, settings, draws=20)


def check_columns(device, vocab, columns, settings):
    """Columns that are never drawn: as a bias of -inf there, which the settings without columns are compared with."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(12, vocab, generator=g) * 3
    logits[:, columns:] += 40
    biases = {name: settings[name] for name in ("banned_tokens", "allowed_tokens", "logit_bias") if name in settings}
    plain = {name: value for name, value in settings.items() if name not in biases}
    bias = bias_of(settings, 12, vocab)
    shut = bias.clone()
    shut[:, columns:] = -torch.inf

    def drawn(columns, bias):
        rows = [Row(seed=s, counter=len(TEXT), top=s % 4, columns=columns, **plain) for s in range(12)]
        counts = history(vocab).repeat(12, 1).to(device)
        found = run(logits.to(device), rows, counts=counts, bias=None if bias is None else bias.to(device))
        unasked = torch.arange(20) >= torch.arange(12)[:, None] % 4
        return [found[0].cpu(), *(t.cpu().masked_fill(unasked, 0) for t in found[1:])]

    for got, wanted in zip(drawn(columns, bias if biases else None), drawn(0, shut)):
        assert torch.equal(got, wanted)
    ids = drawn(columns, bias if biases else None)[0][0, :, 0]
    assert ids.min() >= 0
    assert ids.max() < columns
    for every in (vocab, vocab + 7):
        for got, wanted in zip(drawn(every, bias if biases else None), drawn(0, bias if biases else None)):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_reference_leaves_out_columns(settings):
    check_columns("cpu", 330, 301, settings)


@gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    @pytest.mark.parametrize(("vocab", "columns"), [(330, 301), (4099, 4098), (5000, 400), (151936, 151669), (262145, 262144)])
    def test_columns_beyond_the_last_token(self, vocab, columns, settings):
        check_columns("cuda", vocab, columns, settings)

    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    @pytest.mark.parametrize("vocab", [300, 4099, 32000, 128256, 262145])
    def test_tokens(self, vocab, settings):
        check("cuda", vocab, settings, draws=20)

    @pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {}], ids=str)
    def test_ties_and_masks(self, settings):
        logits = torch.full((4, 5000), 2.0)
        logits[1, :4000] = float("-inf")
        logits[2, 1:] = float("-inf")
        logits[3] = -0.0
        logits[3, 77] = 0.0
        rows = [Row(seed=3, **settings)] * 4
        ours, theirs = run(logits.cuda(), rows)[0].cpu(), run(logits, rows)[0]
        assert torch.equal(ours[..., [0, 1, 3]], theirs[..., [0, 1, 3]])

    def test_greedy_where_quotients_overflow(self):
        logits = torch.full((3, 5000), 1e30)
        logits[:, 77] += 1e29
        cuts: list[dict] = [{}, {"top_p": 0.5}, {"top_k": 4, "min_p": 0.1}]
        rows = [Row(seed=3, temperature=1e-9, **cut) for cut in cuts]
        assert run(logits.cuda(), rows)[0].cpu()[..., 0].tolist() == run(logits, rows)[0][..., 0].tolist() == [[77] * 3]

    def test_draws_follow_the_distribution(self):
        probs = torch.tensor([0.5, 0.2, 0.2, 0.05, 0.04, 0.01])
        n = 20000
        logits = torch.full((5000,), float("-inf"))
        logits[[0, 17, 1000, 2222, 4000, 4999]] = probs.log()
        rows = [Row(seed=1, counter=i) for i in range(n)]
        ids = run(logits.repeat(n, 1).cuda(), rows)[0][0, :, 0].cpu()
        seen = torch.stack([(ids == t).sum() for t in (0, 17, 1000, 2222, 4000, 4999)]) / n
        assert (seen - probs).abs().max() < 0.015
        assert seen.sum() == 1

    def test_rows_without_a_distribution_are_told(self):
        logits = torch.zeros(4, 6000)
        logits[0, 5999], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
        results = run(logits.cuda(), [Row(), Row(temperature=0.0), Row(top_k=3), Row(temperature=0.0)])[0].cpu()
        assert results[0, :, 0].tolist() == [-1, -1, -1, 0]

    @pytest.mark.parametrize("pdl", [False, True])
    def test_bits_depend_on_the_row_alone_and_a_graph_repeats_them(self, pdl):
        g = torch.Generator().manual_seed(1)
        logits = (torch.randn(5, 32000, generator=g) * 3).cuda()
        rows = [Row(seed=s, top=20, top_k=s * 20, top_p=0.95) for s in range(5)]
        together = run(logits, rows)
        for r in range(5):
            alone = run(logits[r : r + 1].clone(), rows[r : r + 1])
            assert torch.equal(alone[0][0, 0], together[0][0, r])
            assert torch.equal(alone[2][0, : rows[r].top], together[2][r, : rows[r].top])
        params = pack_rows(rows).cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results, _, _ = sample_rows(logits, params, None, None, None, None, None, None, None, 1, pdl)
        graph.replay()
        assert torch.equal(results, together[0])
        graph.replay()  # the counters have moved on
        moved = [Row(seed=s, top=20, top_k=s * 20, top_p=0.95, counter=1) for s in range(5)]
        assert torch.equal(results, run(logits, moved)[0])

    def test_the_next_step_is_ready(self):
        def tensors(device):
            return {
                "step": torch.tensor([0, 3, 5], dtype=torch.int32, device=device),
                "ids": torch.tensor([9, 9, 9], dtype=torch.int32, device=device),
                "positions": torch.tensor([255, 10, 0], dtype=torch.int32, device=device),
                "context_lens": torch.tensor([256, 11, 0], dtype=torch.int32, device=device),
                "slots": torch.tensor([1, 2, 3], dtype=torch.int32, device=device),
                "block_table": torch.tensor([[4, 6], [5, 0], [0, 0]], dtype=torch.int32, device=device),
            }

        logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2))
        rows, counts = [Row(seed=1), Row(temperature=0.0), Row()], history(5000).repeat(3, 1)
        ours, theirs, our_counts = tensors("cuda"), tensors("cpu"), counts.cuda()
        got = run(logits.cuda(), rows, counts=our_counts, ring=4, following=ours)[0].cpu()
        expected = run(logits, rows, counts=counts, ring=4, following=theirs)[0]
        for name, value in theirs.items():
            assert torch.equal(ours[name].cpu(), value), name
        assert theirs["slots"].tolist() == [6 * 256, 5 * 256 + 11, 3]
        assert torch.equal(our_counts.cpu(), counts)
        for r, at in enumerate((0, 3, 1)):
            assert got[at, r, 0] == expected[at, r, 0]
            assert got[at, r, 3] == expected[at, r, 3]

    def test_bad_input_is_refused(self):
        with pytest.raises(RuntimeError, match="params"):
            sample_rows(torch.zeros(2, 50).cuda(), pack_rows([Row()]).cuda(), *[None] * 7, 1, False)

    def test_results_into_pinned_memory(self):
        logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(4)).cuda()
        rows, into = [Row(seed=s, top=2) for s in range(3)], torch.full((2, 3, 4), -7, dtype=torch.int32).pin_memory()
        step = torch.tensor([1, 1, 1], dtype=torch.int32)
        expected, top_ids, _ = run(logits, rows, ring=2, following={"step": step.cuda()})
        empty, ours, _ = run(logits, rows, ring=2, following={"step": step.cuda()}, into=into)
        torch.cuda.synchronize()
        assert empty.shape == (0, 3, 4)
        assert torch.equal(into[1], expected[1].cpu())
        assert (into[0] == -7).all()  # another step's
        assert torch.equal(ours[:, :2], top_ids[:, :2])

    @pytest.mark.parametrize("pinned", [False, True])
    def test_memory_that_is_not_for_results_is_refused(self, pinned):
        into = torch.zeros(1, 2, 3 if pinned else 4, dtype=torch.int32)
        with pytest.raises(RuntimeError, match=r"into is .* expected int32 \(1, 2, 4\), contiguous, pinned"):
            run(torch.zeros(2, 50).cuda(), [Row()] * 2, into=into.pin_memory() if pinned else into)
        assert run(torch.zeros(2, 50).cuda(), [Row()] * 2)[0].shape == (1, 2, 4)  # and the next launch knows nothing of it


def test_packing_is_the_structs():
    packed = pack_rows([Row(temperature=0.5, top_k=7, top=20, columns=151669, seed=2**64 - 1, counter=3)])
    assert packed.shape == (1, 48)
    assert packed[0, 24:28].view(torch.int32).item() == 7
    assert packed[0, 28:32].tolist() == [20, *(151669).to_bytes(3, "little")]
    assert packed[0, 32:40].tolist() == [255] * 8
    assert Row.unpack(bytes(packed[0].tolist())) == Row(temperature=0.5, top_k=7, top=20, columns=151669, seed=2**64 - 1, counter=3)


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.75, uniform(7, 3), 1 - 2.0**-53])
def test_cuts_bring_their_random_number(number):
    """As settings of the kernel they have a seed whose first random number is the one that they came with."""
    packed = torch.frombuffer(bytearray(pack_cuts([[0.0, 0, 1.0, 0.0, 0.0], [0.8, 40, 0.9, 0.05, number]])), dtype=torch.uint8)
    seed = int.from_bytes(bytes(packed[48 + 32 : 48 + 40].tolist()), "little")
    assert uniform(seed, 0) == number
    expected = pack_rows([Row(temperature=0.0), Row(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, seed=seed)])
    assert torch.equal(packed.view(2, 48), expected)
    some = torch.frombuffer(bytearray(pack_cuts([[0.0, 0, 1.0, 0.0, 0.0]], 151669)), dtype=torch.uint8)
    assert torch.equal(some.view(1, 48), pack_rows([Row(temperature=0.0, columns=151669)]))


def test_results_into_memory_that_is_given():
    logits, into = torch.randn(2, 50, generator=torch.Generator().manual_seed(5)), torch.zeros(1, 2, 4, dtype=torch.int32)
    assert run(logits, [Row()] * 2, into=into)[0].shape == (0, 2, 4)
    assert torch.equal(into, run(logits, [Row()] * 2)[0])


def test_the_counter_moves_on():
    params = pack_rows([Row(seed=5)])
    sample_rows(torch.zeros(1, 50), params, *[None] * 7, 1, False)
    assert params[0, 40:].tolist() == [1] + [0] * 7
    assert "sample_rows" in REFERENCE_OPS
