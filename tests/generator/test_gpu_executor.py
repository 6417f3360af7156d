"""The GPU executor: counts and biases that a draw reads (on the CPU); draws, captured steps and full memory (marked gpu)."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import OutOfMemory
from exl2nb.generator import gpu_executor
from exl2nb.generator.executor import DrawRequest
from exl2nb.generator.gpu_executor import (
    IN_PROMPT,
    CapturedSteps,
    StepKind,
    can_write_bias,
    captured_sizes,
    has_bias,
    has_penalties,
    write_bias,
    write_counts,
)
from exl2nb.generator.speculation import Speculation
from exl2nb.sampling.filters import ALL_TOKENS
from exl2nb.sampling.params import SamplingParams
from exl2nb.sampling.sampler_state import SamplerState

PROMPT = "The rain fell on the old town, and the rain fell on the new town, and the rain"
KINDS = [
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"seed": 4, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "top_p": 0.9},
    {"seed": 5, "temperature": 0.8, "frequency_penalty": -0.2, "top_k": 30},
    {"seed": 6, "min_p": 0.02, "top_logprobs": 3},
    {"temperature": 0, "banned_tokens": [5, 13, 14, 261, 300]},
    {"seed": 7, "logit_bias": {20: 3.0, 261: -2.5, 300: 1.25}, "top_p": 0.95},
    {"seed": 8, "allowed_tokens": range(200, 900), "logit_bias": {250: 2.0}, "repetition_penalty": 1.1},
]
ON_THE_HOST = {"min_tokens": 1}  # means nothing to an answer that no token ends


@pytest.mark.parametrize("seed", range(5))
def test_counts(seed):
    chance = random.Random(seed)
    params = [{"repetition_penalty": 1.2}, {}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.1, "temperature": 0}]
    draws, wanted = [], torch.zeros(5, 50, dtype=torch.int16)
    for row, kwargs in enumerate(params):
        prompt, new = chance.choices(range(50), k=chance.randrange(1, 30)), chance.choices(range(50), k=chance.randrange(30))
        state = SamplerState(SamplingParams(**kwargs), prompt)
        for token in new:
            state.push(token)
        draws.append(DrawRequest(state, len(new), 0))
        assert has_penalties(state.params) == bool(kwargs)
        if kwargs:
            for token, times in Counter(new).items():
                wanted[row, token] += times
            for token in set(prompt):
                wanted[row, token] += IN_PROMPT
    counts = torch.full((5, 50), 9, dtype=torch.int16)
    write_counts(counts, draws, ([0, 2], torch.tensor([7, 9], dtype=torch.int32)))
    wanted[0, 7] += 1
    wanted[2, 9] += 1
    assert torch.equal(counts, wanted)


def test_nothing_to_count():
    counts = torch.ones(2, 8, dtype=torch.int16)
    write_counts(counts, [DrawRequest(SamplerState(SamplingParams(), [1]), 0, 0)], None)
    assert not counts.any()


def test_bias_is_what_masks_and_logit_bias_do():
    """Row by row: masks first, then penalties, then the bias, as the host's chain has them."""
    kinds = [
        {},
        {"banned_tokens": [3, 7, 49]},
        {"logit_bias": {0: 1.5, 7: -2.0}},
        {"allowed_tokens": [1, 2, 30], "logit_bias": {2: 0.25, 9: 4.0}},
        {"banned_tokens": [9], "logit_bias": {9: 5.0, 10: 1.0}, "temperature": 0},
    ]
    states = [SamplerState(SamplingParams(**kwargs)) for kwargs in kinds]
    bias = torch.full((6, 50), 9.0)
    write_bias(bias, [DrawRequest(state, 0, 0) for state in states])
    row = torch.linspace(-2, 2, 50)
    for r, (state, kwargs) in enumerate(zip(states, kinds)):
        assert has_bias(state.params) == bool(kwargs)
        wanted = row.numpy()
        for link in state.chain.penalties:
            wanted = link.apply(wanted, state, ALL_TOKENS)
        assert torch.equal(row + bias[r], torch.from_numpy(wanted))
    assert not bias[5].any()


def test_ids_that_a_device_must_not_be_given():
    assert can_write_bias(SamplingParams(banned_tokens=[49], logit_bias={3: 1.0}), 50)
    for options in ({"banned_tokens": [50]}, {"logit_bias": {50: 1.0}}, {"allowed_tokens": [50]}, {"banned_tokens": range(50)}):
        assert not can_write_bias(SamplingParams(**options), 50)


# ---- on a GPU


def load():
    return ex.demo(progress=None, device="cuda", deterministic=True)


def graphs(llm):
    """The steps that were captured, or None in the place of one that could not be."""
    return llm.engine.executor.captured.graphs


def answers(llm):
    """Tokens of requests alone, and of all together: they end at different times, so counts are written with a token in flight."""
    requests = [{"prompt": PROMPT[: 20 + 4 * i], "max_tokens": 10 + 5 * i, "ignore_eos": True, **KINDS[i % len(KINDS)]} for i in range(12)]
    alone = [llm.generate(**one).tokens for one in requests]
    together = llm.batch(requests).run()
    return alone, [together[i].tokens for i in range(len(requests))]


