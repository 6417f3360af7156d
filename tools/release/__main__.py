"""Build and check everything a release uploads: `make release`, or `python tools/release`.

    python tools/release                       # all steps below, into dist/
    python tools/release wheels --arch x86_64  # one step

Steps: `sdist`, `wheels` (manylinux_2_28 for x86_64 and aarch64), `check` (contents, metadata, symbols), `imports` (the wheel of this machine with
the versions of torch that the package index has), `notes` (SHA256SUMS and NOTES.md from CHANGELOG.md).

The wheels link against stubs: libc of glibc 2.28 from zig, and a libtorch_cpu.so whose only symbols are those of torch 2.10's stable ABI. A symbol
newer than either fails the link. Compilers are g++ and aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu), version 11 or later. Python packages
come from the `release` extra of pyproject.toml.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE, WORK, DIST = Path(__file__).parent, ROOT / "build" / "release", ROOT / "dist"
SYMBOLS = (ROOT / "tests/contracts/torch_2_10_symbols.txt").read_text().split()
ARCHS = ("x86_64", "aarch64")
TORCHES = ("2.10.0", "2.11.0", "2.13.0", "2.14.1")
"""What `imports` tries; a version that the package index cannot give is reported and left out."""
GLIBC, GLIBCXX = (2, 28), (3, 4, 24)
MOST_BYTES = 40_000_000
MACHINE = {"x86_64": "X86-64", "aarch64": "AArch64"}
LOADER = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}


class Failed(Exception):
    """A step found something that must not be released."""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Standard output of a command that must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env={**os.environ, **(env or {})}, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def version() -> str:
    """The version in pyproject.toml."""
    return re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]


def compiler(arch: str) -> str:
    """g++ for `arch`: $CXX for this machine's own, else the prefixed cross compiler."""
    own = platform.machine() == arch
    name = os.environ.get("CXX", "g++") if own else f"{arch}-linux-gnu-g++"
    if not shutil.which(name):
        raise Failed(f"no {name} for {arch} wheels; on Debian: apt-get install {'g++' if own else f'g++-{arch}-linux-gnu'}")
    release = int(run(name, "-dumpversion").split(".")[0])
    if release < 11:
        raise Failed(f"{name} is version {release}; expected 11 or later")
    return name


def stubs(arch: str, cxx: str) -> tuple[Path, Path]:
    """Folders with what to link against: glibc 2.28's libraries, and a torch package of headers and one stub library."""
    work = WORK / arch
    libc, torch = work / "glibc", work / "torch"
    shutil.rmtree(work, ignore_errors=True)
    for folder in (libc, torch / "lib"):
        folder.mkdir(parents=True)
    source, cache = work / "stub.c", work / "zig"
    source.write_text("#include <math.h>\ndouble stub(double x) { return exp(x); }\n")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"]
    env = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
    run(*zig, "-shared", "-fPIC", source, "-o", work / "stub.so", "-lm", env=env)
    made = next(cache.rglob("libc.so.6"), None)
    if made is None:
        raise Failed(f"zig left no libc.so.6 under {cache}: its cache layout changed")
    for library in made.parent.glob("*.so.*"):
        shutil.copy(library, libc / library.name)
        short = libc / re.sub(r"\.so\..*", ".so", library.name)
        short.symlink_to(library.name)
    nonshared = Path(run(cxx, "-print-file-name=libc_nonshared.a").strip())
    (libc / "libc.so").unlink()
    rest = " ".join(f"{libc}/{name}" for name in ("libpthread.so.0", "libdl.so.2", "libld.so.2"))
    (libc / "libc.so").write_text(f"GROUP ( {libc}/libc.so.6 {nonshared} AS_NEEDED ( {rest} ) )\n")
    code = work / "torch.c"
    code.write_text("".join(f"void {name}(void) {{}}\n" for name in SYMBOLS))
    run(cxx, "-x", "c", "-shared", "-fPIC", "-nostdlib", "-w", "-Wl,-soname,libtorch_cpu.so", code, "-o", torch / "lib/libtorch_cpu.so")
    (torch / "include").symlink_to(headers())
    return libc, torch


def headers() -> Path:
    """torch's include folder, of any version from 2.10 on."""
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    return Path(run(sys.executable, "-c", code).strip()) / "include"


