"""Machine code of the CUDA kernels: compiled by NVRTC when a kernel is first needed, kept in a cache on disk.

NVRTC and the CUDA headers come with every torch that has CUDA, so one wheel serves every GPU and every CUDA version. The cache holds one
file per kernel, GPU architecture, NVRTC version and source text. Knows nothing about what kernels compute; csrc/cuda/runtime/kernel.h asks.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import logging
import lzma
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

from exl2nb.core import env
from exl2nb.core.errors import DeviceError

logger = logging.getLogger(__name__)

NVRTC_OPTIONS = ("-std=c++17", "-default-device", "-DNDEBUG")
"""For every kernel. -default-device: functions without an execution space, such as constexpr helpers, are the device's."""


def more_options() -> list[str]:
    """Of $EXL2NB_KERNEL_OPTIONS, for tools such as compute-sanitizer."""
    return env.get("EXL2NB_KERNEL_OPTIONS", "").split()


_ELF_MAGIC = b"\x7fELF"


class NoCompiler(DeviceError):
    """NVRTC or its headers are missing, or it refused a kernel. The message says which and what to install."""


@dataclasses.dataclass(frozen=True)
class KernelId:
    """A kernel: its file below csrc/cuda, and its name with template arguments."""

    source: str
    name: str

    @property
    def unit(self) -> KernelId:
        """What is compiled at once: a template's instance, or all plain kernels of a file."""
        return self if "<" in self.name else KernelId(self.source, "")

    def arch(self, major: int, minor: int) -> str:
        """The architecture to compile for: wgmma exists for sm_90a alone, which runs on nothing newer."""
        return f"{major}{minor}a" if self.source.endswith("_wgmma.cu") else f"{major}{minor}"


# ---- Sources


@cache
def source_root() -> Path:
    """The folder that holds `cuda/` and `format/`: in the package where it is installed, in the repository for an editable install.

    Raises:
        NoCompiler: neither has them.
    """
    import exl2nb

    places = [Path(root) / "csrc" for root in exl2nb.__path__] + [Path(root).parent / "csrc" for root in exl2nb.__path__]
    found = next((place for place in places if (place / "cuda" / "runtime" / "kernel.h").exists()), None)
    if found is None:
        raise NoCompiler(f"the kernels' sources are missing: looked in {', '.join(map(str, places))}; install exl2nb again")
    return found


@cache
def source_digest() -> str:
    """sha256 over every file a kernel may include."""
    total = hashlib.sha256()
    for folder in ("cuda", "format"):
        for path in sorted((source_root() / folder).rglob("*")):
            if path.is_file() and path.suffix in ("", ".cu", ".cuh", ".h", ".inc"):
                total.update(path.relative_to(source_root()).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


# ---- NVRTC


def nvidia_folders(kind: str) -> list[Path]:
    """Folders `kind` ("lib" or "include") of NVIDIA's wheels installed with torch, newest CUDA first, then of a toolkit."""
    found: list[Path] = []
    for root in filter(None, sys.path):  # "" is the current folder, which may be a stranger's
        found += sorted(Path(root).resolve().glob(f"nvidia/*/{kind}"), reverse=True)
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), os.environ.get("CONDA_PREFIX", ""), "/usr/local/cuda"]
    for home in filter(None, homes):
        found += [Path(home) / kind, Path(home) / f"{kind}64", Path(home) / "targets" / "x86_64-linux" / kind]
    return [folder for folder in found if folder.is_dir()]


