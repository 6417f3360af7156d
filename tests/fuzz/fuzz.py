"""Fuzz the targets with atheris (libFuzzer), each in a process of its own.

    python tests/fuzz/fuzz.py --seconds 60                     all targets, 60 s together
    python tests/fuzz/fuzz.py --seconds 3600 template schema   these two
    python tests/fuzz/fuzz.py template --minimize crash-1f2e   the smallest input that still fails, written beside it

The corpus that grows is kept in build/fuzz/TARGET; inputs that crash, hang for 10 s or take 512 MiB are in build/fuzz/finds. A find,
minimised and mended, becomes a file in tests/fuzz/finds/TARGET, which test_fuzz.py replays.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HANG_S, MEMORY_MIB = 10, 512


def work(name: str, flags: list[str]) -> None:
    """One target, until its time is over or it fails."""
    import atheris

    sys.path.insert(0, str(ROOT))
    from tests.fuzz import targets

    for function in functions():
        atheris.instrument_func(function)
    chosen = targets.TARGETS[name]
    corpus = ROOT / "build" / "fuzz" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(chosen.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
        chosen.run(seed)
    words = ROOT / "build" / "fuzz" / "words.txt"
    escaped = ("".join(rf"\x{byte:02x}" for byte in word.encode()) for word in targets.WORDS)
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    resident_mib = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    inputs = [] if any(flag.startswith("-minimize") for flag in flags) else [str(corpus)]
    limits = [f"-timeout={HANG_S}", f"-rss_limit_mb={resident_mib + MEMORY_MIB}", "-print_final_stats=1", f"-dict={words}"]
    atheris.Setup([name, *limits, *flags, *inputs], chosen.run)
    atheris.Fuzz()


def functions() -> Iterator[types.FunctionType]:
    """Those of the package. atheris cannot instrument imports here: an editable install has a loader of its own."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "exl2nb"]:
        for value in [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]:
            for member in vars(value).values() if isinstance(value, type) else [value]:
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if isinstance(function, types.FunctionType):
                    yield function


def main() -> int:
    """Run what the command line asks for; 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--minimize", type=Path)
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.worker is not None:
        work(args.worker[0], flags)
        return 0
    sys.path.insert(0, str(ROOT))
    from tests.fuzz.targets import TARGETS

    names = args.targets or list(TARGETS)
    finds = ROOT / "build" / "fuzz" / "finds"
    finds.mkdir(parents=True, exist_ok=True)
    failed, seconds = [], max(1, args.seconds // len(names))
    for name in names:
        own = [f"-artifact_prefix={finds}/{name}-"]
        own += [f"-max_total_time={seconds}"]
        if args.minimize:
            own += ["-minimize_crash=1", f"-exact_artifact_path={args.minimize}.minimized", str(args.minimize)]
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, __file__, "--worker", name, *own], capture_output=True, text=True, errors="replace", cwd=ROOT
        )
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
