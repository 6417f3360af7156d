"""The event that interrupts do not break."""

import sys
import threading
import time

from exl2nb.core.flag import Flag


def test_set_wait_clear():
    flag = Flag()
    assert not flag.wait(0.01)
    flag.set()
    flag.set()
    assert flag.is_set()
    assert flag.wait(0) and flag.wait(0)
    flag.clear()
    assert not flag.is_set()
    assert not flag.wait(0.01)


def test_a_waiter_wakes_at_once():
    flag, woke = Flag(), []
    threads = [threading.Thread(target=lambda: woke.append(flag.wait(20))) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    flag.set()
    for thread in threads:
        thread.join()
    assert woke == [True] * 3
    assert time.monotonic() - begun < 10


def test_an_interrupt_at_any_line_leaves_it_usable():
    """What another thread sets is still seen, and what is set here is seen there at the next look."""

    def use(flag):
        flag.set()
        flag.wait(0.001)
        flag.clear()
        flag.wait(0.001)

    lines = set()

    def run(flag, stop_at):
        def local(frame, event, _):
            if event == "line":
                lines.add((frame.f_code.co_name, frame.f_lineno))
                if (frame.f_code.co_name, frame.f_lineno) == stop_at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return local

        sys.settrace(lambda frame, *_: local if frame.f_code.co_filename == sys.modules[Flag.__module__].__file__ else None)
        try:
            use(flag)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    run(Flag(), None)
    assert len(lines) > 5
    for line in sorted(lines):
        flag = Flag()
        assert run(flag, line)
        thread = threading.Thread(target=lambda flag=flag: (flag.set(), flag.clear(), flag.set()))
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        assert flag.wait(5)