def nvrtc_candidates() -> list[str]:
    """Return paths and names under which NVRTC may be found, in the order in which they are tried."""
    files = [path for folder in nvidia_folders("lib") for path in sorted(folder.glob("libnvrtc.so.*")) if ".alt" not in path.name]
    return [str(path) for path in files] + ["libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]


class Nvrtc:
    """NVIDIA's run-time compiler. Calls release Python's lock, so several kernels compile at once.

    Raises:
        NoCompiler: no library, or no header `cuda_fp16.h`, is found.
    """

    def __init__(self) -> None:
        tried = []
        for name in nvrtc_candidates():
            try:
                folder = Path(name).parent
                for helper in folder.glob("libnvrtc-builtins.so*") if folder.is_absolute() else ():
                    ctypes.CDLL(str(helper), mode=ctypes.RTLD_GLOBAL)
                self._library = ctypes.CDLL(name)
                self.path = name
                break
            except OSError as reason:
                tried.append(str(reason))
        else:
            raise NoCompiler(f"NVRTC was not found ({tried[0]}); it comes with torch's CUDA build, or: pip install nvidia-cuda-nvrtc")
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = (major.value, minor.value)
        headers = [folder for folder in nvidia_folders("include") if (folder / "cuda_fp16.h").exists()]
        here = [folder for folder in headers if _is_same_cuda(folder, self.path)]
        if not headers:
            raise NoCompiler("cuda_fp16.h was not found; it comes with torch's CUDA build, or: pip install nvidia-cuda-runtime")
        self.include = (here or headers)[0]

    def _check(self, error: int, what: str) -> None:
        if error:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise NoCompiler(f"{what} of {self.path}: {self._library.nvrtcGetErrorString(error).decode()}")

    def _architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        found = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(found), "nvrtcGetSupportedArchs")
        return list(found)

    def target(self, arch: str) -> str:
        """What to compile for: machine code of `arch`; PTX of the newest older one, which the driver translates, where NVRTC is older."""
        known, number = self._architectures(), int(arch.rstrip("a"))
        if number in known:
            return f"sm_{arch}"
        older = [one for one in known if one <= number]
        if not older:
            raise NoCompiler(f"NVRTC {'.'.join(map(str, self.version))} knows no GPU of compute capability {number / 10}")
        return f"compute_{max(older)}"

    def compile(self, kernel: KernelId, arch: str) -> bytes:
        """Machine code (ELF) of one kernel, or PTX as text ending in a zero byte. Deterministic."""
        target = self.target(arch)
        program = ctypes.c_void_p()
        text = f'#include "cuda/{kernel.source}"\n'.encode()
        self._check(self._library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None), "nvrtcCreateProgram")
        try:
            if "<" in kernel.name:
                self._check(self._library.nvrtcAddNameExpression(program, f"exl2nb::{kernel.name}".encode()), "nvrtcAddNameExpression")
            folders = (source_root(), source_root() / "cuda" / "nvrtc", self.include)
            options = [f"--gpu-architecture={target}", *NVRTC_OPTIONS, *more_options(), *(f"-I{folder}" for folder in folders)]
            array = (ctypes.c_char_p * len(options))(*map(str.encode, options))
            if self._library.nvrtcCompileProgram(program, len(options), array):
                said = self._read(program, "ProgramLog").decode(errors="replace").rstrip("\0")
                raise NoCompiler(f"kernel {kernel.name} of {kernel.source} does not compile for {target}: {said[:2000]}")
            return self._read(program, "CUBIN" if target.startswith("sm_") else "PTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
        data = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, data), f"nvrtcGet{what}")
        return data.raw


def _is_same_cuda(folder: Path, library: str) -> bool:
    """Whether headers and library are of one CUDA: of one wheel folder (nvidia/cu13), or both of the wheels for CUDA 12."""
    one, other = folder.parent, Path(library).parent.parent
    return one == other or (one.parent == other.parent and not {one.name, other.name} & {"cu13", "cu14"})


@cache
def nvrtc() -> Nvrtc:
    """The compiler of this process. Raises NoCompiler where there is none."""
    return Nvrtc()


# ---- Symbols


def kernel_symbol(code: bytes, name: str) -> str:
    """Symbol of kernel `name` in machine code or PTX: of a template the only kernel there, else the one whose mangled name is `name`'s.

    Raises:
        NoCompiler: it is not there.
    """
    plain = name.split("<", 1)[0]
    mangled = f"6exl2nb{len(plain)}{plain}"
    found = [entry for entry in (_cubin_kernels(code) if code.startswith(_ELF_MAGIC) else _ptx_entries(code)) if mangled in entry]
    if len(found) != 1:
        raise NoCompiler(f"the machine code holds {len(found)} kernels {name}; expected 1")
    return found[0]


def _cubin_kernels(elf: bytes) -> list[str]:
    """Kernels of a cubin: the names of its sections `.text.<symbol>`."""
    sections, size, count, names = struct.unpack_from("<Q10xHHH", elf, 40)
    headers = [struct.unpack_from("<IIQQQQ", elf, sections + index * size) for index in range(count)]
    start, length = headers[names][4:6]
    table = elf[start : start + length]
    texts = [table[header[0] : table.index(b"\0", header[0])].decode() for header in headers]
    return [text[6:] for text in texts if text.startswith(".text.")]


def _ptx_entries(ptx: bytes) -> list[str]:
    return [line.split(".entry ", 1)[1].split("(")[0].strip() for line in ptx.decode(errors="replace").splitlines() if ".entry " in line]


# ---- The cache


