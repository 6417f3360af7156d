"""The host executor one step ahead: texts are those of a request alone, whatever joins, leaves, fails or closes meanwhile."""

import threading
from collections import Counter

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import EngineClosed, GenerationError
from exl2nb.generator.executor import AHEAD_ROWS

pytestmark = pytest.mark.cpu
PROMPTS = ["It was", "The cat sat. The", "Once upon a time there lived", "x", "He said that the", "Number 7 is", "In the evening", "A"]
MIXED = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 50},
    {"seed": 3, "min_p": 0.05, "top_logprobs": 3},
    {"temperature": 0, "stop": [" the", "."]},
    {"temperature": 0, "top_logprobs": 5},
    {"seed": 4, "temperature": 1.5},
    {"seed": 5, "top_k": 1},
]


@pytest.fixture(scope="module", autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded():
    with ex.demo(progress=None, device="cpu", context=512, cache_tokens=8192) as made:
        yield made


@pytest.fixture
def llm(loaded):
    yield loaded
    assert loaded.engine.wait_idle()
    assert loaded.engine.pages.num_free == loaded.engine.pages.num_pages


@pytest.fixture
def ahead(llm):
    """Counts the steps that ran ahead since the test began, by rows."""
    before = Counter(llm.engine.executor.ahead_steps)
    return lambda: llm.engine.executor.ahead_steps - before


def requests(count=8, tokens=24, **options):
    return [{"prompt": PROMPTS[i], "max_tokens": tokens + i, **MIXED[i], **options} for i in range(count)]


def told(completion):
    if isinstance(completion, list):
        return [told(one) for one in completion]
    return completion.text, completion.tokens, completion.finish_reason


def together(llm, wanted):
    done = llm.batch(wanted).run()
    return [told(done[i]) for i in range(len(wanted))]


def alone(llm, wanted):
    return [told(llm.generate(**one)) for one in wanted]


def test_as_alone(llm, ahead):
    expected = alone(llm, requests())
    assert not ahead()
    assert together(llm, requests()) == expected
    assert ahead().total() > 20
    assert set(ahead()) <= set(range(AHEAD_ROWS, 9))
    assert llm.engine.executor.lookahead == 0  # the last requests ran without


def test_with_requests_that_the_host_draws(llm, ahead):
    """Penalties need the host: while such a request runs, and while prompts do, no step runs ahead; the others' texts do not change."""
    wanted = [*requests(7), {"prompt": "So", "temperature": 0, "repetition_penalty": 1.3, "max_tokens": 8}]
    expected = alone(llm, wanted)
    assert together(llm, wanted) == expected
    assert ahead().total() > 10


def test_requests_that_come_and_go_meanwhile(llm, ahead):
    """Long texts; short ones, a cancelled and a branching one come while they run."""
    wanted = requests(5, 60, ignore_eos=True, stop=[])
    late = [*requests(3, 5), {"prompt": PROMPTS[0], "n": 2, "seed": 9, "max_tokens": 6}]
    expected, expected_late = alone(llm, wanted), alone(llm, late)
    handles = llm.batch(wanted)
    found = {}

    def come():
        found["late"] = alone(llm, late)
        stream = llm.stream(PROMPTS[3], max_tokens=400, ignore_eos=True)
        next(iter(stream))
        stream.cancel()

    other = threading.Thread(target=come)
    other.start()
    done = handles.run()
    other.join()
    assert [told(done[i]) for i in range(5)] == expected
    assert found["late"] == expected_late
    assert ahead().total() > 40


def test_one_thread_runs_nothing_ahead():
    """An engine that is given one thread starts no second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the engine's thread takes over the number when it starts
    try:
        with ex.demo(progress=None, device="cpu", context=512, cache_tokens=4096) as llm:
            expected = alone(llm, requests(4, 6))
            assert together(llm, requests(4, 6)) == expected
            assert not llm.engine.executor.ahead_steps, "a step ran ahead on an engine with one thread"
    finally:
        torch.set_num_threads(before)


def test_a_step_that_cannot_begin(llm, monkeypatch):
    """The requests say why, one by one where each could be at fault; the engine goes on."""
    expected = alone(llm, requests(4, 6))

    def fail(*arguments):
        raise RuntimeError("no thread to be had")

    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "draw_ahead", fail)
        assert together(llm, requests(4, 6)) == expected, "each by itself"
    assert together(llm, requests(4, 6)) == expected


def test_a_broken_row_ends_its_request_alone(llm, monkeypatch):
    """What has no distribution becomes that request's error; the others' texts stay as they are."""
    expected, begin, broken = alone(llm, requests(6, 20)), llm.model.draw_ahead, []

    def damaged(batch, cache, draw, sources):
        if int(batch.context_lens[2]) > 12 and not broken:
            broken.append(True)
            for layer in cache.v:
                layer[int(batch.block_table[2, 0])] = float("nan")
        return begin(batch, cache, draw, sources)

    monkeypatch.setattr(llm.model, "draw_ahead", damaged)
    job = llm.batch(requests(6, 20))
    done = job.run()
    assert [told(done[i]) for i in (0, 1, 3, 4, 5)] == [expected[i] for i in (0, 1, 3, 4, 5)]
    assert isinstance(job.errors[2], GenerationError)
    assert "finite" in str(job.errors[2])


def test_closing_while_a_step_runs():
    llm = ex.demo(progress=None, device="cpu", context=512, cache_tokens=8192)
    job = llm.batch(requests(8, 300, ignore_eos=True, stop=[]))
    thread = threading.Thread(target=job.run)
    thread.start()
    while llm.engine.loop.steps < 12:
        thread.join(0.001)
    llm.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(job.errors) == 8
    assert all(isinstance(error, EngineClosed) for error in job.errors.values())
