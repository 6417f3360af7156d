"""What goes wrong on the GPU: steps that cannot be captured, and memory that is full. Marked gpu: `make test-gpu`."""

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import OutOfMemory
from exl2nb.generator import gpu_executor

pytestmark = pytest.mark.gpu
PROMPT = "The rain fell on the old town, and the rain fell on the new town, and the rain"
ASKED = [
    {"temperature": 0},
    {"seed": 1, "temperature": 0.9, "top_p": 0.9, "top_logprobs": 3},
    {"seed": 2, "repetition_penalty": 1.2, "top_k": 40},
    {"seed": 3, "logit_bias": {20: 2.0}, "min_p": 0.05},
    {"temperature": 0, "banned_tokens": [5, 13, 261]},
]


def load():
    return ex.demo(progress=None, device="cuda", deterministic=True)


def graphs(llm):
    """The steps that were captured, or None in the place of one that could not be."""
    return vars(llm.engine.loop.executor)["_graphs"]


def told(completion):
    return [(token.id, token.rank, token.logprob, token.top) for token in completion.tokens]


def answers(llm):
    """Alone, and all together, where they come and go at different times."""
    requests = [
        {"prompt": PROMPT[: 30 + 5 * i], "max_tokens": 12 + 6 * i, "ignore_eos": True, **options} for i, options in enumerate(ASKED)
    ]
    alone = [told(llm.generate(**one)) for one in requests]
    together = llm.batch(requests).run()
    return alone, [told(together[i]) for i in range(len(requests))]


@pytest.fixture(scope="module")
def captured():
    """The answers of captured steps."""
    with load() as llm:
        found = answers(llm)
        assert any(graph is not None for graph in graphs(llm).values())
    assert found[0] == found[1]
    return found


def test_steps_without_graphs_give_the_same_tokens(captured, monkeypatch):
    monkeypatch.setenv("EXL2NB_CUDA_GRAPHS", "0")
    with load() as llm:
        assert answers(llm) == captured
        assert not any(graphs(llm).values())


def test_what_cannot_be_captured_runs_all_the_same(captured, monkeypatch, caplog):
    """A capture that breaks off in the middle, as CUDA's do: after the first kernels, on another stream."""

    def broken(*args):
        raise RuntimeError("operation not permitted when stream is capturing")

    with load() as llm:
        draw, calls = gpu_executor.sample_rows, []

        def breaks(*args):
            calls.append(torch.cuda.is_current_stream_capturing())
            return broken() if calls[-1] else draw(*args)

        monkeypatch.setattr(gpu_executor, "sample_rows", breaks)
        assert answers(llm) == captured
        assert any(calls)
        assert not any(graphs(llm).values())
    assert "are launched kernel by kernel" in caplog.text


def test_a_full_gpu_is_named_and_ends_one_request(captured, monkeypatch):
    """A prompt's step asks for more than there is; what runs beside it goes on, and what comes after works."""
    with load() as llm:
        forward = llm.model.forward_gpu

        def greedy(batch, cache, **kwargs):
            if (batch.input_ids == 7).sum() > 20:
                torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
            return forward(batch, cache, **kwargs)

        monkeypatch.setattr(llm.model, "forward_gpu", greedy)
        beside = llm.stream(PROMPT[:30], max_tokens=400, temperature=0, ignore_eos=True)
        next(beside)
        words = r"a step of \d+ tokens in \d+ requests does not fit the GPU: 1048576.00 GiB more needed, [0-9.]+ of [0-9.]+ GiB are free"
        with pytest.raises(OutOfMemory, match=words):
            llm.generate([7] * 600, max_tokens=4)
        text = [token.id for token in beside.result().tokens]
        assert len(text) == 400
        assert text[:12] == [token[0] for token in captured[0][0]]
        assert answers(llm) == captured
        assert llm.engine.pages.num_free == llm.engine.pages.num_pages


def test_a_gpu_too_small_for_the_cache_says_what_it_needs():
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
