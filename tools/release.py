"""Build and check everything that a release uploads, into dist/.

    make release                                          # all steps but kernels, with this Python and the default torch
    make release STEPS="kernels sdist wheels check notes" # what is uploaded
    python tools/release.py sdist wheels --arch aarch64   # some of them
    python tools/release.py smoke --python python3.13 --torch 2.14.1

Steps, in this order:
    kernels machine code of the CUDA kernels by nvcc, into csrc/ready, in a quarter of an hour of one core. Wheels without it compile
            when a kernel is first needed
    sdist   exl2nb-VERSION.tar.gz
    wheels  manylinux_2_28 for x86_64 and aarch64, built from that sdist
    check   contents, size, metadata, and the symbols that the libraries need
    smoke   install wheel and sdist into fresh environments; run .ci/smoke.py there
    notes   SHA256SUMS, and NOTES.md from CHANGELOG.md

g++ and aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu), 11 or later, compile and link. They link against stubs: those of glibc
2.28 that zig makes, and a libtorch_cpu.so with nothing but the symbols of torch 2.10. What is newer than either fails to link. libstdc++ is
linked in: its symbol versions follow the compiler. (clang's libc++ cannot be used: torch cannot catch its exceptions, the process ends.)
Python packages: RELEASE in the Makefile. torch's headers come from the installed torch, or $EXL2NB_TORCH_DIR.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import time
from importlib.util import find_spec
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK, DIST = ROOT / "build" / "release", ROOT / "dist"
VERSION = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]
SDIST = DIST / f"exl2nb-{VERSION}.tar.gz"
SYMBOLS = ROOT / "tests/contracts/torch_2_10_symbols.txt"
ARCHS = ("x86_64", "aarch64")
GLIBC = "2.28"
TORCHES = ("2.13.0",)
CAPABILITIES = ("75", "80", "90", "120")  # code for 8.0 runs on 8.6 and 8.9
READY = ROOT / "csrc" / "ready"


class Failed(Exception):
    """A step found something that must not be released."""


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def module(name: str, *arguments: str | Path, **env: str) -> str:
    """Run a Python package of the Makefile's RELEASE."""
    if find_spec(name) is None:
        raise Failed(f"the package {name} is missing; `make release` installs it into .venv")
    return run(sys.executable, "-m", name, *arguments, **env)


def wheel_of(arch: str) -> Path:
    """Path of a finished wheel."""
    return DIST / f"exl2nb-{VERSION}-py3-none-manylinux_{GLIBC.replace('.', '_')}_{arch}.whl"


# ---- kernels, sdist, wheels


def kernels() -> None:
    """What `ops/kernel_code.py` takes in place of compiling. The installed exl2nb lists the kernels; an editable install, `make build`."""
    shutil.rmtree(READY, ignore_errors=True)
    nvcc = run(ROOT / ".ci" / "nvcc").strip()
    print(
        run(sys.executable, ROOT / "tools" / "compile_kernels.py", "--arch", *CAPABILITIES, "--nvcc", nvcc, "--out", READY, "--pack"),
        end="",
    )


def sdist() -> None:
    """The source package, which needs g++ >= 11 and an installed torch where it is installed."""
    module("build", "--sdist", "--no-isolation", "--outdir", DIST)


def compiler(arch: str) -> str:
    """g++ for `arch`: $CXX where it is this machine's own, else Debian's cross compiler."""
    own = platform.machine() == arch
    name = os.environ.get("CXX", "g++") if own else f"{arch}-linux-gnu-g++"
    if not shutil.which(name):
        raise Failed(f"no {name} for {arch}; on Debian: apt-get install {'g++' if own else f'g++-{arch}-linux-gnu'}")
    version = int(run(name, "-dumpversion").split(".")[0])
    if version < 11:
        raise Failed(f"{name} is version {version}; expected 11 or later")
    return name


