"""`exl2nb doctor`: is everything here that exl2nb needs, and if not, what to do."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import exl2nb
from exl2nb.cli.console import Console
from exl2nb.cli.models import demo_directory
from exl2nb.core import env

DEMO_SHA256 = {
    "model-00001-of-00002.safetensors": "7364748998fe0f8b8a4974c81e132078ec8eeef1d82efc395f0d2a1e9f60aeb2",
    "model-00002-of-00002.safetensors": "0dd00c1a2c413a61f931c196f402d7561276f747302b330d520c5ac1c7696a6d",
    "tokenizer.json": "72c58040c0eaccff29876007e396407762599af4ee9257888cbad754fb8d7793",
}
REQUIRED_PACKAGES = ("numpy", "safetensors", "tokenizers", "jinja2", "pandas", "huggingface_hub")
MIN_JUPYTER_VERSIONS = {"jupyterlab": "3.6", "ipykernel": "6", "ipywidgets": "7.6", "anywidget": "0.9.13", "traitlets": "5.7"}
STATE_SYMBOLS = {"ok": "ok", "note": "--", "warning": "!!", "problem": "XX"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding.

    state: "ok", "note" (nothing is wrong), "warning" (works, could be better) or "problem". todo: what to do, empty when ok.
    """

    name: str
    state: str
    found: str
    todo: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Print all checks; exit code 1 when one is a problem."""
    checks = diagnose()
    bad = [check for check in checks if check.state == "problem"]
    label = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{STATE_SYMBOLS[check.state]}  {check.name.ljust(label)}  {check.found}")
        if check.todo:
            lines.append(f"    {' ' * label}  -> {check.todo}")
    lines.append("")
    lines.append("everything needed is here" if not bad else f"{len(bad)} problem{'s' * (len(bad) > 1)}: {', '.join(c.name for c in bad)}")
    console.result({"ok": not bad, "checks": [asdict(check) for check in checks]}, "\n".join(lines))
    return 1 if bad else 0


def diagnose(*names: str) -> list[Finding]:
    """Run checks; a check that fails unexpectedly becomes a problem of its own.

    Args:
        names: of the checks to run, such as "kernels"; all by default.
    """
    steps: list[Callable[[], list[Finding]]] = [
        _python,
        _packages,
        _torch,
        _library,
        _cuda,
        _links,
        _kernels,
        _flash_attention,
        _cpu,
        _memory,
        _environment,
        _jupyter,
        _demo_model,
    ]
    checks: list[Finding] = []
    for step in steps:
        name = step.__name__.lstrip("_")
        if names and name not in names:
            continue
        try:
            checks += step()
        except Exception as error:  # the doctor must finish whatever the patient has
            checks.append(Finding(name=name, state="problem", found=f"{type(error).__name__}: {error}", todo="report this as a bug"))
    return checks


def _python() -> list[Finding]:
    found = f"{platform.python_version()} ({sys.executable})"
    ok = sys.version_info >= (3, 10)
    return [
        Finding(name="exl2nb", state="ok", found=f"{exl2nb.__version__} ({Path(exl2nb.__file__).parent})"),
        Finding(name="python", state="ok" if ok else "problem", found=found, todo="" if ok else "use Python 3.10 or newer"),
    ]


def _packages() -> list[Finding]:
    missing = [name for name in REQUIRED_PACKAGES if _version(name) is None]
    found = ", ".join(f"{name} {_version(name)}" for name in REQUIRED_PACKAGES if name not in missing)
    if set(missing) - {"huggingface_hub"}:
        return [Finding(name="packages", state="problem", found=f"missing: {', '.join(missing)}", todo=f"pip install {' '.join(missing)}")]
    todo = "pip install huggingface_hub, to load models by hub id" if missing else ""
    return [Finding(name="packages", state="note" if missing else "ok", found=found, todo=todo)]


def _torch() -> list[Finding]:
    version = _version("torch")
    if version is None:
        return [Finding(name="torch", state="problem", found="not installed", todo="pip install 'torch>=2.10'")]
    ok = is_at_least(version, "2.10")
    return [Finding(name="torch", state="ok" if ok else "problem", found=version, todo="" if ok else "pip install 'torch>=2.10'")]


def _library() -> list[Finding]:
    from exl2nb.ops import _load

    try:
        found = _load.load_libraries()
    except OSError as error:
        todo = "rebuild: pip install --no-build-isolation --force-reinstall --no-deps exl2nb (or `make build`)"
        return [Finding(name="engine", state="problem", found=f"the compiled library does not load: {str(error)[:200]}", todo=todo)]
    if "cpu" not in found.loaded:
        state = "warning" if found.cpu is not None else "problem"
        return [Finding(name="engine", state=state, found="slow torch reference ops", todo=found.note or "run `make build`")]
    if found.isa == "base":
        todo = f"unset EXL2NB_ISA={os.environ['EXL2NB_ISA']}" if os.environ.get("EXL2NB_ISA") else "this CPU has no AVX2: expect low speed"
        return [Finding(name="engine", state="warning", found=f"compiled, instruction set {found.isa}", todo=todo)]
    return [Finding(name="engine", state="ok", found=f"compiled, instruction set {found.isa} ({found.cpu})")]


def _cuda() -> list[Finding]:
    import torch

    from exl2nb.ops import _load

    libraries, driver = _load.load_libraries(), _load.driver_cuda_version()
    supports = "none" if driver is None else f"for CUDA {driver[0]}.{driver[1]}" if driver > (0, 0) else "installed, but it does not answer"
    parts = [
        f"driver {supports}",
        f"torch {'with CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'}",
    ]
    found, problem = ", ".join(parts), libraries.cuda_obstacle
    if problem is None:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return [Finding(name="cuda", state="ok", found=f"{found}; {', '.join(names)}")]
    if problem.gpu:
        return [Finding(name="cuda", state="warning", found=f"{found}; {problem.found}; the CPU engine is used", todo=problem.todo)]
    return [Finding(name="cuda", state="note", found=f"{found}; no NVIDIA GPU is here, the CPU engine is used")]


def _links() -> list[Finding]:
    """Which GPUs reach each other's memory; nothing for fewer than two."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return []
    apart = [(a, b) for a in range(count) for b in range(a + 1, count) if not torch.cuda.can_device_access_peer(a, b)]
    if not apart:
        return [Finding(name="links", state="ok", found=f"all {count} GPUs reach each other's memory")]
    pairs = ", ".join(f"{a} and {b}" for a, b in apart)
    return [Finding(name="links", state="note", found=f"without a direct link: GPUs {pairs}; what layers hand on goes through host memory")]


