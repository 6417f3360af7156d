"""A helper process for work that a stranger's file decides: bounded CPU time, memory and answer; its death harms nothing here.

A template or a tokenizer file can hang, fill the memory or abort the C or Rust code that reads it, and no check in Python comes in between.
So a second Python process does this work. It imports one module of this package and that module's library, neither torch nor numpy. Before
the first request it lowers its own limits: address space, no open files or sockets beyond its two pipes, no files written, no core dump.
Each request gets CPU time and wall time anew. Requests and answers are JSON with a length in front.

The process starts with the first request, stays for the next ones, and ends with this process, however that ends: its pipe closes, and its
own timer ends it in the middle of a request. A child that this process forks closes its copies of the pipes and starts helpers of its own.
Where the system has no such limits (Windows), the wall time remains.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

_LENGTH_PREFIX_BYTES = 8  # bytes of a message's length, little-endian
_PACKAGE_ROOT = str(Path(__file__).parents[2])
_BOOT_CODE = "import json, sys; a = json.loads(sys.argv[1]); sys.path[:0] = a['path']; from exl2nb.core import helper; helper.serve(a)"


class HelperError(Exception):
    """A request failed. The caller raises its own named error.

    kind: name of the exception in the helper ("MemoryError", "TemplateSyntaxError"); "Killed" where the process ended before it answered.
    line: of the exception's `lineno`, or None.
    """

    def __init__(self, kind: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.line = kind, line


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one request: cpu_s and wall_s, seconds; memory_bytes of address space beyond what the idle helper has; answer_bytes of JSON."""

    cpu_s: float
    wall_s: float
    memory_bytes: int
    answer_bytes: int = 64 << 20


_forking = threading.RLock()  # held while pipes are made or closed: a child forked in between would keep one of their ends open
_helpers: weakref.WeakSet[Helper] = weakref.WeakSet()


class Helper:
    """One helper process. Threads may share it; they take turns.

    Args:
        service: name of a module with a function `handle(request) -> answer`, both JSON objects.
        limits: of each request.
    """

    def __init__(self, service: str, limits: Limits) -> None:
        self.service, self.limits = service, limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        _helpers.add(self)

    def start(self) -> None:
        """Start the process, without waiting for it. For a caller who knows that requests will come."""
        with suppress(HelperError), self._lock:
            self._running()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have one request handled.

        Raises:
            HelperError: the handler raised, the request exceeded a limit, or no process could be started.
            TypeError, ValueError, RecursionError: `request` is not JSON.
        """
        message = json.dumps(request).encode()
        with self._lock:
            process = self._running()
            overdue = threading.Event()

            def kill() -> None:
                overdue.set()
                process.kill()

            timer = threading.Timer(self.limits.wall_s, kill)
            timer.daemon = True
            try:
                timer.start()
                answer = self._exchange(process, message)
            except (OSError, EOFError) as error:
                self._stop()
                raise HelperError("Killed", self._end_of(process.returncode, overdue.is_set())) from error
            except BaseException:  # an interrupt included: the answer that is still to come must not meet the next request
                self._stop()
                raise
            finally:
                timer.cancel()
            if answer.get("error") == "MemoryError":
                self._stop()  # what is left of the memory is in pieces
        if "error" in answer:
            raise HelperError(answer["error"], answer["message"], answer["line"])
        return answer["answer"]

    def close(self) -> None:
        """End the process. A later request starts another."""
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        path = [_PACKAGE_ROOT, *(entry for entry in sys.path if os.path.isabs(entry))]
        setting = json.dumps({"service": self.service, "path": path, "limits": asdict(self.limits)})
        with _forking:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _BOOT_CODE, setting],
                    bufsize=0,  # a child forked during a write would send what the buffer holds once more
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,  # Rust writes a trace of each panic
                    cwd=os.path.abspath(os.sep),
                    env={**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                    start_new_session=True,  # Ctrl-C on a terminal goes to the caller alone
                )
            except OSError as error:
                raise HelperError("Killed", f"no process could be started ({error})") from error
            self._process, self._end = process, weakref.finalize(self, _end, process)
        return process

    def _exchange(self, process: subprocess.Popen[bytes], message: bytes) -> dict[str, Any]:
        requests, answers = _pipes(process)
        _send(requests, message)
        answer = _receive(answers, self.limits.answer_bytes)
        if answer is None:
            raise EOFError
        return json.loads(answer)

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _end_of(self, code: int | None, overdue: bool) -> str:
        if overdue or code == -getattr(signal, "SIGALRM", 0):
            return f"it ran longer than {self.limits.wall_s:g} s"
        if code == -getattr(signal, "SIGPROF", 0):
            return f"it took more than {self.limits.cpu_s:g} s of CPU time"
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"the process that read it was ended by {signal.Signals(-code).name}"
        return f"the process that read it ended with {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap."""
    process.kill()  # without effect, and without changing its exit status, where it has ended
    with _forking:
        _close(process)
    process.wait()


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in _pipes(process):
        with suppress(OSError):
            pipe.close()


def _after_fork() -> None:
    """In a child: the helpers are the parent's, and so may be held locks."""
    for helper in _helpers:
        if helper._end is not None:
            helper._end.detach()
        if helper._process is not None:
            _close(helper._process)
            helper._process.returncode = 0  # it is no child of this process, so there is nothing to wait for
        helper._lock, helper._process, helper._end = threading.Lock(), None, None
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_after_fork)


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _send(pipe: IO[bytes] | io.FileIO, message: bytes) -> None:
    rest = memoryview(len(message).to_bytes(_LENGTH_PREFIX_BYTES, "little") + message)
    while rest:
        rest = rest[pipe.write(rest) :]


def _receive(pipe: IO[bytes] | io.FileIO, limit_bytes: int) -> bytes | None:
    """One message; None where the pipe was closed."""
    size = int.from_bytes(prefix, "little") if len(prefix := _read(pipe, _LENGTH_PREFIX_BYTES)) == _LENGTH_PREFIX_BYTES else -1
    message = _read(pipe, size) if 0 <= size <= limit_bytes else b""
    return message if len(message) == size else None


def _read(pipe: IO[bytes] | io.FileIO, size: int) -> bytes:
    """`size` bytes, or fewer where the pipe was closed; an unbuffered read returns what is there."""
    parts = []
    while size and (part := pipe.read(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# What follows runs in the helper.


def serve(setting: dict[str, Any]) -> None:
    """Import the service, lower the limits, answer requests until the pipe closes."""
    limits = Limits(**setting["limits"])
    handle = importlib.import_module(setting["service"]).handle
    requests, answers = io.FileIO(0), io.FileIO(1, "w")
    _confine(limits.memory_bytes)
    while (message := _receive(requests, sys.maxsize)) is not None:
        _timers(limits.cpu_s, limits.wall_s + 1)
        try:
            answer = json.dumps({"answer": handle(json.loads(message))})
            if len(answer) > limits.answer_bytes:
                raise MemoryError(f"the result is larger than {limits.answer_bytes >> 20} MiB")
        except BaseException as error:  # a panic of Rust code is no Exception
            answer = json.dumps({"error": type(error).__name__, "message": str(error)[:1000], "line": getattr(error, "lineno", None)})
        _timers(0, 0)
        _send(answers, answer.encode())


def _timers(cpu_s: float, wall_s: float) -> None:
    """The system ends this process when one of them runs out; 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)


def _confine(memory_bytes: int) -> None:
    """Give up what no request needs."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: 3}
    with suppress(OSError):  # no /proc: other systems do not hold RLIMIT_AS either
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory_bytes
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))
