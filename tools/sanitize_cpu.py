"""AddressSanitizer with UndefinedBehaviorSanitizer, and ThreadSanitizer, over the CPU engine: csrc/cpu, csrc/format and csrc/torch.

    python tools/sanitize_cpu.py [--tools address thread] [--only ops model generator] [--limit 7200] [--logs DIR] [-- PYTEST OPTIONS]

Builds `libexl2nb_cpu.so` with each sanitizer into build/sanitize, then runs the suites of tests/ops, tests/model and tests/generator (what
needs no GPU, less what ELSEWHERE names), a process for each folder or file of --only, with that library in place of the installed one.
AddressSanitizer ends a process at its first report: mend it and run that suite again. The engine's threads are its own (std::thread and
std::atomic, csrc/cpu/parallel.cpp), which ThreadSanitizer understands. torch's are OpenMP's, which it does not, so its reports that come
from the libraries of FOREIGN are left out, by the name of the library; nothing of ours is suppressed. Leaks are not looked for here: Python
and torch keep memory to the end; tools/soak.py looks for them. A compiler with its sanitizers: clang, which takes a fifth of the time on
ASan's build, else g++.

Prints one line a suite and at the end every distinct report; ends with 1 where there is one, where a test failed or a suite ran too long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitize"
FLAGS = {"address": "address,undefined", "thread": "thread"}
RUNTIME = {"address": "libasan.so", "thread": "libtsan.so"}
SUITES = ("ops", "model", "generator")
FOREIGN = (  # a pattern that two loaded libraries match ends the process
    "libtorch_cpu.so",
    "libtorch_python.so",
    "libtorch.so",
    "libc10.so",
    "torch/lib/libgomp*.so",
    "sentencepiece.libs/libgomp*.so",
    "scikit_learn.libs/libgomp*.so",
    "libopenblas*.so",
    "libmkl*.so",
    "_multiarray_umath*.so",
    "tokenizers*.so",
)
ELSEWHERE = {  # what is left out of the suites, and why
    "ops/test_kernel_code.py": "the cache of CUDA kernels: no code of the CPU engine",
    "ops/test_load.py": "messages about GPUs: no code of the CPU engine",
    "ops/test_gpu_turn.py": "streams of a GPU, imitated: no code of the CPU engine",
    "ops/test_isa.py": "processes for each instruction set, which would have the ordinary library",
    "generator/test_interrupts.py": "processes that are interrupted, which would have the ordinary library",
}
REPORT = re.compile(r"(==\d+==ERROR: AddressSanitizer: .*|.*: runtime error: .*|WARNING: ThreadSanitizer: .*)")


def compiler(tool: str) -> tuple[str, list[str]]:
    """The compiler, and the runtime library to preload. ThreadSanitizer's is g++'s: Python does not start with clang 14's."""
    clang = next((name for name in ("clang++", *(f"clang++-{n}" for n in range(25, 13, -1))) if shutil.which(name)), None)
    if tool == "thread":
        return clang or "g++", [_file("g++", RUNTIME[tool])]
    if clang and os.path.isabs(found := _file(clang, "libclang_rt.asan-x86_64.so")):
        return clang, [found]
    return "g++", [_file("g++", RUNTIME[tool])]