def _kernels() -> list[Finding]:
    """The compiler of the CUDA kernels and its cache; a note where there is no GPU to compile for."""
    from exl2nb.ops import _load, kernel_code

    gpu = _load.load_libraries().cuda_obstacle is None or _load.has_nvidia_gpu()
    folder = kernel_code.cache_folder()
    if folder is None:
        kept = "compiled kernels are not kept (EXL2NB_KERNEL_CACHE=off)"
    else:
        files = list(folder.glob("*.cubin"))
        kept = f"{len(files)} compiled kernels in {folder} ({sum(file.stat().st_size for file in files) / 2**20:.1f} MiB)"
    if ready := kernel_code.ready_architectures():
        kept = f"ready-made code for compute capability {', '.join(ready)}; {kept}"
    try:
        compiler = kernel_code.nvrtc()
    except kernel_code.NoCompiler as reason:
        todo = "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime" if gpu else ""
        return [Finding(name="kernels", state="problem" if gpu else "note", found=f"{reason}; {kept}", todo=todo)]
    found = f"NVRTC {'.'.join(map(str, compiler.version))}, headers in {compiler.include}"
    reason = folder and why_not_writable(folder)
    if reason:
        todo = "make room, or set EXL2NB_KERNEL_CACHE to a folder of yours; until then every process compiles again"
        return [Finding(name="kernels", state="warning", found=f"{found}; {folder} cannot be written: {reason}", todo=todo)]
    return [Finding(name="kernels", state="ok" if gpu else "note", found=f"{found}; {kept}")]