@pytest.mark.gpu
def test_a_gpu_too_small_for_the_cache_says_what_it_needs():
    """The first GPU test: later ones keep models and graphs in memory."""
    with load() as llm:
        text = llm.generate("It was", max_tokens=2, temperature=0).text
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(2e-3)
        try:
            with pytest.raises(OutOfMemory, match=r"does not fit the GPU: [0-9.]+ GiB for the cache of 1048576 tokens needed"):
                ex.demo(progress=None, device="cuda", cache_tokens=1 << 20)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert llm.generate("It was", max_tokens=2, temperature=0).text == text


@pytest.fixture(scope="module")
def gpu_llm():
    with load() as made:
        yield made


@pytest.fixture(scope="module")
def captured(gpu_llm):
    """The answers of captured steps."""
    found = answers(gpu_llm)
    assert any(graph is not None for graph in graphs(gpu_llm).values())
    assert found[0] == found[1]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("options", KINDS)
def test_gpu_draws_equal_host_draws(gpu_llm, options):
    more = {**options, "max_tokens": 80, "ignore_eos": True, "top_logprobs": 2}
    device, host = (gpu_llm.generate(PROMPT, **more, **extra) for extra in ({}, ON_THE_HOST))
    assert [t.id for t in device.tokens] == [t.id for t in host.tokens]
    assert max(abs(a.logprob - b.logprob) for a, b in zip(device.tokens, host.tokens)) < 1e-4
    assert [t.rank for t in device.tokens] == [t.rank for t in host.tokens]


@pytest.mark.gpu
def test_draws_are_on_the_gpu(gpu_llm):
    executor = gpu_llm.engine.loop.executor
    kinds = [{name: value for name, value in kind.items() if name != "top_logprobs"} for kind in KINDS]
    assert all(executor.can_draw(SamplerState(SamplingParams(**kind))) for kind in kinds)
    for kind in ({"frequency_penalty": 0.5, "penalty_range": 64}, ON_THE_HOST):
        assert not executor.can_draw(SamplerState(SamplingParams(**kind)))


@pytest.mark.gpu
def test_ids_outside_the_vocabulary_are_refused(gpu_llm):
    """Ids beyond the vocabulary, and bans of everything, never reach the GPU; it works on."""
    size = gpu_llm.engine.vocab_size
    with pytest.raises(ex.errors.Exl2Error, match="vocabulary"):
        gpu_llm.generate(PROMPT, banned_tokens=[size])
    with pytest.raises(ex.errors.Exl2Error, match="no token is left"):
        gpu_llm.generate(PROMPT, banned_tokens=range(size))
    assert gpu_llm.generate(PROMPT, max_tokens=3, temperature=0, banned_tokens=range(10, size)).tokens[0].id < 10


@pytest.mark.gpu
def test_more_alternatives_than_the_kernel_reports(gpu_llm):
    assert len(gpu_llm.generate("It was", max_tokens=1, top_logprobs=50).tokens[0].top) == 50


@pytest.mark.gpu
def test_steps_without_graphs_give_the_same_tokens(captured, monkeypatch):
    monkeypatch.setenv("EXL2NB_CUDA_GRAPHS", "0")
    with load() as llm:
        assert answers(llm) == captured
        assert not any(graphs(llm).values())


@pytest.mark.gpu
def test_steps_that_cannot_be_captured_run_all_the_same(captured, monkeypatch, caplog):
    """A capture that breaks off in the middle, as CUDA's do: after the first kernels, on another stream."""
    with load() as llm:
        draw, calls = gpu_executor.sample_rows, []

        def breaks(*args):
            calls.append(torch.cuda.is_current_stream_capturing())
            if calls[-1]:
                raise RuntimeError("operation not permitted when stream is capturing")
            return draw(*args)

        monkeypatch.setattr(gpu_executor, "sample_rows", breaks)
        assert answers(llm) == captured
        assert any(calls)
        assert not any(graphs(llm).values())
    assert "are launched kernel by kernel" in caplog.text


@pytest.mark.gpu
def test_a_full_gpu_is_named_and_ends_one_request(captured, monkeypatch):
    """A prompt's step asks for more than there is; what runs beside it goes on, and what comes after works."""
    with load() as llm:
        forward = llm.model.forward

        def greedy(batch, cache, **kwargs):
            if (batch.input_ids == 7).sum() > 20:
                torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
            return forward(batch, cache, **kwargs)

        monkeypatch.setattr(llm.model, "forward", greedy)
        beside = llm.stream(PROMPT[:20], max_tokens=400, ignore_eos=True, **KINDS[0])
        next(beside)
        words = r"a step of \d+ tokens in \d+ requests does not fit the GPU: 1048576.00 GiB more needed, [0-9.]+ of [0-9.]+ GiB are free"
        with pytest.raises(OutOfMemory, match=words):
            llm.generate([7] * 600, max_tokens=4)
        tokens = beside.result().tokens
        assert len(tokens) == 400
        assert tokens[:10] == captured[0][0]
        assert answers(llm) == captured
        assert llm.engine.pages.num_free == llm.engine.pages.num_pages


