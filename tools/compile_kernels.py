"""Compile every CUDA kernel with NVRTC, without a GPU: all variants that the library may launch.

    python tools/compile_kernels.py --arch 75 90 [--out FOLDER [--pack]] [--nvrtc SITE | --nvcc NVCC]

`--out` keeps the code in FOLDER/sm_ARCH, and `index.txt` with the sources' digest, the compiler's CUDA version, then a line per kernel:
source, name, symbol, file, sha256 of the program's code, where it begins in the file and its size in bytes, apart by tabs. A file is one
program, which programs without Python read (benchmarks/cuda), or with `--pack` all programs of a source in one stream of xz: 6 MB for
four architectures, where a zip file of single programs takes 16. exl2nb reads both where FOLDER is `csrc/ready`: release wheels ship that.
`--nvcc` compiles with CUDA's offline compiler, whose code addresses shared memory with 32 bits and is up to 4 % faster
(benchmarks/RESULTS.md). `--nvrtc` is a folder with NVIDIA's wheels `nvidia-cuda-nvrtc` and `nvidia-cuda-runtime`
(`pip install --target SITE ...`); without it, those beside torch.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

from exl2nb.ops import _load, kernel_code
from exl2nb.ops.kernel_code import KernelId


def with_nvcc(nvcc: str, unit: KernelId, arch: str) -> bytes:
    """Machine code of one program from nvcc.

    Raises:
        NoCompiler: with what nvcc said.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        use = f"static auto* const use = &exl2nb::{unit.name};\nvoid* instantiate() {{ return (void*)use; }}\n" if unit.name else ""
        source.write_text(f'#include "cuda/{unit.source}"\n{use}')
        options = ["-cubin", "-std=c++17", "-O3", "-DNDEBUG", f"-arch=sm_{arch}", "-I", str(kernel_code.source_root())]
        done = subprocess.run([nvcc, *options, str(source), "-o", str(code)], capture_output=True, text=True)
        if done.returncode:
            raise kernel_code.NoCompiler(f"kernel {unit.name} of {unit.source}: {done.stderr[:2000]}")
        return code.read_bytes()


def nvcc_version(nvcc: str) -> str:
    """The CUDA version of an nvcc, such as "13.0"."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return said.split("release ", 1)[1].split(",")[0]


def compile_all(arch: str, out: Path | None, nvcc: str | None = None, pack: bool = False) -> int:
    """Compile for one architecture, such as "90"; returns how many kernels do not compile."""
    major, minor = int(arch[:-1]), int(arch[-1])
    kernels = [one for one in kernel_code.every_kernel() if arch == "90" or not one.arch(major, minor).endswith("a")]
    units = list(dict.fromkeys(one.unit for one in kernels))
    version = nvcc_version(nvcc) if nvcc else ".".join(map(str, kernel_code.nvrtc().version))
    name = f"{'nvcc' if nvcc else 'NVRTC'} {version}"

    def attempt(unit: KernelId) -> tuple[bytes, float] | str:
        begun = time.monotonic()
        try:
            target = unit.arch(major, minor)
            code = with_nvcc(nvcc, unit, target) if nvcc else kernel_code.nvrtc().compile(unit, target)
            for one in kernels:
                if one.unit == unit:
                    kernel_code.kernel_symbol(code, one.name)
            return code, time.monotonic() - begun
        except kernel_code.NoCompiler as reason:
            return str(reason)

    begun = time.monotonic()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = dict(zip(units, pool.map(attempt, units)))
    failed = {unit: found for unit, found in results.items() if isinstance(found, str)}
    for said in failed.values():
        print(said)
    if len(failed) == len(units):
        return len(failed)
    done = {unit: found for unit, found in results.items() if not isinstance(found, str)}
    spent, total = time.monotonic() - begun, sum(len(code) for code, _ in done.values())
    slowest, (_, longest) = max(done.items(), key=lambda item: item[1][1])
    print(
        f"sm_{arch}, {name}: {len(kernels)} kernels in {len(done)} programs, "
        f"{total / 2**20:.1f} MiB, {spent:.0f} s; the longest {slowest.name or slowest.source}, {longest:.1f} s"
    )
    if out is not None:
        _write(out / f"sm_{arch}", version, kernels, {unit: code for unit, (code, _) in done.items()}, pack)
    return len(failed)


def _write(out: Path, version: str, kernels: list[KernelId], codes: dict[KernelId, bytes], pack: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    groups: dict[object, list[KernelId]] = {}
    for unit in codes:
        groups.setdefault(unit.source if pack else unit, []).append(unit)
    places: dict[KernelId, tuple[str, str]] = {}  # file, first byte
    for number, units in enumerate(groups.values()):
        file, whole = f"{number}.{'xz' if pack else 'cubin'}", b"".join(codes[unit] for unit in units)
        (out / file).write_bytes(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME) if pack else whole)
        starts = accumulate((len(codes[unit]) for unit in units), initial=0)
        places |= {unit: (file, str(start)) for unit, start in zip(units, starts)}
    lines = [kernel_code.source_digest(), version]
    for one in (one for one in kernels if one.unit in codes):
        code = codes[one.unit]
        checksum, (file, start) = hashlib.sha256(code).hexdigest(), places[one.unit]
        lines.append("\t".join((one.source, one.name, kernel_code.kernel_symbol(code, one.name), file, checksum, start, str(len(code)))))
    (out / "index.txt").write_text("\n".join(lines) + "\n")


def main() -> int:
    """Parse the command line, compile, return the exit code."""
    parser = argparse.ArgumentParser(description="Compile every CUDA kernel with NVRTC, without a GPU.")
    parser.add_argument("--arch", nargs="+", default=["90"], help="compute capabilities without the dot")
    parser.add_argument("--out", type=Path, help="keep the code there")
    parser.add_argument("--pack", action="store_true", help="in one file per source, packed")
    parser.add_argument("--nvrtc", type=Path, help="folder with NVIDIA's wheels")
    parser.add_argument("--nvcc", help="compile with this nvcc instead")
    options = parser.parse_args()
    if options.nvrtc:
        sys.path.insert(0, str(options.nvrtc))
    library = _load.find_library("libexl2nb_cuda.so")
    if library is None:
        print("libexl2nb_cuda.so is missing: run `make build`")
        return 1
    kernel_code.connect_library(library)
    return min(1, sum(compile_all(arch, options.out, options.nvcc, options.pack) for arch in options.arch))


if __name__ == "__main__":
    sys.exit(main())
