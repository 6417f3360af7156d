"""The step loop on a model whose rule is known: every schedule must give the text of the rule, and every page must come back."""

import asyncio
import gc
import random
import sys
import threading
import time
from contextlib import nullcontext

import pytest
import torch

from exl2nb.core.errors import ContextOverflow, DeviceError, EngineClosed, GenerationError, OptionError, OutOfMemory
from exl2nb.generator.handle import TICK_S

from . import fakes
from .fakes import greedy, ids, prompt


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 255, 256, 257, 700])
def test_one_request(running, length):
    model = fakes.FakeModel()
    engine = running(model)
    completion = engine.submit(greedy(prompt(length, length))).result()
    assert ids(completion) == fakes.expected(model, prompt(length, length), 8)
    assert completion.finish_reason == "length"
    assert completion.timings.prompt_tokens == length


def test_many_at_once_are_each_alone(running):
    model = fakes.FakeModel(step_s=0.001)
    engine = running(model)
    prompts = [prompt(i, n) for i, n in enumerate([3, 300, 1, 90, 256, 40, 7, 511])]
    handles = [engine.submit(greedy(p, 5 + 3 * i)) for i, p in enumerate(prompts)]
    for i, (p, handle) in enumerate(zip(prompts, handles)):
        assert ids(handle.result()) == fakes.expected(model, p, 5 + 3 * i)
    assert max(sequences for sequences, _ in model.steps) >= 4  # they did run together


def test_fifo_by_pages(running):
    """Two pages each, five in the cache: two run, the others wait, in order."""
    model = fakes.FakeModel(step_s=0.002)
    engine = running(model, pages=5)
    handles = [engine.submit(greedy(prompt(i, 300), 6, stream=False)) for i in range(4)]
    for i, handle in enumerate(handles):
        assert ids(handle.result()) == fakes.expected(model, prompt(i, 300), 6)
    assert max(sequences for sequences, _ in model.steps) == 2


def test_eos_ends_and_is_not_shown(running):
    model = fakes.FakeModel()
    start = next(p for seed in range(10_000) if fakes.expected(model, p := [seed % 4000 + 3, seed], 1) != [2])
    rule = fakes.expected(model, start, 6)
    engine = running(model)
    engine.tokenizer.eos_ids = frozenset((rule[3], 99999))
    completion = engine.submit(greedy(start, 6, ignore_eos=False)).result()
    assert (ids(completion), completion.finish_reason) == (rule[:3], "eos")
    assert engine.submit(greedy(start, 6)).result().finish_reason == "length"