def glibc_stubs(arch: str, cxx: str) -> Path:
    """A folder with glibc's libraries as of GLIBC: symbols and versions, no code."""
    folder, cache = WORK / arch / "glibc", WORK / arch / "zig"
    source = WORK / arch / "stub.c"
    source.write_text("double exp(double); double stub(double x) { return exp(x); }\n")
    target = f"{arch}-linux-gnu.{GLIBC}"
    env = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
    module("ziglang", "cc", "-target", target, "-shared", "-fPIC", source, "-o", WORK / arch / "stub.so", "-lm", **env)
    made = next(cache.rglob("libc.so.6"), None)
    if made is None:
        raise Failed(f"zig left no libc.so.6 under {cache}: its cache has another layout now")
    shutil.copytree(made.parent, folder)
    (folder / "libm.so").symlink_to("libm.so.6")
    # libstdc++ reads this variable of glibc 2.32. 0: there may be several threads, so reference counts are atomic.
    single = WORK / arch / "single.c"
    single.write_text('__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n')
    run(cxx.replace("g++", "gcc"), "-fPIC", "-c", single, "-o", folder / "single.o")
    parts = ["libc.so.6", run(cxx, "-print-file-name=libc_nonshared.a").strip(), "libpthread.so.0", "libdl.so.2", "libld.so.2", "single.o"]
    (folder / "libc.so").write_text(f"GROUP ( {' '.join(str(folder / part) for part in parts)} )\n")
    return folder


def torch_stub(arch: str, cxx: str) -> Path:
    """A torch folder: real headers, and a libtorch_cpu.so with the symbols of torch 2.10's stable ABI."""
    spec = find_spec("torch")
    real = os.environ.get("EXL2NB_TORCH_DIR") or (spec and spec.origin and Path(spec.origin).parent)
    if not real:
        raise Failed("no torch for its headers: pip install torch, or set EXL2NB_TORCH_DIR")
    folder, source = WORK / arch / "torch", WORK / arch / "torch.c"
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(Path(real) / "include")
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in SYMBOLS.read_text().split()))
    library = folder / "lib" / "libtorch_cpu.so"
    run(cxx, "-x", "c", "-shared", "-fPIC", "-nostdlib", "-w", "-Wl,-soname,libtorch_cpu.so", source, "-o", library)
    return folder


def wheel(arch: str) -> None:
    """One wheel, from the sdist."""
    if not SDIST.exists():
        raise Failed(f"{SDIST} is missing: run the step sdist first")
    shutil.rmtree(WORK / arch, ignore_errors=True)
    (WORK / arch).mkdir(parents=True)
    with tarfile.open(SDIST) as archive:
        archive.extractall(WORK / arch)
    if READY.exists():
        shutil.copytree(READY, WORK / arch / f"exl2nb-{VERSION}" / "csrc" / "ready")
    cxx = compiler(arch)
    # --gc-sections: parts of libstdc++ that nothing uses may need a newer glibc.
    link = f"-L{glibc_stubs(arch, cxx)} -static-libstdc++ -Wl,--gc-sections,--as-needed,--no-undefined,--allow-shlib-undefined,-s"
    defines = {
        "CMAKE_CXX_COMPILER": cxx,
        "CMAKE_MODULE_LINKER_FLAGS": link,
        "EXL2NB_TORCH_DIR": torch_stub(arch, cxx),
    }
    if arch != platform.machine():
        defines |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": arch}
    settings = [f"--config-setting=cmake.define.{name}={value}" for name, value in defines.items()]
    settings.append(f"--config-setting=build-dir={WORK / arch / 'cmake'}")
    source = WORK / arch / f"exl2nb-{VERSION}"
    module("build", "--wheel", "--no-isolation", "--outdir", WORK / arch, *settings, source, _PYTHON_HOST_PLATFORM=f"linux-{arch}")
    (built,) = (WORK / arch).glob("*.whl")
    module("wheel", "tags", "--remove", "--platform-tag", wheel_of(arch).stem.split("-")[-1], built)
    shutil.move(built.with_name(wheel_of(arch).name), wheel_of(arch))


# ---- check, smoke, notes


