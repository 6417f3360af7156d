"""`engine.call`: functions run on the engine thread between steps; an interrupt of the caller leaves the model usable."""

import sys
import threading
import time

import pytest
import torch

from exl2nb.core.errors import EngineClosed
from exl2nb.generator.handle import TICK_S

from . import fakes
from .test_engine import greedy, running  # noqa: F401


def test_an_interrupt_of_a_call_leaves_the_model_usable(running):  # noqa: F811
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


def test_calls_run_between_steps_with_nothing_in_flight(running):  # noqa: F811
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


def test_a_loop_of_calls_leaves_requests_their_steps(running):  # noqa: F811
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


def test_a_call_that_cannot_start_in_time_never_runs(running):  # noqa: F811
    engine, ran = running(fakes.FakeModel()), []
    with fakes.held(engine), pytest.raises(TimeoutError, match=f"the model was in use for {2 * TICK_S} s"):
        engine.call(lambda: ran.append(1), timeout_s=2 * TICK_S)
    engine.call(lambda: None)
    assert ran == []


def test_what_a_call_raises_and_where_it_runs(running):  # noqa: F811
    engine = running(fakes.FakeModel())
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0)
    assert not engine.call(torch.is_inference_mode_enabled)
    with torch.inference_mode():
        assert engine.call(torch.is_inference_mode_enabled)
    engine.close()
    with pytest.raises(EngineClosed):
        engine.call(lambda: None)
