"""The helper process: what it does with requests that hang, grow, crash or are interrupted, and that it never stays behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from exl2nb.core.helper import Helper, HelperError, Limits

SERVICE = """
import os, socket, sys, time

def handle(request):
    return globals()[request["do"]](*request.get("with", ()))

def echo(value): return {"value": value}
def fail(kind): raise {"ValueError": ValueError, "SystemExit": SystemExit}[kind]("no")
def spin():
    while True: pass
def sleep(seconds): time.sleep(seconds); return {}
def grow(): return {"size": len(bytearray(1 << 30))}
def much(size): return {"text": "x" * size}
def crash(): os.abort()
def modules(): return {"names": sorted(sys.modules)}
def open_file(): open("/etc/hostname").close(); return {}
def open_socket(): socket.socket().close(); return {}
def pid(): return {"pid": os.getpid()}
"""
LIMITS = Limits(cpu_s=0.5, wall_s=20, memory_bytes=256 << 20, answer_bytes=1 << 20)


@pytest.fixture
def service(tmp_path, monkeypatch):
    (tmp_path / "its_service.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(tmp_path)
    return "its_service"


@pytest.fixture
def helper(service):
    helper = Helper(service, LIMITS)
    yield helper
    helper.close()


def pid(helper):
    return helper.ask({"do": "pid"})["pid"]


def gone(number):
    """Wait until no process has this number; False after a while."""
    for _ in range(1000):
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("value", [None, "é\ud800\0", {"a": [1, 2.5, True]}, "x" * 500_000, [[]]])
def test_answers(helper, value):
    assert helper.ask({"do": "echo", "with": [value]}) == {"value": value}


def test_it_stays_for_the_next_request(helper):
    assert pid(helper) == pid(helper) != os.getpid()


@pytest.mark.parametrize("kind", ["ValueError", "SystemExit"])
def test_exceptions_come_back_by_name(helper, kind):
    before = pid(helper)
    with pytest.raises(HelperError, match="no") as caught:
        helper.ask({"do": "fail", "with": [kind]})
    assert caught.value.kind == kind
    assert pid(helper) == before


@pytest.mark.parametrize(
    ("request_", "kind", "match"),
    [
        ({"do": "spin"}, "Killed", "took more than 0.5 s of CPU time"),
        ({"do": "crash"}, "Killed", "ended by SIGABRT"),
        ({"do": "grow"}, "MemoryError", None),
        ({"do": "much", "with": [2 << 20]}, "MemoryError", "larger than 1 MiB"),
        ({"do": "open_file"}, "OSError", "Too many open files"),
        ({"do": "open_socket"}, "OSError", "Too many open files"),
    ],
)
def test_limits(helper, request_, kind, match):
    with pytest.raises(HelperError, match=match) as caught:
        helper.ask(request_)
    assert caught.value.kind == kind
    assert helper.ask({"do": "echo", "with": [1]}) == {"value": 1}


def test_wall_time(service):
    helper = Helper(service, Limits(cpu_s=5, wall_s=0.5, memory_bytes=256 << 20))
    with pytest.raises(HelperError, match=r"longer than 0\.5 s"):
        helper.ask({"do": "sleep", "with": [60]})
    helper.close()


def test_what_is_not_json_is_the_callers_error(helper):
    with pytest.raises(TypeError):
        helper.ask({"do": object()})


def test_it_imports_little(helper):
    names = helper.ask({"do": "modules"})["names"]
    assert not {"torch", "numpy", "IPython"} & set(names)


def test_no_process_no_hang(service, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    helper = Helper(service, LIMITS)
    helper.start()
    with pytest.raises(HelperError, match="no process could be started"):
        helper.ask({"do": "pid"})


def test_a_helper_that_died_is_replaced(helper):
    first = pid(helper)
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert pid(helper) != first


def test_close_leaves_no_process_and_no_zombie(helper):
    first = pid(helper)
    helper.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_no_file_descriptor_is_left(helper):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    pid(helper)
    helper.close()
    before = descriptors()
    for _ in range(5):
        pid(helper)
        helper.close()
    assert descriptors() == before


def test_an_interrupt_ends_the_request_alone(helper):
    """The interrupted answer does not meet the next request."""
    first = pid(helper)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        helper.ask({"do": "sleep", "with": [19]})
    timer.join()
    assert gone(first)
    assert helper.ask({"do": "echo", "with": [2]}) == {"value": 2}


def test_threads_take_turns(helper):
    wrong = []

    def work(number):
        for i in range(20):
            if helper.ask({"do": "echo", "with": [[number, i]]}) != {"value": [number, i]}:
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


ENDINGS = {
    "exit": "pass",
    "exception": "raise RuntimeError",
    "kill": "os.kill(os.getpid(), 9)",
    "os_exit": "os._exit(0)",
    "kill while busy": "threading.Timer(0.2, os.kill, (os.getpid(), 9)).start(); helper.ask({'do': 'spin'})",
    "kill while it sleeps": "threading.Timer(0.2, os.kill, (os.getpid(), 9)).start(); helper.ask({'do': 'sleep', 'with': [60]})",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_with_its_owner(service, tmp_path, ending):
    script = f"""