def _file(program: str, name: str) -> str:
    return subprocess.run([program, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


def build(tool: str) -> Path:
    """The folder of the library with this sanitizer.

    Raises:
        CalledProcessError: it does not compile.
    """
    folder, bin_, program = BUILD / tool, Path(sys.executable).parent, compiler(tool)[0]
    flags = (
        f"-O1 -g1 -fno-omit-frame-pointer -fsanitize={FLAGS[tool]}{' -shared-libsan' if 'clang' in program and tool == 'address' else ''}"
    )
    configure = ["-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={bin_ / 'ninja'}", "-DCMAKE_BUILD_TYPE=None"]
    definitions = [f"-DCMAKE_CXX_FLAGS={flags}", f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_COMPILER={program}"]
    for command in (["cmake", *configure, *definitions], ["cmake", "--build", str(folder), "--target", "exl2nb_cpu"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"})
    return folder


def environment(tool: str, log: Path) -> dict[str, str]:
    """For a process of tests."""
    foreign = BUILD / "foreign.txt"
    foreign.write_text("".join(f"called_from_lib:{name}\n" for name in FOREIGN))
    common = f"log_path={log}:exitcode=99"
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(
            [*compiler(tool)[1], _file("g++", "libstdc++.so.6")]
        ),  # the C++ library, too: its exceptions are followed only where it is there from the start
        "ASAN_OPTIONS": f"{common}:detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": f"{common}:print_stacktrace=1",
        "TSAN_OPTIONS": f"{common}:halt_on_error=0:report_signal_unsafe=0:ignore_noninstrumented_modules=1:suppressions={foreign}",
        "OMP_NUM_THREADS": "2" if tool == "thread" else "1",
        "PYTHONMALLOC": "malloc" if tool == "address" else "pymalloc",
    }


def inside(folder: str, arguments: list[str]) -> int:
    """In a process of its own: run pytest on the library in `folder`."""
    import pytest

    import exl2nb

    exl2nb.__path__.insert(0, folder)
    from exl2nb.ops import _load

    found = _load.find_library("libexl2nb_cpu.so")
    assert found is not None
    assert str(found).startswith(folder), found
    return pytest.main(arguments)


def tests_of(path: Path) -> list[str]:
    """A file of tests, or those of a folder that have something to do here."""
    files = [path] if path.is_file() else sorted(path.glob("test_*.py"))
    wanted = [file for file in files if f"{file.parent.name}/{file.name}" not in ELSEWHERE]
    return [str(file) for file in wanted if "pytestmark = pytest.mark.gpu" not in file.read_text()]


def run(tool: str, folder: Path, path: Path, logs: Path, limit_s: float, options: list[str]) -> tuple[bool, list[str]]:
    """A folder or file of tests. Returns whether they passed, and the reports."""
    name = f"{path.parent.name}.{path.stem}"
    log = logs / f"{tool}.{name}"
    command = [
        sys.executable,
        __file__,
        "--inside",
        str(folder),
        "--",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=3000",  # of one test
        "-m",
        "not slow and not gpu",
        *tests_of(path),
        *options,
    ]
    start = time.monotonic()
    with open(f"{log}.tests", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment(tool, log), cwd=ROOT)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    text = "".join(one.read_text(errors="replace") for one in sorted(logs.glob(f"{log.name}.[0-9]*")))
    reports = [line.strip() for line in REPORT.findall(text + Path(f"{log}.tests").read_text(errors="replace"))]
    row = {"tool": tool, "file": name, "exit": code, "reports": len(reports), "seconds": round(time.monotonic() - start)}
    print(json.dumps(row), flush=True)
    return code in (0, 5), reports  # 5: no test of it runs here


def main() -> int:
    """Build, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=list(FLAGS), default=list(FLAGS))
    parser.add_argument("--only", nargs="+", default=list(SUITES), help="folders or files below tests/")
    parser.add_argument("--limit", type=float, default=7200, help="seconds of one suite")
    parser.add_argument("--logs", type=Path, default=BUILD / "logs")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args, options = parser.parse_known_args()
    options = [option for option in options if option != "--"]
    if args.inside:
        return inside(args.inside, options)
    args.logs.mkdir(parents=True, exist_ok=True)
    for old in args.logs.iterdir():
        old.unlink()
    failed, found = [], {}
    for tool in args.tools:
        folder = build(tool)
        for place in args.only:
            path = ROOT / "tests" / place
            passed, reports = run(tool, folder, path, args.logs, args.limit, options)
            failed += [] if passed else [f"{tool} {place}"]
            for report in reports:
                found.setdefault(re.sub(r"0x[0-9a-f]+|==\d+==|\(pid=\d+\)", "", report), place)
    for report, place in found.items():
        print(f"{place}: {report}")
    print(f"sanitizers: {len(found)} distinct reports, {len(failed)} suites failed: {', '.join(failed) or 'none'}; logs: {args.logs}")
    return bool(found or failed)


if __name__ == "__main__":
    sys.exit(main())