def wheel(arch: str) -> Path:
    """One repaired manylinux wheel in dist/."""
    cxx = compiler(arch)
    libc, torch = stubs(arch, cxx)
    extra = WORK / arch / "portable.o"
    run(cxx, "-O2", "-fPIC", "-c", HERE / "portable.cpp", "-o", extra)
    env = {
        "CC": cxx.replace("g++", "gcc"),
        "CXX": cxx,
        "CXXFLAGS": "-D_GLIBCXX_EXTERN_TEMPLATE=0",  # string streams: the shared library's are newer than manylinux_2_28's
        "LDFLAGS": f"{extra} -L{libc} -Wl,--no-undefined,--allow-shlib-undefined,-s",
        "EXL2NB_TORCH_DIR": str(torch),
        "EXL2NB_CUDA": "off",
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
    }
    raw = WORK / arch / "raw"
    settings = [f"--config-setting=build-dir={WORK / arch / 'cmake'}"]
    # CMake's own check of the compiler would link a program, which the stubs are not made for.
    settings.append("--config-setting=cmake.define.CMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY")
    if arch != platform.machine():
        settings += [f"--config-setting=cmake.define.{d}" for d in ("CMAKE_SYSTEM_NAME=Linux", f"CMAKE_SYSTEM_PROCESSOR={arch}")]
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", raw, *settings, env=env)
    built = next(raw.glob("*.whl"))
    platform_tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{arch}"
    named = built.with_name(re.sub(r"linux_\w+\.whl$", f"linux_{arch}.whl", built.name))
    if named != built:
        built.rename(named)
    for old in DIST.glob(f"exl2nb-*_{arch}.whl"):
        old.unlink()
    exclude = ["--exclude", "libtorch_cpu.so", "--exclude", "libtorch.so", "--exclude", "libc10.so"]
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", platform_tag, "--only-plat", *exclude, "-w", DIST, named)
    return next(DIST.glob(f"exl2nb-{version()}-*_{arch}.whl"))


