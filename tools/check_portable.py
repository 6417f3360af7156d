"""Do the CPU engine's sources compile for systems without a wheel yet? Clang's front end as zig brings it: `pip install ziglang`.

    python tools/check_portable.py [--target aarch64-macos]

Nothing is linked or run. Windows is tried with zig's GNU headers and clang's -fms-compatibility: Microsoft's compiler and headers exist on
Windows alone. docs/internals/release.md says what is missing for wheels.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
X86 = {
    "base": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"],
}
"""As in CMakeLists.txt."""
TARGETS = {"aarch64-macos": ["-pthread"], "x86_64-windows-gnu": ["-fms-compatibility", "-DEXL2NB_X86"]}


def sources(target: str, folder: Path) -> list[tuple[Path, list[str]]]:
    """Files and flags; kernels once per instruction set."""
    isas = X86 if target.startswith("x86_64") else {"base": []}
    found = [
        (path, []) for pattern in ("cpu/*.cpp", "format/*.cpp", "torch/ops_cpu*.cpp") for path in sorted((ROOT / "csrc").glob(pattern))
    ]
    for family in ("kernels", "draw", "gptq"):
        for isa, flags in isas.items():
            path = folder / f"{family}_{isa}.cpp"
            path.write_text(f'#define EXL2NB_ISA {isa}\n#include "cpu/{family}.inc"\n')
            found.append((path, flags))
    return found


def compile_one(target: str, include: Path, source: tuple[Path, list[str]]) -> str:
    """What the compiler has to say; empty where it is content."""
    path, flags = source
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target, "-std=c++20", "-fsyntax-only", "-Wall", "-ffp-contract=off"]
    command += [*TARGETS[target], *flags, "-DTORCH_TARGET_VERSION=0x020a000000000000ULL", f"-I{ROOT / 'csrc'}", "-isystem", str(include)]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    return f"{path.name}: {done.stderr}" if done.returncode or "warning:" in done.stderr else ""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="all of them, if none is named")
    args = parser.parse_args()
    torch = find_spec("torch")
    folder = os.environ.get("EXL2NB_TORCH_DIR") or (torch and torch.origin and os.path.dirname(torch.origin))
    if not folder or find_spec("ziglang") is None:
        print("needs the packages torch and ziglang", file=sys.stderr)
        return 1
    bad = 0
    for target in args.target or TARGETS:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
            files = sources(target, Path(temporary))
            said = [text for text in pool.map(partial(compile_one, target, Path(folder) / "include"), files) if text]
        print(f"{target}: {len(files) - len(said)} of {len(files)} sources compile without a warning, {time.perf_counter() - began:.0f} s")
        print("\n".join(text[:3000] for text in said))
        bad += len(said)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