import os, sys, threading
sys.path.insert(0, {str(tmp_path)!r})
from exl2nb.core.helper import Helper, Limits
helper = Helper("its_service", Limits(cpu_s=2, wall_s=2, memory_bytes=256 << 20))
print(helper.ask({{"do": "pid"}})["pid"], flush=True)
{ENDINGS[ending]}
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert gone(int(done.stdout))


def test_after_a_fork_each_has_its_own(service, tmp_path):
    script = f"""
import os, sys
sys.path.insert(0, {str(tmp_path)!r})
from exl2nb.core.helper import Helper, Limits
helper = Helper("its_service", Limits(cpu_s=2, wall_s=20, memory_bytes=256 << 20))
first = helper.ask({{"do": "pid"}})["pid"]
helper._lock.acquire()  # as if another thread held it during the fork
child = os.fork()
if not child:
    other = helper.ask({{"do": "pid"}})["pid"]
    sys.exit(other == first)
helper._lock.release()
assert os.waitpid(child, 0)[1] == 0
assert helper.ask({{"do": "pid"}})["pid"] == first
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def run_script(tmp_path, script):
    head = f"import os, sys, time\nsys.path.insert(0, {str(tmp_path)!r})\nfrom exl2nb.core.helper import Helper, Limits\n"
    head += "LIMITS = Limits(cpu_s=2, wall_s=20, memory_bytes=256 << 20)\n"
    command = [sys.executable, "-W", "ignore", "-c", head + script]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=100)


@pytest.mark.parametrize("used", ["idle", "used by the child"])
def test_it_ends_with_its_owner_though_a_child_of_the_owner_lives(service, tmp_path, used):
    """A forked child has no end of the pipe that says whether the owner lives."""
    script = f"""
helper = Helper("its_service", LIMITS)
first = helper.ask({{"do": "pid"}})["pid"]
ready, said = os.pipe()
child = os.fork()
if not child:
    os.close(1)
    if {used != "idle"}:
        helper.ask({{"do": "pid"}})
    os.write(said, b"x")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
print(first, child, flush=True)
os.kill(os.getpid(), 9)
"""
    first, child = map(int, run_script(tmp_path, script).stdout.split())
    try:
        assert gone(first)
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_while_a_request_is_written_sends_nothing_twice(service, tmp_path):
    """What a buffer holds would be flushed by the child, too."""
    script = """
from exl2nb.core import helper as module
helper, real, children = Helper("its_service", LIMITS), module._send, []

class Forking:
    def __init__(self, pipe):
        self.pipe = pipe

    def write(self, data):
        count = self.pipe.write(data)
        if not children:
            children.append(os.fork())
            if not children[0]:
                sys.exit(0)
            assert os.waitpid(children[0], 0)[1] == 0
        return count

    def __getattr__(self, name):
        return getattr(self.pipe, name)

module._send = lambda pipe, message: real(Forking(pipe), message)
first = None
try:
    first = helper.ask({"do": "echo", "with": ["x" * 300]})
except SystemExit:
    pass  # the child: its objects are gone now
if children[0]:
    print(first == {"value": "x" * 300}, helper.ask({"do": "echo", "with": [2]}), len(children))
"""
    assert run_script(tmp_path, script).stdout == "True {'value': 2} 1\n"


def test_forks_while_other_threads_start_helpers(service, tmp_path):
    """A child that is forked between a pipe and its process would hold the helper's own end; its death would then be no end of file."""
    script = """
import threading
children, over = [], threading.Event()

def fork():
    while not over.is_set():
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        time.sleep(0.002)

thread = threading.Thread(target=fork)
thread.start()
for _ in range(10):
    helper = Helper("its_service", LIMITS)
    try:
        helper.ask({"do": "crash"})
    except Exception:
        pass
    helper.close()
over.set()
thread.join()
foreign = lambda: {os.readlink(f"/proc/{child}/fd/{fd}") for child in children for fd in os.listdir(f"/proc/{child}/fd")} - MINE
for _ in range(200):  # the youngest child may still be closing what it inherited
    if not foreign():
        break
    time.sleep(0.05)
print(foreign())
for child in children:
    os.kill(child, 9)
    os.waitpid(child, 0)
"""
    mine = "MINE = {os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')}\n"
    assert run_script(tmp_path, mine + script).stdout == "set()\n"