def cache_folder() -> Path | None:
    """Where machine code is kept: $EXL2NB_KERNEL_CACHE, else the user's cache folder; None where that is "off"."""
    chosen = env.get("EXL2NB_KERNEL_CACHE", "")
    if chosen == "off":
        return None
    home = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else os.environ.get("XDG_CACHE_HOME")
    return Path(chosen) if chosen else Path(home or Path.home() / ".cache") / "exl2nb" / "kernels"


def _cache_key(kernel: KernelId, arch: str, version: tuple[int, int]) -> str:
    parts = (source_digest(), *dataclasses.astuple(kernel), arch, repr(version), repr((*NVRTC_OPTIONS, *more_options())))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_cached(path: Path) -> bytes | None:
    """The code of a cache file: its sha256, then itself. None where it is missing, damaged or half written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def _save_code(path: Path, code: bytes) -> None:
    """Write aside, then rename: another process sees the whole file or none. A cache that cannot be written costs time, not the model."""
    aside = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as reason:
        logger.warning("compiled kernels are not kept, so the next process compiles them again: %s", reason)
        if aside:
            Path(aside).unlink(missing_ok=True)


compiled_codes: dict[tuple[KernelId, str], bytes] = {}  # by kernel and architecture; kept alive, the driver reads them
_locks: dict[tuple[KernelId, str], threading.Lock] = {}
_guard = threading.Lock()


def kernel_code_of(kernel: KernelId, major: int, minor: int) -> bytes:
    """Machine code of a kernel for a GPU: from this process, the cache on disk, or the compiler.

    Raises:
        NoCompiler: it is in no cache, and cannot be compiled.
    """
    arch = kernel.arch(major, minor)
    key = kernel.unit, arch
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in compiled_codes:
            compiled_codes[key] = _cached_code(*key)
        return compiled_codes[key]


@dataclasses.dataclass(frozen=True)
class _Ready:
    """Where the package has a program's code: `size` bytes from `start` on of a file, which is packed by xz if its name says so."""

    path: Path
    checksum: str
    start: int
    size: int

    def read(self) -> bytes:
        """The code, as it is there.

        Raises:
            OSError, EOFError, lzma.LZMAError: it cannot be read.
        """
        text = unpacked_code(self.path) if self.path.suffix == ".xz" else self.path.read_bytes()
        return text[self.start : self.start + self.size]


@lru_cache(maxsize=4)  # programs of one source are packed together and asked for one after the other
def unpacked_code(path: Path) -> bytes:
    """Return the contents of a compressed file of ready-made code."""
    return lzma.decompress(path.read_bytes())


@cache
def ready_made() -> dict[tuple[KernelId, int, int], _Ready]:
    """Code that ships in the package, by program and compute capability, made by `tools/compile_kernels.py`. Only what was made from these
    sources and by a CUDA that the driver knows. An index that cannot be read counts as none.
    """
    found: dict[tuple[KernelId, int, int], _Ready] = {}
    for index in sorted(source_root().glob("ready/sm_*/index.txt")):
        try:
            digest, version, *rows = index.read_text().splitlines()
            if digest != source_digest() or more_options() or driver_version() < tuple(map(int, version.split("."))):
                continue
            major, minor = divmod(int(index.parent.name.removeprefix("sm_")), 10)
            for source, name, _, file, checksum, start, size in (row.split("\t") for row in rows):
                found[KernelId(source, name).unit, major, minor] = _Ready(index.parent / file, checksum, int(start), int(size))
        except (OSError, ValueError) as reason:
            logger.warning("%s is damaged, so kernels that are not in it are compiled: %s", index, reason)
    return found


def ready_architectures() -> list[str]:
    """Compute capabilities with code in the package that this process takes, such as ["8.0", "9.0"]."""
    return sorted({f"{major}.{minor}" for _, major, minor in ready_made()})


def _packaged_arch_for(unit: KernelId, arch: str) -> _Ready | None:
    """Machine code runs on its own architecture and on those of the same major number after it; sm_90a only on itself."""
    major, minor = int(arch.rstrip("a")[:-1]), int(arch.rstrip("a")[-1])
    found = (ready_made().get((unit, major, m)) for m in range(minor, -1, -1))
    return next((ready for ready in found if ready and ready.path.exists()), None)


def _packaged_code_for(unit: KernelId, arch: str) -> bytes | None:
    """None where the package has none, or it is damaged: the driver would crash on it or run something else."""
    if (ready := _packaged_arch_for(unit, arch)) is None:
        return None
    try:
        code = ready.read()
    except (OSError, EOFError, lzma.LZMAError) as reason:
        logger.warning("%s cannot be read, so its kernels are compiled: %s", ready.path, reason)
        return None
    if hashlib.sha256(code).hexdigest() == ready.checksum:
        return code
    logger.warning("%s is damaged, so its kernels are compiled", ready.path)
    return None