def test_stop_text(running):
    model = fakes.FakeModel()
    engine = running(model)
    whole = engine.submit(greedy([5, 6], 30)).result().text
    for at in (0, 3, len(whole) // 2):
        stop = whole[at : at + 5]
        handle = engine.submit(greedy([5, 6], 30, stop=stop))
        text = "".join(chunk.text for chunk in handle)
        assert handle.completion.finish_reason == "stop"
        assert text == handle.completion.text == whole[: whole.index(stop)]


def test_stream_equals_completion(running):
    engine = running()
    handle = engine.submit(greedy([5, 6], 50, top_logprobs=4))
    chunks = list(handle)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert tuple(tokens) == handle.completion.tokens
    assert "".join(c.text for c in chunks) == handle.completion.text
    for token in tokens:
        assert token.rank == 1
        assert token.top[0].id == token.id
        assert token.top[0].logprob == token.logprob
        assert len(token.top) == 4
    assert list(handle) == []


def test_a_slow_reader_gets_larger_chunks(running):
    engine = running()
    handle = engine.submit(greedy([5, 6], 200))
    next(handle)
    assert engine.wait_idle()
    rest = list(handle)
    assert len(rest) == 1
    assert len(rest[0].tokens) > 150


def test_context_end(running):
    engine = running(context=40)
    completion = engine.submit(greedy(prompt(1, 30), 100)).result()
    assert (len(completion.tokens), completion.finish_reason) == (10, "context")
    assert len(engine.submit(greedy(prompt(1, 39), 100)).result().tokens) == 1
    with pytest.raises(ContextOverflow, match="prompt has 40 tokens and the context 40.*shorten the prompt by 1"):
        engine.submit(greedy(prompt(1, 40), 1))


def test_larger_than_the_cache(running):
    engine = running(pages=2, context=5000)
    with pytest.raises(ContextOverflow, match=r"400 of the prompt and up to 200 new\), 3 pages of 256; the cache has 2 pages, 512 tokens"):
        engine.submit(greedy(prompt(1, 400), 200))
    assert len(engine.submit(greedy(prompt(1, 400), 113)).result().tokens) == 113  # 512 in the cache: the last token is never run


@pytest.mark.parametrize("bad", [-1, fakes.VOCAB])
def test_ids_of_another_model(running, bad):
    with pytest.raises(OptionError, match="0 to 4095"):
        running().submit(greedy([3, bad]))


def test_a_failing_step_ends_its_requests_and_nothing_else(running):
    model = fakes.FakeModel(step_s=0.001)
    engine = running(model, max_sequences=2)
    model.fail_at |= {step: ValueError("boom") for step in (6, 7, 8)}  # together, then each alone
    doomed = engine.submit_many([greedy([i + 5], 30) for i in range(2)])
    waiting = engine.submit(greedy([9, 9], 6))
    for handle in doomed:
        assert next(handle).text is not None
        with pytest.raises(GenerationError, match="ValueError: boom.*the engine goes on") as info:
            list(handle)
        assert isinstance(info.value.__cause__, ValueError)
    assert ids(waiting.result()) == fakes.expected(model, [9, 9], 6)
    assert engine.pages.num_free == 16


def test_a_step_that_fails_because_of_one_request_ends_that_one(running):
    model = fakes.FakeModel(step_s=0.001)
    engine = running(model)
    model.poison = 77
    bad, good = engine.submit(greedy([5, 77], 30)), engine.submit(greedy([9, 9], 30))
    assert ids(good.result()) == fakes.expected(model, [9, 9], 30)
    with pytest.raises(GenerationError, match="poison"):
        bad.result()


def test_a_prompt_too_large_for_the_memory_runs_in_small_pieces(running):
    model = fakes.FakeModel()
    model.most_tokens = 40
    assert ids(running(model).submit(greedy(prompt(1, 900), 5)).result()) == fakes.expected(model, prompt(1, 900), 5)
    assert max(tokens for _, tokens in model.steps) > 40


def test_logits_that_are_not_finite_end_one_request(running):
    model = fakes.FakeModel()
    model.nan_after = 30
    engine = running(model)
    long, short = engine.submit(greedy(prompt(1, 25), 20)), engine.submit(greedy([5], 10))
    assert ids(short.result()) == fakes.expected(model, [5], 10)
    with pytest.raises(GenerationError, match="finite"):
        long.result()


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (MemoryError(), GenerationError, "MemoryError"),
        (
            OutOfMemory("a step of 1 tokens does not fit: 2 GiB more needed, 1 of 8 GiB are free"),
            OutOfMemory,
            "2 GiB more needed, 1 of 8 GiB",
        ),
    ],
)
def test_a_step_without_memory(running, error, raised, message):
    model = fakes.FakeModel()
    model.fail_at[0] = error
    engine = running(model)
    with pytest.raises(raised, match=message) as info:
        engine.submit(greedy([5])).result()
    assert raised is GenerationError or isinstance(info.value, (DeviceError, MemoryError))
    assert ids(engine.submit(greedy([5])).result()) == fakes.expected(model, [5], 8)