COPIED = "The old man had a boat and a dog. The rain fell on the roof. " * 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"seed": 3, "top_p": 0.9}, {"seed": 4, "top_k": 20, "top_logprobs": 3}, KINDS[6], KINDS[0]]
)
def test_draft_tokens_in_captured_steps(gpu_llm, options):
    """The same tokens as without, one request or several of different lengths; penalties are drawn by the host."""
    more = {**options, "max_tokens": 60, "ignore_eos": True}
    prompts = [COPIED[at:] for at in (0, 7, 19, 33, 50)]
    always = Speculation(kind="ngram", adaptive=False)
    plain = [gpu_llm.generate(prompt, **more) for prompt in prompts]
    guessed = [gpu_llm.generate(prompt, speculation=always, **more) for prompt in prompts]
    together = gpu_llm.batch(prompts, speculation=always, **more).run()
    for i, one in enumerate(plain):
        assert [t.id for t in guessed[i].tokens] == [t.id for t in one.tokens]
        assert [t.id for t in together[i].tokens] == [t.id for t in one.tokens]
    if options not in (KINDS[0], KINDS[6]):  # which write what the prompts have not
        assert sum(one.speculation.proposed for one in guessed) > 0
        captured = [graph for kind, graph in graphs(gpu_llm).items() if kind.sequences]
        assert captured
        assert all(graph is not None for graph in captured)


@pytest.mark.gpu
def test_a_draft_model_draws_what_the_target_would():
    """The model as its own draft: every draft token is right, whatever the sampler, if its steps and its cache are right.

    deterministic=True holds for the draft too: without it, a batch's steps and its prompts have other bits than the target's, and where two
    tokens share the random number's place in the cumulative sums, draft and target draw neighbours.
    """
    with ex.demo(progress=None, device="cuda", deterministic=True, draft=Path(ex.__file__).parent / "demo_model") as llm:
        kinds = [{"temperature": 0}, {"seed": 3, "top_p": 0.9}, {"seed": 5, "temperature": 0.8, "top_k": 30}]
        kinds.append({"seed": 6, "banned_tokens": [llm.generate(PROMPT, max_tokens=1, temperature=0).tokens[0].id]})
        for options in kinds:
            more = {**options, "max_tokens": 61, "ignore_eos": True}
            plain = llm.generate(PROMPT, speculation="off", **more)
            guessed = llm.generate(PROMPT, speculation=Speculation(kind="draft", adaptive=False, max_tokens=5), **more)
            assert [t.id for t in guessed.tokens] == [t.id for t in plain.tokens]
            assert guessed.speculation.rate == 1.0
        requests = [{"prompt": PROMPT[: 20 + 4 * i], "max_tokens": 10 + 5 * i, "seed": i, "ignore_eos": True} for i in range(8)]
        alone = [llm.generate(**one, speculation="off").tokens for one in requests]
        together = llm.batch(requests, speculation=Speculation(kind="draft", adaptive=False)).run()
        assert [[t.id for t in together[i].tokens] for i in range(8)] == [[t.id for t in tokens] for tokens in alone]
        accepted, proposed = (sum(getattr(together[i].speculation, name) for i in range(8)) for name in ("accepted", "proposed"))
        assert accepted == proposed > 100
        made = llm.engine.drafter.rounds.graphs
        assert made
        assert None not in made.values()
        assert any(graph.follows for graph in made.values()), "rounds behind the step that verifies the last"


def test_steps_with_draft_tokens_are_kept_up_to_a_number():
    """One that was not used for long makes room; what finds none is launched kernel by kernel; plain decode steps stay."""
    steps = CapturedSteps(most_verifying=16, idle_steps=21)

    def run(rows, sequences, width=1):
        return steps.get(StepKind(rows=rows, sequences=sequences, width=width), lambda kind: object())

    plain = [run(rows, 0) for rows in (1, 2, 4, 8, 16)]
    first = run(2, 1)
    shapes = [(rows, width) for width in (1, 2, 4) for rows in range(2, 9)]  # 21
    made = [first, *(run(rows, 1, width) for rows, width in shapes[1:])]
    assert None not in made[:16]
    assert made[16:] == [None] * 5
    assert steps.prepared == len(plain) + 16
    assert run(3, 1) is made[1], "a known step was captured again"
    assert run(2, 1, 8) is not None, "the first one, which was not used for long, made no room"
    assert run(2, 1) not in (None, first), "the oldest step made no room"
    assert run(3, 1) is made[1]
    assert [run(rows, 0) for rows in (1, 2, 4, 8, 16)] == plain
    assert len([kind for kind in steps.graphs if kind.sequences]) == 16


@pytest.mark.parametrize(
    ("tokens", "sequences", "expected"),
    [(1, 1, (1, 0)), (3, 3, (4, 0)), (9, 9, (16, 0)), (5, 1, (5, 1)), (5, 2, (8, 3)), (20, 9, (24, 17))],
)
def test_the_captured_step_that_takes_so_many(tokens, sequences, expected):
    assert captured_sizes(tokens, sequences) == expected
