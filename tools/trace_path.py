"""Follow one `llm.stream()` through the package: which Python files it visits, and how many of our calls a decoded token costs.

    python tools/trace_path.py [--tokens 20] [--json]

Streams greedily from the demo model twice: the first stream warms up what a process does once (imports, thread start), the second is
recorded with `sys.setprofile` on every thread. Prints the files in the order of their first call, and the calls per token on the engine
thread, counted between the first and the last decoded token.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

PROMPT = "The old captain"


class Trace:
    """Python calls of the package. calls: (thread name, file, function) in order."""

    def __init__(self, package: Path) -> None:
        self.package = str(package)
        self.calls: list[tuple[str, str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function: notes calls into the package."""
        if event == "call" and frame.f_code.co_filename.startswith(self.package):
            file = frame.f_code.co_filename[len(self.package) + 1 :]
            self.calls.append((threading.current_thread().name, file, frame.f_code.co_qualname))


def trace(tokens: int) -> dict[str, Any]:
    """Stream once and count.

    Returns:
        files: visited, in the order of their first call. calls_per_token: on the engine thread, the mean over the decoded tokens.
        functions: the engine thread's functions with their calls per token.
    """
    import exl2nb as ex

    record = Trace(Path(ex.__file__).parent)
    with ex.demo(progress=None) as llm:
        for _ in llm.stream(PROMPT, max_tokens=tokens, temperature=0):
            pass
        threading.setprofile_all_threads(record) if sys.version_info >= (3, 12) else _attach(llm, record)
        sys.setprofile(record)
        marks = [len(record.calls)]
        for _ in llm.stream(PROMPT, max_tokens=tokens, temperature=0):
            marks.append(len(record.calls))
        sys.setprofile(None)
        threading.setprofile(None)
        if sys.version_info >= (3, 12):
            threading.setprofile_all_threads(None)
    calls = record.calls[marks[0] :]
    files = list(dict.fromkeys(file for _, file, _ in calls))
    decoding = [call for call in record.calls[marks[1] : marks[-1]] if "engine" in call[0]]
    functions = Counter(f"{file}:{name}" for _, file, name in decoding)
    per_token = max(tokens - 1, 1)
    return {
        "files": files,
        "calls_per_token": round(len(decoding) / per_token, 2),
        "functions": {name: round(count / per_token, 2) for name, count in functions.most_common()},
    }


def _attach(llm: Any, record: Trace) -> None:
    """Before Python 3.12 a running thread cannot be given a profile function: wait until the idle engine thread has ended."""
    threading.setprofile(record)
    for thread in threading.enumerate():
        if "engine" in thread.name:
            thread.join(30)


def main() -> None:
    """Print the trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = trace(args.tokens)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{len(found['files'])} files:")
    print("\n".join(f"  {file}" for file in found["files"]))
    print(f"{found['calls_per_token']} calls per decoded token on the engine thread:")
    print("\n".join(f"  {count:6.2f}  {name}" for name, count in found["functions"].items()))


if __name__ == "__main__":
    main()