class TestCancel:
    def test_while_a_step_runs(self, running):
        model = fakes.FakeModel()
        model.gate = threading.Event()
        engine = running(model)
        handle = engine.submit(greedy([5], 50))
        model.entered.wait(5)
        handle.cancel()
        model.gate.set()
        assert handle.result().finish_reason == "cancelled"
        assert len(model.steps) <= 2

    def test_while_waiting(self, running):
        model = fakes.FakeModel()
        model.gate = threading.Event()
        engine = running(model, max_sequences=1)
        first, second = engine.submit(greedy([5], 3)), engine.submit(greedy([6], 3))
        second.cancel()
        model.gate.set()
        assert second.result().finish_reason == "cancelled"
        assert second.completion.tokens == ()
        assert len(first.result().tokens) == 3

    def test_text_so_far_is_kept(self, running):
        engine = running(fakes.FakeModel(step_s=0.002))
        handle = engine.submit(greedy([5], 500))
        shown = next(handle).text
        handle.cancel()
        rest = "".join(chunk.text for chunk in handle)
        assert (handle.completion.text, handle.completion.finish_reason) == (shown + rest, "cancelled")

    @pytest.mark.parametrize("way", ["break", "never read", "raise"])
    def test_dropping_a_handle_cancels_its_request(self, running, way):
        model = fakes.FakeModel(step_s=0.002)
        engine = running(model)

        def read():
            handle = engine.submit(greedy([5], 3000))
            for _ in () if way == "never read" else handle:
                if way == "raise":
                    raise KeyboardInterrupt
                break

        with pytest.raises(KeyboardInterrupt) if way == "raise" else nullcontext():
            read()
        gc.collect()
        assert engine.wait_idle(5)
        assert len(model.steps) < 300

    def test_at_random_moments(self, running):
        """Cancelled, dropped or read to the end, 150 times, several at once: no page is lost and the next answer is right."""
        model = fakes.FakeModel(step_s=0.0003)
        engine, chance = running(model, pages=12), random.Random(0)
        handles = []
        for i in range(150):
            handles.append(engine.submit(greedy(prompt(i, chance.randrange(1, 600)), 40)))
            time.sleep(chance.random() * 0.004)
            way = chance.randrange(3)
            victim = handles.pop(chance.randrange(len(handles)))
            if way == 0:
                victim.cancel()
            elif way == 1:
                next(victim, None)
                handles.append(victim)
            del victim
        handles.clear()
        gc.collect()
        assert engine.wait_idle(20)
        assert engine.pages.num_free == 12
        assert ids(engine.submit(greedy(prompt(7, 300), 20)).result()) == fakes.expected(model, prompt(7, 300), 20)


class TestThreads:
    def test_none_before_use_and_none_after_close(self):
        before = set(threading.enumerate())

        def new():  # threads of other tests may end meanwhile
            return [thread for thread in threading.enumerate() if thread not in before]

        engine = fakes.engine()
        assert new() == []
        engine.submit(greedy([5])).result()
        assert [(t.name, t.daemon) for t in new()] == [("exl2nb-engine", True)]
        engine.close()
        engine.close()
        assert new() == []
        assert engine.model.closed
        assert engine.cache.k == []

    def test_an_idle_engine_holds_no_thread(self, running):
        engine = running(idle_s=0.05)
        for _ in range(3):
            engine.submit(greedy([5])).result()
            deadline = time.monotonic() + 5
            while engine.has_thread and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not engine.has_thread, "the engine kept its thread without work"

    def test_close_while_running_and_waiting(self):
        engine = fakes.engine(fakes.FakeModel(step_s=0.005), max_sequences=1)
        handles = [engine.submit(greedy([i + 3], 3000)) for i in range(3)]
        next(handles[0])
        engine.close()
        for handle in handles:
            with pytest.raises(EngineClosed, match="closed"):
                list(handle)
        with pytest.raises(EngineClosed, match="load it again"):
            engine.submit(greedy([5]))
        assert engine.pages.num_free == engine.pages.num_pages

    def test_many_callers(self, running):
        model = fakes.FakeModel()
        engine, failures = running(model), []

        def work(seed):
            for i in range(5):
                p = prompt((seed, i).__hash__(), 10 + seed)
                if ids(engine.submit(greedy(p, 5)).result()) != fakes.expected(model, p, 5):
                    failures.append(p)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    def test_exclusive_holds_the_engine(self, running):
        model = fakes.FakeModel()
        engine = running(model)
        with fakes.held(engine):
            handle = engine.submit(greedy([5]))
            with pytest.raises(TimeoutError):
                handle.result(timeout_s=0.1)
            assert model.steps == []
        assert len(handle.result().tokens) == 8