def check(archs: list[str]) -> None:
    """Everything in dist/ of this version."""
    wheels = [wheel_of(arch) for arch in archs]
    for path in (*wheels, SDIST):
        if not path.exists():
            raise Failed(f"{path} is missing: run the steps sdist and wheels first")
    print(run(sys.executable, ROOT / ".ci/check_wheel.py", *wheels), end="")
    for arch, path in zip(archs, wheels):
        shown = json.loads(module("auditwheel", "show", "--json", path))
        if list(shown["external_libs"]) != ["libtorch_cpu.so"] or not shown["sym_tag"].startswith("manylinux_2_"):
            raise Failed(f"{path.name}: expected torch's library alone and manylinux symbols, auditwheel says {shown}")
        if int(shown["sym_tag"].split("_")[2]) > int(GLIBC.split(".")[1]):
            raise Failed(f"{path.name} needs {shown['sym_tag']}, newer than glibc {GLIBC}")
        print(f"  auditwheel, {arch}: torch's library aside, it fits {shown['sym_tag']}")
    module("twine", "check", "--strict", *wheels, SDIST)
    print(f"{SDIST.name}: {SDIST.stat().st_size / 2**20:.1f} MiB; twine has no complaints")


def cpu_seconds() -> float:
    """CPU time of all finished child processes: what a busy machine does not change."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def smoke(pythons: list[str], torches: list[str], kinds: list[str]) -> None:
    """Each wanted environment: torch alone, then the package with all it needs, then .ci/smoke.py."""
    venv, pip = WORK / "venv", ("-m", "pip", "install", "-q", "--disable-pip-version-check")
    python = venv / "bin" / "python"
    for interpreter, torch, kind in product(pythons, torches, kinds):
        shutil.rmtree(venv, ignore_errors=True)
        run("make", f"PY={interpreter}", f"VENV={venv}", f"TORCH=torch=={torch}", "ENGINE=", "BUILD=", venv / ".torch")
        began, used = time.perf_counter(), cpu_seconds()
        run(python, *pip, SDIST if kind == "sdist" else wheel_of(platform.machine()))
        install, cpu = time.perf_counter() - began, cpu_seconds() - used
        said = run(python, "-I", ROOT / ".ci/smoke.py", cwd=WORK)
        first = install + float(re.findall(r"first token after ([\d.]+) s", said)[0])
        versions = run(
            python, "-c", "import platform, torch; print(f'Python {platform.python_version()}, torch {torch.__version__}')"
        ).strip()
        print(f"  {kind}, {versions}: ok, install {install:.0f} s ({cpu:.0f} s of CPU), first token {first:.0f} s", flush=True)


def notes() -> None:
    """SHA256SUMS, and NOTES.md: the section of this version in CHANGELOG.md."""
    section = re.search(rf"^## {re.escape(VERSION)}\b[^\n]*\n(.*?)(?=^## |\Z)", (ROOT / "CHANGELOG.md").read_text(), re.M | re.S)
    if section is None:
        raise Failed(f"CHANGELOG.md has no heading for {VERSION}")
    (DIST / "NOTES.md").write_text(section[1].strip() + "\n")
    files = sorted([*DIST.glob(f"exl2nb-{VERSION}-*.whl"), SDIST])
    (DIST / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files))
    print("".join(f"  {file.stat().st_size / 2**20:5.1f} MiB  {file.name}\n" for file in files), end="")


def main() -> int:
    """See the module."""
    steps = ("kernels", "sdist", "wheels", "check", "smoke", "notes")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(steps)}; none means all but kernels")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="wheels to build and check (both)")
    parser.add_argument("--python", action="append", help="interpreters for `smoke` (this one)")
    parser.add_argument("--torch", action="append", help=f"versions for `smoke` ({', '.join(TORCHES)})")
    parser.add_argument("--kind", action="append", choices=("wheel", "sdist"), help="what `smoke` installs (both)")
    args = parser.parse_args()
    if unknown := set(args.steps) - set(steps):
        parser.error(f"unknown step {sorted(unknown)}; known: {', '.join(steps)}")
    archs = args.arch or list(ARCHS)
    DIST.mkdir(exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cmake, ninja
    os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
    actions = {
        "kernels": kernels,
        "sdist": sdist,
        "wheels": lambda: [wheel(arch) for arch in archs],
        "check": lambda: check(archs),
        "smoke": lambda: smoke(args.python or [sys.executable], args.torch or list(TORCHES), args.kind or ["wheel", "sdist"]),
        "notes": notes,
    }
    try:
        for step in steps:
            if step not in (args.steps or steps[1:]):
                continue
            began = time.perf_counter()
            print(f"release: {step}", flush=True)
            actions[step]()
            print(f"release: {step} took {time.perf_counter() - began:.0f} s", flush=True)
    except Failed as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