def _cached_code(kernel: KernelId, arch: str) -> bytes:
    if ready := _packaged_code_for(kernel, arch):
        return ready
    folder, compiler = cache_folder(), nvrtc()
    path = folder / f"{_cache_key(kernel, arch, compiler.version)}.cubin" if folder else None
    code = read_cached(path) if path else None
    if code is None:
        code = compiler.compile(kernel, arch)
        if path:
            _save_code(path, code)
    return code


def missing_kernels(kernels: Iterable[KernelId], major: int, minor: int) -> list[KernelId]:
    """What must be compiled for these kernels: in no memory and in no cache on disk."""
    units, folder = dict.fromkeys(kernel.unit for kernel in kernels), cache_folder()
    units = [unit for unit in units if not _packaged_arch_for(unit, unit.arch(major, minor))]
    version = nvrtc().version if units else (0, 0)
    paths = {unit: folder and folder / f"{_cache_key(unit, unit.arch(major, minor), version)}.cubin" for unit in units}
    return [unit for unit, path in paths.items() if (unit, unit.arch(major, minor)) not in compiled_codes and not (path and path.exists())]


def compile_kernels(units: Sequence[KernelId], major: int, minor: int, *, progress: Callable[[], None] = lambda: None) -> None:
    """Compile beforehand, as many at a time as this process has cores. progress: called after each.

    Raises:
        NoCompiler: one of them cannot be compiled.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(max_workers=min(cores, len(units)), thread_name_prefix="exl2nb-nvrtc") as pool:
        for _ in pool.map(lambda unit: kernel_code_of(unit, major, minor), units):
            progress()


# ---- Callbacks of the compiled library

_texts: dict[str, ctypes.Array[ctypes.c_char]] = {}  # symbols and messages that C++ holds pointers to


def _c_string_address(text: str) -> int:
    kept = _texts.setdefault(text, ctypes.create_string_buffer(text.encode()))
    return ctypes.addressof(kept)


_Pointers = ctypes.POINTER(ctypes.c_void_p)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, _Pointers, _Pointers)
def compiler_answer(source: bytes, name: bytes, major: int, minor: int, code: ctypes.Array, text: ctypes.Array) -> int:
    """KernelCode of csrc/cuda/runtime/kernel.h."""
    try:
        kernel = KernelId(source.decode(), name.decode())
        found = kernel_code_of(kernel, major, minor)
        text[0] = _c_string_address(kernel_symbol(found, kernel.name))
        code[0] = ctypes.cast(ctypes.c_char_p(found), ctypes.c_void_p).value
        return 0
    except BaseException as reason:  # an exception must not pass through C++
        text[0] = _c_string_address(f"{type(reason).__name__}: {reason}")
        return 1


_library: ctypes.CDLL | None = None


def connect_library(path: Path) -> None:
    """Register this module as the source of kernel code for the compiled library at `path`."""
    global _library
    _library = ctypes.CDLL(str(path))
    for function in (_library.exl2nb_kernel_problem, _library.exl2nb_all_kernels, _library.exl2nb_noted_launches):
        function.restype = ctypes.c_char_p
    _library.exl2nb_set_kernel_code(compiler_answer)
    ready_made.cache_clear()  # the driver's version is known now


def _kernel_ids(lines: bytes) -> list[KernelId]:
    return [KernelId(*line.split("\t")) for line in lines.decode().splitlines()]


def driver_version() -> tuple[int, int]:
    """The newest CUDA that the driver knows, such as (13, 0); (0, 0) without a driver."""
    number = _library.exl2nb_driver_version() if _library is not None else 0
    return number // 1000, number % 1000 // 10


def kernel_problem() -> str:
    """Why kernels cannot run on the current GPU; empty where they can."""
    assert _library is not None
    return (_library.exl2nb_kernel_problem() or b"").decode()


def every_kernel() -> list[KernelId]:
    """All kernels that the library may launch."""
    assert _library is not None
    return _kernel_ids(_library.exl2nb_all_kernels())


def kernels_of_run(run: Callable[[], object]) -> list[KernelId]:
    """The kernels that `run` would launch in this thread; nothing is launched."""
    assert _library is not None
    _library.exl2nb_note_launches()
    try:
        run()
    finally:
        lines = _library.exl2nb_noted_launches()
    return _kernel_ids(lines)