class TestAsync:
    def test_stream_and_result(self, running):
        model = fakes.FakeModel()
        model.gate = threading.Event()
        engine = running(model)

        async def work():
            async def tick():
                for _ in range(4):
                    await asyncio.sleep(0.002)
                model.gate.set()  # the first step waits for it: it is reached only where the loop stays free meanwhile

            handle, clock = engine.submit(greedy([5], 30)), asyncio.create_task(tick())
            found = [token.id async for chunk in handle for token in chunk.tokens]
            await clock
            return found, await engine.submit(greedy([6], 5, stream=False)).aresult()

        found, completion = asyncio.run(work())
        assert found == fakes.expected(model, [5], 30)
        assert ids(completion) == fakes.expected(model, [6], 5)

    def test_cancelling_the_task(self, running):
        engine = running(fakes.FakeModel(step_s=0.002))

        async def work():
            task = asyncio.create_task(engine.submit(greedy([5], 3000)).aresult())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(work())
        assert engine.wait_idle(5)

    def test_a_closed_event_loop_cancels_the_request(self, running):
        engine = running(fakes.FakeModel(step_s=0.002))
        handle = engine.submit(greedy([5], 3000))
        asyncio.run(handle.__anext__())
        assert engine.wait_idle(5)

    def test_errors_arrive(self, running):
        model = fakes.FakeModel()
        model.fail_at[3] = RuntimeError("boom")
        with pytest.raises(GenerationError, match="boom"):
            asyncio.run(running(model).submit(greedy([5], 30)).aresult())


# ---- engine.call: functions run on the engine thread between steps


def test_an_interrupt_of_a_call_leaves_the_model_usable(running):
    """At every line of a call, with the traceback kept as notebooks keep it."""
    model, kept = fakes.FakeModel(), []
    engine = running(model)
    engine.submit(greedy([5])).result()
    names, lines = ("call", "wait", "_wake_thread", "_check_open"), set()

    def call(stop_at):
        where = None

        def local(frame, event, _):
            nonlocal where
            if event == "line":
                lines.add((frame.f_code.co_name, frame.f_lineno))
                if where is None and (frame.f_code.co_name, frame.f_lineno) == stop_at:
                    where = stop_at
                    raise KeyboardInterrupt
            return local

        sys.settrace(lambda frame, *_: local if frame.f_code.co_name in names else None)
        try:
            engine.call(lambda: time.sleep(2 * TICK_S))
        finally:
            sys.settrace(None)

    call(None)
    assert {name for name, _ in lines} == set(names)
    for line in sorted(lines):
        try:
            call(line)
        except KeyboardInterrupt as error:
            kept.append(error)
        assert len(engine.submit(greedy([5])).result(timeout_s=5).tokens) == 8, line
        assert engine.call(lambda: 7, timeout_s=5) == 7
    assert len(kept) > 10


def test_calls_run_between_steps_with_nothing_in_flight(running):
    engine, order = running(fakes.FakeModel(step_s=0.001)), []
    handle = engine.submit(greedy([5], 300))
    next(handle)

    def look(name):
        order.append((name, threading.current_thread().name))
        steps = len(engine.model.steps)
        time.sleep(0.02)
        assert len(engine.model.steps) == steps
        assert not engine.loop.in_flight
        order.append((name, threading.current_thread().name))
        return name

    found = []
    threads = [threading.Thread(target=lambda name=name: found.append(engine.call(lambda: look(name)))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["a", "b"]
    assert [name for name, _ in order] in (list("aabb"), list("bbaa"))
    assert {thread for _, thread in order} == {"exl2nb-engine"}
    assert len(handle.result().tokens) == 300


def test_a_loop_of_calls_does_not_starve_requests(running):
    engine = running(fakes.FakeModel())
    over = threading.Event()

    def again():
        while not over.is_set():
            engine.call(lambda: time.sleep(0.001))

    threads = [threading.Thread(target=again) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert len(engine.submit(greedy([5], 50)).result(timeout_s=20).tokens) == 50
    over.set()
    for thread in threads:
        thread.join()


def test_a_call_that_cannot_start_in_time_never_runs(running):
    engine, ran = running(fakes.FakeModel()), []
    with fakes.held(engine), pytest.raises(TimeoutError, match=f"the model was in use for {2 * TICK_S} s"):
        engine.call(lambda: ran.append(1), timeout_s=2 * TICK_S)
    engine.call(lambda: None)
    assert ran == []


def test_errors_and_inference_mode_of_a_call(running):
    engine = running(fakes.FakeModel())
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0)
    assert not engine.call(torch.is_inference_mode_enabled)
    with torch.inference_mode():
        assert engine.call(torch.is_inference_mode_enabled)
    engine.close()
    with pytest.raises(EngineClosed):
        engine.call(lambda: None)
