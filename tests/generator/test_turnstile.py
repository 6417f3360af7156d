"""Who runs the model: an interrupt of a caller who comes or goes leaves it usable."""

import sys
import threading
import time

from exl2nb.generator.turnstile import TICK_S, Turnstile

from . import fakes
from .test_engine import greedy, running  # noqa: F401


def test_an_interrupt_of_a_visit_leaves_the_model_usable(running):  # noqa: F811
    """At every line of coming and going, with the traceback kept as notebooks keep it."""
    model, kept = fakes.FakeModel(), []
    engine = running(model)
    engine.submit(greedy([5])).result()
    names, lines = ("exclusive", "visit", "_enters", "_leave"), set()

    def visit(stop_at):
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
            with engine.exclusive():
                pass
        finally:
            sys.settrace(None)

    visit(None)
    assert {name for name, _ in lines} == set(names)
    for line in sorted(lines):
        try:
            visit(line)
        except KeyboardInterrupt as error:
            kept.append(error)
        assert len(engine.submit(greedy([5])).result(timeout_s=5).tokens) == 8, line
        with engine.exclusive(timeout_s=5):
            pass
    assert len(kept) > 10


def test_visitors_come_before_steps_and_one_at_a_time():
    turnstile, order = Turnstile(), []

    def visit(name):
        with turnstile.visit(sys._getframe(), quiet=lambda: True):
            order.append(name)
            time.sleep(0.02)
            order.append(name)

    with turnstile.step():
        threads = [threading.Thread(target=visit, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        assert turnstile.wanted
        assert order == []
    for thread in threads:
        thread.join()
    assert order in (list("aabb"), list("bbaa"))
    assert not turnstile.wanted


def test_who_stays_is_not_seen_off():
    """A visitor on the stack of his thread has the model as long as he likes; who waits in vain is told so."""
    turnstile, errors = Turnstile(), []

    def other():
        try:
            with turnstile.visit(sys._getframe(), quiet=lambda: True, timeout_s=10 * TICK_S):
                pass
        except TimeoutError as error:
            errors.append(str(error))

    with turnstile.visit(sys._getframe(), quiet=lambda: True):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert errors == [f"the model was in use for {10 * TICK_S} s"]
    assert not turnstile.wanted
