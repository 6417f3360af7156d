"""The GPU's logits on texts of some length: near the CPU's, the same twice, and with deterministic=True the same however they are cut.

Marked gpu: `make test-gpu` on a machine that has one.
"""

import itertools
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.cache.pool import KVCache
from exl2nb.model.batch import Batch, Span
from exl2nb.model.loader import load_model

pytestmark = pytest.mark.gpu
MODELS = {
    "4 bits": Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw",
    "dense": Path(ex.__file__).parent / "demo_model",
}
PROMPTS = [
    "It was a dark night", "The king said", "Once upon a time", "She opened the door and", "In the middle of the wood", "He had never seen",
    "\"Come here,\" said the old man", "The next morning", "There were three brothers", "I do not know why", "At last they came to the sea",
    "The wind", "Nobody answered", "When the war was over", "My father used to say that", "A long time ago, in a small house",
    "The captain looked at", "It is true that", "They walked for two days", "What shall we do",
]  # fmt: skip
LONG = torch.randint(3, 4000, (300,), generator=torch.Generator().manual_seed(1)).tolist()


def fed(model, texts, lengths=None):
    """Logits `(T, V)` of every text, fed one token a step beside the others; or in pieces of so many tokens, the last one repeated."""
    cache, out = KVCache(model.cache_spec(512 * len(texts)), model.device), [[] for _ in texts]
    bounds = [0, *itertools.accumulate(lengths or [])]
    while bounds[-1] < max(map(len, texts)):
        bounds.append(bounds[-1] + (lengths[-1] if lengths else 1))
    for first, end in itertools.pairwise(bounds):
        running = [i for i, ids in enumerate(texts) if len(ids) > first]
        spans = [Span(ids=texts[i][first:end], start=first, pages=[2 * i, 2 * i + 1], logit_rows="all") for i in running]
        logits = model.forward(Batch.build(spans), cache).cpu()
        for i, rows in zip(running, logits.split([len(span.ids) for span in spans])):
            out[i].append(rows)
    return [torch.cat(rows) for rows in out]


@pytest.fixture(scope="module", params=MODELS)
def written(request):
    """A model's folder and the texts that the CPU engine writes greedily, prompts included."""
    folder = MODELS[request.param]
    with ex.load(folder, device="cpu", progress=None) as llm:
        asked = {"max_tokens": 256, "temperature": 0, "ignore_eos": True}
        texts = [llm.tokenizer.encode(prompt) + [t.id for t in llm.generate(prompt, **asked).tokens] for prompt in PROMPTS]
    assert min(map(len, texts)) > 256
    return folder, texts


def test_teacher_forced_on_the_cpus_text(written):
    """Token by token, eight texts a step: what a chat's answers go through."""
    folder, texts = written
    cpu, cuda = load_model(folder), load_model(folder, device="cuda")
    clear_places, worst = 0, 0.0
    for some in (texts[:8], texts[8:16], texts[16:]):
        for ids, got in zip(some, fed(cuda, some), strict=True):
            (want,) = fed(cpu, [ids], [len(ids)])
            worst = max(worst, float((want - got).abs().max()))
            top = want.topk(2, dim=-1).values
            clear = top[:, 0] - top[:, 1] > 0.05
            clear_places += int(clear.sum())
            assert torch.equal(want.argmax(-1)[clear], got.argmax(-1)[clear])
    assert worst < 0.05
    assert clear_places > 0.9 * sum(map(len, texts)), "the comparison looked at most places"


def test_twice_the_same_bits(written):
    folder, texts = written
    cuda = load_model(folder, device="cuda")
    first = fed(cuda, texts[:8])
    again = fed(load_model(folder, device="cuda"), texts[:8])
    alone = [fed(cuda, [ids])[0] for ids in texts[:2]]
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, alone)), "nor do they depend on the texts beside them"
    prompt = fed(cuda, [LONG], [300])[0]
    assert torch.equal(prompt, fed(cuda, [LONG], [300])[0])


@pytest.fixture(scope="module")
def exact():
    """A deterministic model, and what it gives token by token."""
    model = load_model(MODELS["4 bits"], device="cuda", deterministic=True)
    return model, fed(model, [LONG])[0]


@pytest.mark.parametrize("lengths", [[300], [7], [8], [9], [64], [256, 3, 40], [1, 2, 3, 5, 8, 13, 21, 34, 55], [299, 1]], ids=str)
def test_deterministic_however_a_prompt_is_cut(exact, lengths):
    assert torch.equal(fed(exact[0], [LONG], lengths)[0], exact[1])


@pytest.mark.parametrize("count", [2, 7, 9, 16, 17, 33, 64, 70, 100])
def test_deterministic_whatever_runs_beside(exact, count):
    """Prompts and single tokens in one step, then one token of each."""
    model, want = exact
    sizes = [(1, 40, 8, 9, 2, 1, 1)[i % 7] for i in range(count)]
    cache = KVCache(model.cache_spec(256 * count), model.device)
    for starts in ([0] * count, sizes):
        parts = [LONG[start : size if start == 0 else start + 1] for start, size in zip(starts, sizes)]
        spans = [Span(ids=ids, start=start, pages=[i], logit_rows="all") for i, (ids, start) in enumerate(zip(parts, starts))]
        rows = model.forward(Batch.build(spans), cache).cpu().split(list(map(len, parts)))
        for start, got in zip(starts, rows):
            assert torch.equal(got, want[start : start + len(got)])
