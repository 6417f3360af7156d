"""Steps in different streams wait for one another; without a GPU: fake streams record the calls."""

import threading

import pytest
import torch

from exl2nb.ops import gpu
from exl2nb.ops.gpu import LaunchLock, launch_lock


class Stream:
    def __init__(self, name):
        self.name, self.waits = name, []

    def wait_stream(self, other):
        self.waits.append(other.name)


@pytest.fixture
def now(monkeypatch):
    """The current stream, and whether it captures; to be set."""
    state = {"stream": Stream("a"), "capturing": False}
    monkeypatch.setattr(gpu, "current_stream", lambda device: state["stream"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    return state


def test_one_stream_waits_for_nothing(now):
    held = LaunchLock(torch.device("cuda", 0))
    for _ in range(3):
        with held:
            pass
    assert now["stream"].waits == []


def test_another_stream_waits_for_the_last_one(now):
    held, a, b = LaunchLock(torch.device("cuda", 0)), now["stream"], Stream("b")
    for stream in (a, b, b, a):
        now["stream"] = stream
        with held:
            pass
    assert (a.waits, b.waits) == (["b"], ["a"])


def test_a_captured_step_does_not_count(now):
    held, a = LaunchLock(torch.device("cuda", 0)), now["stream"]
    with held:
        pass
    now.update(stream=Stream("graph"), capturing=True)
    with held:
        pass
    assert now["stream"].waits == []
    now.update(stream=a, capturing=False)
    with held:
        pass
    assert a.waits == []


def test_one_launch_at_a_time(now):
    """Also after a launch that failed."""
    held, order = LaunchLock(torch.device("cuda", 0)), []

    def other():
        with held:
            order.append("other")

    def fails():
        with held:
            thread.start()
            thread.join(0.05)
            order.append("first")
            raise RuntimeError("no room")

    thread = threading.Thread(target=other)
    with pytest.raises(RuntimeError, match="no room"):
        fails()
    thread.join()
    assert order == ["first", "other"]


def test_a_device_has_one():
    assert launch_lock(torch.device("cuda", 1)) is launch_lock(torch.device("cuda", 1))
    assert launch_lock(torch.device("cuda", 1)) is not launch_lock(torch.device("cuda", 0))