def sdist() -> Path:
    """dist/exl2nb-VERSION.tar.gz, which needs g++ >= 11 and an installed torch where it is installed."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST)
    return DIST / f"exl2nb-{version()}.tar.gz"


def newest(text: str, name: str) -> tuple[int, ...]:
    """The newest version of `name` that readelf lists as needed."""
    found = [tuple(int(n) for n in v.split(".")) for v in re.findall(rf"Name: {name}_([\d.]+)\b", text)]
    return max(found, default=(0,))


def check_symbols(path: Path) -> str:
    """What the libraries of a wheel need, as one line.

    Raises:
        Failed: a library needs another machine, a newer glibc or libstdc++, Python, a torch symbol younger than 2.10, or has a run path.
    """
    arch = path.name.rsplit("manylinux_2_28_", 1)[-1].removesuffix(".whl")
    folder = WORK / "look"
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if ".so" in Path(name).name]
        archive.extractall(folder, names)
    said = []
    for name in names:
        library = folder / name
        head, dynamic, needs = (run("readelf", f"-{flag}W", library) for flag in ("h", "d", "V"))
        symbols = re.findall(r"UND (\S+)", run("readelf", "--dyn-syms", "-W", library))
        foreign = sorted({s for s in symbols if re.match(r"(aoti_)?torch_|_ZN?K?(2at|3c10|5torch)|Py|_Py", s)} - set(SYMBOLS))
        needed = set(re.findall(r"NEEDED.*\[(\S+)\]", dynamic))
        allowed = {"libtorch_cpu.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2", "libpthread.so.0", LOADER[arch]}
        glibc, glibcxx = newest(needs, "GLIBC"), newest(needs, "GLIBCXX")
        faults = {
            f"is not for {arch}": MACHINE[arch] not in head,
            f"needs symbols outside of torch 2.10's stable ABI: {foreign}": bool(foreign),
            f"needs {sorted(needed - allowed)}": not needed <= allowed,
            f"needs GLIBC {glibc}": glibc > GLIBC,
            f"needs GLIBCXX {glibcxx}": glibcxx > GLIBCXX,
            "has a run path": "RPATH" in dynamic or "RUNPATH" in dynamic,
        }
        wrong = [fault for fault, found in faults.items() if found]
        if wrong:
            raise Failed(f"{path.name}: {name} " + "; ".join(wrong))
        said.append(f"{Path(name).name}: glibc {'.'.join(map(str, glibc))}, GLIBCXX {'.'.join(map(str, glibcxx))}, {len(set(symbols))} symbols")
    return "; ".join(said)


def check() -> None:
    """Contents, size, metadata and symbols of everything in dist/."""
    wheels = sorted(DIST.glob(f"exl2nb-{version()}-*.whl"))
    source = DIST / f"exl2nb-{version()}.tar.gz"
    if not wheels or not source.exists():
        raise Failed(f"{DIST} lacks a wheel or {source.name}; run the steps sdist and wheels")
    for path in wheels:
        print("  " + run(sys.executable, ROOT / ".ci/check_wheel.py", path).strip())
        if path.stat().st_size > MOST_BYTES:
            raise Failed(f"{path.name} has {path.stat().st_size / 1e6:.1f} MB; at most {MOST_BYTES / 1e6:.0f} are allowed")
        print("  " + check_symbols(path))
        found = run(sys.executable, "-m", "auditwheel", "show", path)
        if "manylinux_2_28" not in found:
            raise Failed(f"auditwheel show {path.name}:\n{found}")
    run(sys.executable, "-m", "twine", "check", "--strict", *wheels, source)
    print("  auditwheel and twine: no complaints")


def imports(torches: list[str]) -> None:
    """The wheel of this machine in a fresh environment per version of torch: .ci/smoke.py."""
    path = next(DIST.glob(f"exl2nb-{version()}-*_{platform.machine()}.whl"))
    for torch in torches:
        venv = WORK / f"venv-{torch}"
        if not venv.exists():
            run(sys.executable, "-m", "venv", venv)
        pip = [venv / "bin/python", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        try:
            run(*pip, f"torch=={torch}", "--extra-index-url", "https://download.pytorch.org/whl/cpu", "numpy")
        except Failed as error:
            print(f"  torch {torch}: cannot be installed here ({str(error).strip().splitlines()[-1][:120]})")
            continue
        run(*pip, path)
        began = time.perf_counter()
        said = run(venv / "bin/python", "-I", ROOT / ".ci/smoke.py", cwd=WORK)
        print(f"  torch {torch}: {said.splitlines()[1][:60]}... in {time.perf_counter() - began:.1f} s")


def notes() -> None:
    """dist/SHA256SUMS and dist/NOTES.md, the section of this version in CHANGELOG.md."""
    text = (ROOT / "CHANGELOG.md").read_text()
    match = re.search(rf"^## {re.escape(version())}\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if match is None:
        raise Failed(f"CHANGELOG.md has no heading for {version()}")
    (DIST / "NOTES.md").write_text(match[1].strip() + "\n")
    files = sorted([*DIST.glob(f"exl2nb-{version()}-*.whl"), *DIST.glob(f"exl2nb-{version()}.tar.gz")])
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print("  " + "\n  ".join(f"{path.stat().st_size / 1e6:5.1f} MB  {path.name}" for path in files))


def main() -> int:
    """See the module."""
    steps = ("sdist", "wheels", "check", "imports", "notes")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", help=f"of {', '.join(steps)}; none means all")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="which wheels (default: both)")
    parser.add_argument("--torch", action="append", help=f"versions for `imports` (default: {' '.join(TORCHES)})")
    args = parser.parse_args()
    if unknown := set(args.steps) - set(steps):
        parser.error(f"unknown step {sorted(unknown)}; known: {', '.join(steps)}")
    DIST.mkdir(exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
    try:
        for step in args.steps or steps:
            began = time.perf_counter()
            print(f"release: {step}", flush=True)
            match step:
                case "sdist":
                    sdist()
                case "wheels":
                    for arch in args.arch or ARCHS:
                        wheel(arch)
                case "check":
                    check()
                case "imports":
                    imports(args.torch or list(TORCHES))
                case _:
                    notes()
            print(f"release: {step} took {time.perf_counter() - began:.0f} s", flush=True)
    except Failed as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