def why_not_writable(folder: Path) -> str:
    """Why a file of a kernel's size cannot be made in a folder that exists or could be made; empty where it can."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(256 << 10))
            file.flush()
    except OSError as reason:
        return reason.strerror or str(reason)
    return ""


def _flash_attention() -> list[Finding]:
    from exl2nb.ops.prefill_attention import flash_attention

    found = flash_attention()
    if found.call is not None:
        where = ", whole ones of 512, 1024, ... tokens torch's attention, which is quicker on this GPU" if found.hopper else ""
        return [
            Finding(
                name="flash-attn", state="ok", found=f"{_version('flash-attn') or 'of unknown version'}: prompts on the GPU use it{where}"
            )
        ]
    pays = "it would pay for long prompts of models with sliding windows or capped scores (Mistral, Gemma)"
    return [
        Finding(name="flash-attn", state="note", found=f"{found.why}; prompts on a GPU use torch's attention, nothing is missing; {pays}")
    ]


def _cpu() -> list[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    found = f"{cpu_name()}, {cores} cores usable, {threads} threads in torch"
    if threads > cores:
        return [Finding(name="cpu", state="warning", found=found, todo=f"more threads than cores is slow: set OMP_NUM_THREADS={cores}")]
    if threads < max(1, cores // 2):
        return [Finding(name="cpu", state="note", found=found, todo=f"for more speed, set OMP_NUM_THREADS={cores}")]
    return [Finding(name="cpu", state="ok", found=found)]


def _memory() -> list[Finding]:
    values = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    except OSError:
        return [Finding(name="memory", state="note", found="unknown on this system")]
    free, total = values.get("MemAvailable", 0), values.get("MemTotal", 0)
    disk = shutil.disk_usage(os.getcwd()).free
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free; disk here {disk / 2**30:.1f} GiB free"
    low = free < 2**30 or disk < 2**30
    todo = "less than 1 GiB is free: close other programs or clear the disk" if low else ""
    return [Finding(name="memory", state="warning" if low else "ok", found=found, todo=todo)]


def _environment() -> list[Finding]:
    from exl2nb.core.errors import OptionError

    given, checks = [], []
    for name, (allowed, _) in env.ENV_VARIABLES.items():
        if not os.environ.get(name):
            continue
        given.append(f"{name}={os.environ[name]}")
        try:
            env.get(name, allowed[0])
        except OptionError as error:
            checks.append(Finding(name="environment", state="problem", found=str(error), todo=f"unset {name}"))
    return checks or [Finding(name="environment", state="ok", found=", ".join(given) or "no EXL2NB_ variable is set")]


def _jupyter() -> list[Finding]:
    versions = {name: _version(name) for name in MIN_JUPYTER_VERSIONS}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "not installed"
    absent = [name for name, version in versions.items() if version is None]
    old = [
        f"{name}>={low}"
        for name, low in MIN_JUPYTER_VERSIONS.items()
        if (version := versions[name]) is not None and not is_at_least(version, low)
    ]
    if old:
        return [Finding(name="jupyter", state="warning", found=found, todo=f"pip install -U {' '.join(repr(word) for word in old)}")]
    if absent:
        todo = f"for the notebooks: make lab, or pip install {' '.join(absent)}"
        return [Finding(name="jupyter", state="note", found=found, todo=todo)]
    return [Finding(name="jupyter", state="ok", found=found)]


def _demo_model() -> list[Finding]:
    directory = demo_directory()
    for name, expected in DEMO_SHA256.items():
        path = directory / name
        if not path.is_file():
            return [Finding(name="demo model", state="problem", found=f"{path} is missing", todo="reinstall exl2nb")]
        actual = hashlib.sha256(path.read_bytes()).hexdigest()
        if actual != expected:
            found = f"{path}: sha256 {actual[:12]}..., expected {expected[:12]}..."
            return [
                Finding(name="demo model", state="problem", found=found, todo="reinstall exl2nb (git lfs or a download may have cut it)")
            ]
    return [Finding(name="demo model", state="ok", found=f"whole ({directory})")]


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.lower().startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_at_least(version: str, low: str) -> bool:
    """Compare the leading numbers of two versions."""

    def numbers(text: str) -> list[int]:
        leading = []
        for part in text.split("+")[0].split("."):
            digits = "".join(c for c in part if c.isdigit())
            if not digits:
                break
            leading.append(int(digits))
        return leading

    return numbers(version) >= numbers(low)
