"""Look into built wheels: what must be inside, what must not, the size, and what their libraries need from the system.

    python .ci/check_wheel.py dist/*.whl

A wheel with a manylinux tag must keep its promise: no newer glibc, no C++ library of its own version, nothing of torch that is not in 2.10.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIRED = [
    "exl2nb/__init__.py",
    "exl2nb/py.typed",
    "exl2nb/libexl2nb_cpu.so",
    "exl2nb/libexl2nb_cuda.so",
    "exl2nb/csrc/cuda/gemm/skinny/skinny_gemm.cuh",
    "exl2nb/csrc/cuda/attention/decode.cuh",
    "exl2nb/csrc/cuda/nvrtc/cstdint",
    "exl2nb/csrc/format/gpu_blob.h",
    "exl2nb/static/playground.js",
    "exl2nb/static/plan.js",
    "exl2nb/notebooks/01_quickstart.ipynb",
    "exl2nb/notebooks/03_where_bits_go.ipynb",
    "exl2nb/demo_model/config.json",
    "exl2nb/demo_model/tokenizer.json",
    "exl2nb/demo_model/README.md",
    "exl2nb/calibration_text/mixed.jsonl.xz",
    "exl2nb/calibration_text/README.md",
    "exl2nb/quant/FORMAT.md",
]
MOST_BYTES = 40_000_000
TORCH_SYMBOLS = set((Path(__file__).parents[1] / "tests/contracts/torch_2_10_symbols.txt").read_text().split())
MACHINES = {"x86_64": "X86-64", "aarch64": "AArch64"}
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def check_contents(path: Path) -> str:
    """Names, size and tag. Returns one line."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        ready = {name.split("/")[-2]: wheel.read(name).split(b"\n")[0].decode() for name in names if name.endswith("/index.txt")}
        sources = digest({name: wheel.read(name) for name in names if name.startswith(("exl2nb/csrc/cuda/", "exl2nb/csrc/format/"))})
    stale = [name for name, made_from in ready.items() if made_from != sources]
    missing = [name for name in REQUIRED if name not in names]
    foreign = [name for name in names if not name.startswith("exl2nb") or "__pycache__" in name or name.startswith("exl2nb.libs")]
    weights = [name for name in names if name.startswith("exl2nb/demo_model/") and name.endswith(".safetensors")]
    size = path.stat().st_size
    assert path.name.split("-")[2] == "py3", f"{path}: expected a py3-none wheel, one for every Python"
    assert not missing, f"{path} lacks {missing}"
    assert not foreign, f"{path} holds {foreign}"
    assert not stale, f"{path}: the machine code of {stale} was made from other sources; run the step kernels again"
    assert weights, f"{path} lacks the demo model's weights"
    assert size <= MOST_BYTES, f"{path} has {size / 1e6:.1f} MB, at most {MOST_BYTES / 1e6:.0f} are allowed"
    return f"{path.name}: {len(names)} files, {size / 2**20:.1f} MiB, machine code for {', '.join(sorted(ready)) or 'no GPU'}"


def digest(sources: dict[str, bytes]) -> str:
    """`kernel_code.source_digest` of the sources in a wheel, by their names there."""
    total = hashlib.sha256()
    for folder in ("exl2nb/csrc/cuda/", "exl2nb/csrc/format/"):
        for name in sorted((name for name in sources if name.startswith(folder)), key=lambda name: Path(name).parts):
            total.update(name.removeprefix("exl2nb/csrc/").encode() + b"\0" + sources[name] + b"\0")
    return total.hexdigest()


def check_library(path: Path, arch: str, newest: tuple[int, int]) -> str:
    """What a library of a manylinux wheel needs. newest: of glibc. Returns one line."""
    head, dynamic, versions, symbols = (readelf(option, path) for option in ("-h", "-d", "-V", "--dyn-syms"))
    needed = set(re.findall(r"NEEDED.*\[(\S+)\]", dynamic))
    undefined = re.findall(r"UND (\w+)", symbols)
    exported = [
        name for name in re.findall(r"(?:FUNC|OBJECT|NOTYPE) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+ (\S+)", symbols) if "exl2nb_" not in name
    ]
    torch = {name for name in undefined if re.match(r"(aoti_)?torch_|_ZNK?(2at|3c10|5torch)", name)}
    glibc = max(tuple(map(int, version.split(".")[:2])) for version in re.findall(r"Name: GLIBC_([\d.]+)", versions))
    assert MACHINES[arch] in head, f"{path.name} is not for {arch}"
    assert torch, f"{path.name} registers ops, so it must need torch"
    assert torch <= TORCH_SYMBOLS, f"{path.name} needs what torch 2.10 lacks: {sorted(torch - TORCH_SYMBOLS)}"
    assert needed <= SYSTEM | {"libtorch_cpu.so"}, f"{path.name} needs {sorted(needed - SYSTEM)}"
    assert glibc <= newest, f"{path.name} needs glibc {glibc}, newer than {newest}"
    assert not re.search(r"Name: (GLIBCXX|CXXABI)_", versions), f"{path.name} needs a version of libstdc++"
    assert not [name for name in undefined if re.match(r"_?Py[A-Z_]", name)], f"{path.name} needs Python"
    assert not exported, f"{path.name} exports {exported}"
    assert not re.search("RPATH|RUNPATH", dynamic), f"{path.name} has a run path"
    assert b"/torch/include/" not in path.read_bytes(), f"{path.name} holds a path of the machine that built it"
    return f"  {path.name}: glibc {glibc[0]}.{glibc[1]}, {len(torch)} functions of torch, {', '.join(sorted(needed - {'libtorch_cpu.so'}))}"


def readelf(option: str, path: Path) -> str:
    """What binutils prints, whatever the machine of the file."""
    return subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True).stdout


for path in map(Path, sys.argv[1:]):
    print(check_contents(path))
    tag = re.search(r"manylinux_(\d+)_(\d+)_(\w+)\.whl$", path.name)
    if tag is None:
        continue
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        for name in [name for name in wheel.namelist() if name.endswith(".so")]:
            print(check_library(Path(wheel.extract(name, folder)), tag[3], (int(tag[1]), int(tag[2]))))
