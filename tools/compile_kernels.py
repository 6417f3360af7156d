"""Compile every CUDA kernel with NVRTC, without a GPU: all variants that the library may launch.

    python tools/compile_kernels.py --arch 75 90 [--out FOLDER] [--nvrtc SITE]

`--out` keeps the code for programs without Python (benchmarks/cuda): a file per kernel, and `index.txt` with a line
`source<TAB>name<TAB>symbol<TAB>file` each. `--nvrtc` is a folder with NVIDIA's wheels `nvidia-cuda-nvrtc` and `nvidia-cuda-runtime`
(`pip install --target SITE ...`); without it, those beside torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from exl2nb.ops import _load, kernel_code
from exl2nb.ops.kernel_code import KernelId


def compile_all(arch: str, out: Path | None) -> int:
    """Compile for one architecture, such as "90"; returns how many kernels do not compile."""
    major, minor = int(arch[:-1]), int(arch[-1])
    kernels = [one for one in kernel_code.every_kernel() if arch == "90" or not one.arch(major, minor).endswith("a")]
    units = list(dict.fromkeys(one.unit for one in kernels))
    compiler = kernel_code.nvrtc()

    def attempt(unit: KernelId) -> tuple[bytes, float] | str:
        begun = time.monotonic()
        try:
            code = compiler.compile(unit, unit.arch(major, minor))
            for one in kernels:
                if one.unit == unit:
                    kernel_code.symbol(code, one.name)
            return code, time.monotonic() - begun
        except kernel_code.NoCompiler as reason:
            return str(reason)

    begun = time.monotonic()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = dict(zip(units, pool.map(attempt, units)))
    failed = {unit: found for unit, found in results.items() if isinstance(found, str)}
    for said in failed.values():
        print(said)
    done = {unit: found for unit, found in results.items() if not isinstance(found, str)}
    spent, total = time.monotonic() - begun, sum(len(code) for code, _ in done.values())
    slowest, (_, longest) = max(done.items(), key=lambda item: item[1][1])
    print(
        f"sm_{arch}, NVRTC {'.'.join(map(str, compiler.version))}: {len(kernels)} kernels in {len(done)} programs, "
        f"{total / 2**20:.1f} MiB, {spent:.0f} s; the longest {slowest.name or slowest.source}, {longest:.1f} s"
    )
    if out is not None:
        _write(out, kernels, {unit: code for unit, (code, _) in done.items()})
    return len(failed)


def _write(out: Path, kernels: list[KernelId], codes: dict[KernelId, bytes]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    files = {unit: f"{number}.cubin" for number, unit in enumerate(codes)}
    for unit, name in files.items():
        (out / name).write_bytes(codes[unit])
    rows = [(one.source, one.name, kernel_code.symbol(codes[one.unit], one.name), files[one.unit]) for one in kernels if one.unit in codes]
    (out / "index.txt").write_text("".join("\t".join(row) + "\n" for row in rows))


def main() -> int:
    """Parse the command line, compile, return the exit code."""
    parser = argparse.ArgumentParser(description="Compile every CUDA kernel with NVRTC, without a GPU.")
    parser.add_argument("--arch", nargs="+", default=["90"], help="compute capabilities without the dot")
    parser.add_argument("--out", type=Path, help="keep the code of the last architecture there")
    parser.add_argument("--nvrtc", type=Path, help="folder with NVIDIA's wheels")
    options = parser.parse_args()
    if options.nvrtc:
        sys.path.insert(0, str(options.nvrtc))
    library = _load.find("libexl2nb_cuda.so")
    if library is None:
        print("libexl2nb_cuda.so is missing: run `make build`")
        return 1
    kernel_code.connect(library)
    return min(1, sum(compile_all(arch, options.out) for arch in options.arch))


if __name__ == "__main__":
    sys.exit(main())
