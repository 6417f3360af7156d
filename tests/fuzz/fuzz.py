"""Fuzz the targets with libFuzzer, each in a process of its own: those of targets.py through atheris, those in native/ with clang.

    python tests/fuzz/fuzz.py --seconds 60                     all targets, 60 s together
    python tests/fuzz/fuzz.py --seconds 3600 template groups   these two
    python tests/fuzz/fuzz.py --runs 1000000 --hang 2 groups   so many executions, however long they take; with --seconds, at most so long
    python tests/fuzz/fuzz.py template --minimize crash-1f2e   the smallest input that still fails, written beside it

The corpus that grows is kept in build/fuzz/TARGET; inputs that crash, hang or take 512 MiB are in build/fuzz/finds. A find, minimised and
mended, becomes a file in tests/fuzz/finds/TARGET, which test_fuzz.py replays, and each run of a native target. Without clang and its
fuzzer library (Debian: clang libclang-rt-14-dev) the native targets are skipped, which a line says.
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
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tests" / "fuzz" / "native"
CORPUS = ROOT / "build" / "fuzz"
HANG_S, MEMORY_MIB = 10, 512
PATIENCE = 30  # times that, on the clock: Python's targets are judged by their processor time, since a busy machine pauses them


def work(name: str, flags: list[str]) -> None:
    """One target, until its time is over or it fails."""
    import atheris

    sys.path.insert(0, str(ROOT))
    from tests.fuzz import targets

    for function in functions():
        atheris.instrument_func(function)
    chosen = targets.TARGETS[name]
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(chosen.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
        chosen.run(seed)
    words = CORPUS / "words.txt"
    escaped = ("".join(rf"\x{byte:02x}" for byte in word.encode()) for word in targets.WORDS)
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    resident_mib = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    inputs = [] if any(flag.startswith("-minimize") for flag in flags) else [str(corpus)]
    hang_s = next(float(flag.partition("=")[2]) for flag in flags if flag.startswith("-timeout=")) / PATIENCE

    def run(data: bytes) -> None:
        start = time.process_time()
        chosen.run(data)
        assert (spent := time.process_time() - start) <= hang_s, f"hangs: {spent:.1f} s of processor time"

    limits = [f"-rss_limit_mb={resident_mib + MEMORY_MIB}", f"-dict={words}"]
    atheris.Setup([name, *limits, *flags, *inputs], run)
    atheris.Fuzz()


def functions() -> Iterator[types.FunctionType]:
    """Those of the package. atheris cannot instrument imports here: an editable install has a loader of its own."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "exl2nb"]:
        for value in [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]:
            for member in vars(value).values() if isinstance(value, type) else [value]:
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if isinstance(function, types.FunctionType):
                    yield function


def natives() -> list[str]:
    """The targets in native/."""
    return sorted(path.stem for path in NATIVE.glob("*.cpp"))


def build_natives() -> str:
    """Compile them; returns why that is not possible, or "".

    Raises:
        CalledProcessError: they do not compile.
    """
    found = [name for name in ("clang++", *(f"clang++-{number}" for number in range(25, 13, -1))) if shutil.which(name)]
    if not found:
        return "clang is not installed (Debian: apt-get install clang libclang-rt-14-dev)"
    folder = CORPUS / "native"
    folder.mkdir(parents=True, exist_ok=True)
    probe = ["-fsanitize=fuzzer,address", "-x", "c++", "-", "-o", str(folder / "probe")]
    source = '#include <fuzzer/FuzzedDataProvider.h>\nextern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }'
    if subprocess.run([found[0], *probe], input=source, text=True, capture_output=True).returncode:
        return f"{found[0]} has no fuzzer library (Debian: apt-get install libclang-rt-14-dev)"
    ninja = Path(sys.executable).parent / "ninja"
    tools = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja.exists() else []
    cmake = str(Path(sys.executable).parent / "cmake")
    cmake = cmake if Path(cmake).exists() else "cmake"
    configure = [cmake, "-S", str(NATIVE), "-B", str(folder), *tools, f"-DCMAKE_CXX_COMPILER={found[0]}", "-DCMAKE_BUILD_TYPE=None"]
    for command in (configure, [cmake, "--build", str(folder), "--parallel"]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return ""


def command_of(name: str, own: list[str], *, minimize: bool) -> list[str]:
    """How a target is run."""
    if name not in natives():
        return [sys.executable, __file__, "--worker", name, *own]
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    limits, finds = [f"-rss_limit_mb={MEMORY_MIB}", "-use_value_profile=1"], ROOT / "tests" / "fuzz" / "finds" / name
    inputs = [] if minimize else [str(corpus), *([str(finds)] if finds.is_dir() else [])]  # the first is where new ones go
    return [str(CORPUS / "native" / name), *limits, *own, *inputs]


def main() -> int:
    """Run what the command line asks for; 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, help="of all targets together; 60 without --runs")
    parser.add_argument("--runs", type=int, help="executions of each target")
    parser.add_argument("--hang", type=int, default=HANG_S, help="seconds after which an input hangs; Python's: of processor time")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; 0 = another one each time")
    parser.add_argument("--minimize", type=Path)
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.worker is not None:
        work(args.worker[0], flags)
        return 0
    sys.path.insert(0, str(ROOT))
    from tests.fuzz.targets import TARGETS

    names, skipped = args.targets or [*TARGETS, *natives()], ""
    if set(names) & set(natives()) and (skipped := build_natives()):
        names = [name for name in names if name not in natives()]
        print(f"C++ targets are skipped: {skipped}", flush=True)
    finds = CORPUS / "finds"
    finds.mkdir(parents=True, exist_ok=True)
    together = args.seconds or (0 if args.runs else 60)
    failed, seconds = [], max(1, together // max(1, len(names))) if together else 0
    for name in names:
        own = [f"-artifact_prefix={finds}/{name}-"]
        own += [f"-timeout={args.hang if name in natives() else PATIENCE * args.hang}", "-print_final_stats=1", f"-seed={args.seed}"]
        own += [f"-runs={args.runs}"] if args.runs else []
        own += [f"-max_total_time={seconds}"] if seconds else []
        if args.minimize:
            own += ["-minimize_crash=1", f"-exact_artifact_path={args.minimize}.minimized", str(args.minimize)]
        start = time.monotonic()
        command = command_of(name, own, minimize=args.minimize is not None)
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=ROOT)
        ran = re.search(r"number_of_executed_units: (\d+)", done.stderr)
        row = {
            "target": name,
            "executions": int(ran[1]) if ran else None,
            "seconds": round(time.monotonic() - start),
            "exit": done.returncode,
        }
        print(json.dumps(row), flush=True)
        if done.returncode and not args.minimize:
            failed.append(name)
            print(done.stderr[-4000:], flush=True)
    print(f"{len(names)} targets, {len(failed)} failed: {', '.join(failed) or 'none'}; finds: {finds}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
