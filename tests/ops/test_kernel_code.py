"""Compiled kernels: what is compiled at once, the cache on disk, and what is said where nothing can be compiled. A compiler is imitated."""

import hashlib
import lzma
import os
import re
import subprocess
import sys
import threading
import types

import pytest
import torch

from exl2nb.core.errors import DeviceError
from exl2nb.ops import _load, kernel_code
from exl2nb.ops.kernel_code import KernelId, NoCompiler

ROPE = KernelId("attention/generic.cu", "rope_append_rows")
GATHER = KernelId("attention/generic.cu", "gather_rows")
SKINNY = KernelId("gemm/skinny/skinny_gemm.cuh", "skinny_gemm<0, true>")


class Compiler:
    """Counts what it compiles; the code names the kernel, as PTX does."""

    def __init__(self, version=(13, 0)):
        self.version, self.compiled, self.include = version, [], "headers"

    def compile(self, kernel, arch):
        self.compiled.append((kernel, arch))
        return f".visible .entry _ZN6exl2nb16rope_append_rowsE(\n// {kernel} {arch}".encode()


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A process that has compiled nothing yet, with a cache of its own."""
    found = Compiler()
    monkeypatch.setenv("EXL2NB_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_code, "nvrtc", lambda: found)
    monkeypatch.setattr(kernel_code, "compiled_codes", {})
    return found


@pytest.fixture
def again(monkeypatch):
    """Forget what is in memory, as a new process would."""
    return lambda: monkeypatch.setattr(kernel_code, "compiled_codes", {})


def test_a_file_of_plain_kernels_is_one_program(compiler):
    assert kernel_code.kernel_code_of(ROPE, 9, 0) == kernel_code.kernel_code_of(GATHER, 9, 0)
    assert kernel_code.kernel_code_of(SKINNY, 9, 0) != kernel_code.kernel_code_of(SKINNY, 8, 6)
    assert compiler.compiled == [(KernelId(ROPE.source, ""), "90"), (SKINNY, "90"), (SKINNY, "86")]


def test_wgmma_is_compiled_for_hopper_alone():
    assert KernelId("gemm/stream_k/stream_k_wgmma.cu", "stream_k_wgmma<2>").arch(9, 0) == "90a"
    assert SKINNY.arch(9, 0) == "90"


def test_the_cache_serves_the_next_process(compiler, again):
    first = kernel_code.kernel_code_of(SKINNY, 9, 0)
    again()
    assert kernel_code.missing_kernels([SKINNY], 9, 0) == []
    assert kernel_code.kernel_code_of(SKINNY, 9, 0) == first
    assert len(compiler.compiled) == 1


def test_another_compiler_other_options_and_other_sources_have_files_of_their_own(compiler, again, monkeypatch):
    kernel_code.kernel_code_of(SKINNY, 9, 0)
    for change in (
        lambda: setattr(compiler, "version", (12, 8)),
        lambda: monkeypatch.setenv("EXL2NB_KERNEL_OPTIONS", "-lineinfo"),
        lambda: monkeypatch.setattr(kernel_code, "source_digest", lambda: "another version of exl2nb"),
    ):
        change()
        again()
        assert kernel_code.missing_kernels([SKINNY], 9, 0) == [SKINNY]
        kernel_code.kernel_code_of(SKINNY, 9, 0)
    assert len(list(kernel_code.cache_folder().glob("*.cubin"))) == 4


@pytest.mark.parametrize("damage", ["half", "flipped", "empty"])
def test_a_damaged_file_is_compiled_again(compiler, again, damage):
    good = kernel_code.kernel_code_of(SKINNY, 9, 0)
    (path,) = kernel_code.cache_folder().glob("*.cubin")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes({"half": path.read_bytes()[: len(data) // 2], "flipped": bytes(data), "empty": b""}[damage])
    again()
    assert kernel_code.kernel_code_of(SKINNY, 9, 0) == good
    assert len(compiler.compiled) == 2
    again()
    assert kernel_code.kernel_code_of(SKINNY, 9, 0) == good
    assert len(compiler.compiled) == 2


@pytest.mark.parametrize("place", ["a file in its place", "off"])
def test_without_a_cache_kernels_are_compiled_every_time(compiler, again, monkeypatch, tmp_path, place):
    said = []
    monkeypatch.setattr(kernel_code.logger, "warning", lambda text, *parts: said.append(text % parts))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXL2NB_KERNEL_CACHE", "off" if place == "off" else str(tmp_path / "file" / "cache"))
    for _ in range(2):
        kernel_code.kernel_code_of(SKINNY, 9, 0)
        again()
    assert len(compiler.compiled) == 2
    assert ["are not kept" in line for line in said] == ([] if place == "off" else [True, True])


def test_a_write_that_fails_leaves_no_file(compiler, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert kernel_code.kernel_code_of(SKINNY, 9, 0)
    assert list(kernel_code.cache_folder().iterdir()) == []


def test_threads_that_want_one_kernel_compile_it_once(compiler):
    threads = [threading.Thread(target=kernel_code.kernel_code_of, args=(SKINNY, 9, 0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiler.compiled) == 1


PROCESS = """
import sys, time
from pathlib import Path
from exl2nb.ops import kernel_code
from exl2nb.ops.kernel_code import KernelId

class Compiler:
    version, include = (13, 0), "headers"
    def compile(self, kernel, arch):
        Path(sys.argv[1], sys.argv[2]).touch()  # says that this process compiles, then waits until the other one does, too
        until = time.monotonic() + 60
        while not Path(sys.argv[1], sys.argv[3]).exists() and time.monotonic() < until:
            time.sleep(0.01)
        return b"code" * 50_000

kernel_code.nvrtc = Compiler
code = kernel_code.kernel_code_of(KernelId("gemm/skinny/skinny_gemm.cuh", "skinny_gemm<0, true>"), 9, 0)
print(len(code))
"""
"""A process with an imitated compiler. Arguments: folder, its name, the name it waits for."""


def start(tmp_path, *arguments):
    environment = {**os.environ, "EXL2NB_KERNEL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", PROCESS, str(tmp_path), *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_two_processes_that_compile_at_once_leave_one_whole_file(compiler, tmp_path):
    both = [start(tmp_path, "a", "b"), start(tmp_path, "b", "a")]
    said = [process.communicate(timeout=100) for process in both]
    assert said == [("200000\n", "")] * 2
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()
    (path,) = (tmp_path / "cache").iterdir()
    assert kernel_code.read_cached(path) == b"code" * 50_000
    assert kernel_code.kernel_code_of(SKINNY, 9, 0) == b"code" * 50_000
    assert compiler.compiled == []


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_FSIZE")
def test_a_full_disk_costs_the_cache_alone(compiler, tmp_path, monkeypatch, caplog):
    """The kernel is there, a warning is logged, and no part of a file stays."""
    import resource

    monkeypatch.setattr(compiler, "compile", lambda kernel, arch: b"code" * 50_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert len(kernel_code.kernel_code_of(SKINNY, 9, 0)) == 200_000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "compiled kernels are not kept" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_process_killed_while_it_writes_leaves_no_kernel(tmp_path, compiler):
    """What it wrote aside is not taken for a kernel."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tmpabcdef").write_bytes(b"half")
    assert kernel_code.missing_kernels([SKINNY], 9, 0) == [SKINNY]
    assert kernel_code.kernel_code_of(SKINNY, 9, 0)
    assert len(compiler.compiled) == 1


def test_prepare_tells_each_kernel_and_raises_what_fails(compiler, monkeypatch):
    told = []
    kernel_code.compile_kernels([SKINNY, ROPE.unit], 9, 0, progress=lambda: told.append(1))
    assert len(told) == 2

    def refuse(kernel, arch):
        raise NoCompiler("no")

    monkeypatch.setattr(compiler, "compile", refuse)
    with pytest.raises(DeviceError, match="no"):
        kernel_code.compile_kernels([SKINNY], 8, 0)


def test_the_library_gets_code_and_symbol_or_the_reason(compiler, monkeypatch):
    import ctypes

    code, text = ctypes.c_void_p(), ctypes.c_void_p()
    ask = lambda one: kernel_code.compiler_answer(one.source.encode(), one.name.encode(), 9, 0, ctypes.byref(code), ctypes.byref(text))  # noqa: E731
    assert ask(ROPE) == 0
    assert ctypes.string_at(text.value) == b"_ZN6exl2nb16rope_append_rowsE"
    assert ctypes.string_at(code.value).startswith(b".visible .entry")
    assert ask(GATHER) == 1
    assert b"holds 0 kernels gather_rows" in ctypes.string_at(text.value)


def test_without_nvrtc_or_headers_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_code, "nvrtc_candidates", lambda: [str(tmp_path / "libnvrtc.so.13")])
    with pytest.raises(NoCompiler, match=r"NVRTC was not found .* pip install nvidia-cuda-nvrtc"):
        kernel_code.Nvrtc()


def version(major, minor):
    major._obj.value, minor._obj.value = 12, 8
    return 0


def number_of_architectures(count):
    count._obj.value = 3
    return 0


def architectures(found):
    found[:] = [75, 80, 90]
    return 0


@pytest.fixture
def library(monkeypatch, tmp_path):
    """A machine that has NVRTC 12.8, for Turing to Hopper, and headers in tmp_path/include."""
    found = types.SimpleNamespace(
        nvrtcVersion=version,
        nvrtcGetNumSupportedArchs=number_of_architectures,
        nvrtcGetSupportedArchs=architectures,
        nvrtcGetErrorString=lambda error: b"NVRTC_ERROR_INTERNAL_ERROR",
    )
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").touch()
    monkeypatch.setattr(kernel_code, "nvrtc_candidates", lambda: ["libnvrtc.so.12"])
    monkeypatch.setattr(kernel_code, "nvidia_folders", lambda kind: [tmp_path / kind])
    monkeypatch.setattr(kernel_code.ctypes, "CDLL", lambda name: found)
    return found


def test_without_headers_it_says_what_to_install(library, tmp_path):
    assert kernel_code.Nvrtc().version == (12, 8)
    (tmp_path / "include" / "cuda_fp16.h").unlink()
    with pytest.raises(NoCompiler, match=r"cuda_fp16.h was not found; .* pip install nvidia-cuda-runtime"):
        kernel_code.Nvrtc()


def test_a_gpu_newer_than_the_compiler_gets_ptx_and_an_unknown_one_an_error(library):
    compiler = kernel_code.Nvrtc()
    assert compiler.target("90a") == "sm_90a"
    assert compiler.target("86") == "compute_80"
    assert compiler.target("120") == "compute_90"
    with pytest.raises(NoCompiler, match=r"NVRTC 12.8 knows no GPU of compute capability 6.1"):
        compiler.target("61")


def test_a_call_that_fails_is_named(library):
    library.nvrtcVersion = lambda *_: 11
    with pytest.raises(NoCompiler, match="nvrtcVersion of libnvrtc.so.12: NVRTC_ERROR_INTERNAL_ERROR"):
        kernel_code.Nvrtc()


def test_every_kernel_that_host_code_names_is_in_its_file():
    library = _load.find_library("libexl2nb_cuda.so")
    assert library is not None
    run = "from pathlib import Path; from exl2nb.ops import kernel_code as k; import sys; k.connect_library(Path(sys.argv[1])); print(*[f'{i.source}|{i.name}' for i in k.every_kernel()], sep='\\n')"  # noqa: E501
    lines = subprocess.run([sys.executable, "-c", run, str(library)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) > 100
    assert len(set(lines)) == len(lines)
    chain = "gemm/persistent/persistent_gemm.cuh"
    assert {f"{chain}|persistent_lora<4, exl2nb::{kind}>" for kind in ("kAnyWeights", "kExl2", "kFromThree")} <= set(lines)
    for line in lines:
        source, name = line.split("|")
        text = (kernel_code.source_root() / "cuda" / source).read_text()
        assert re.search(rf"__global__[^;{{]*?\b{name.split('<')[0]}\(", text), f"{source} has no kernel {name}"


@pytest.mark.gpu
def test_noted_launches_compute_nothing():
    from exl2nb.ops import gpu_prefill  # noqa: F401

    _load.load_libraries()
    x = torch.ones(3, 64, device="cuda")
    out = torch.ops.exl2nb.norm_rows
    ones = torch.ones(64, device="cuda")
    kernels = kernel_code.kernels_of_run(lambda: out(x, ones, None, 1e-6, False))
    assert kernels == [KernelId("gemm/prefill.cu", "norm_rows<4>")]


@pytest.mark.gpu
def test_a_fresh_cache_compiles_for_this_gpu(monkeypatch, tmp_path):
    _load.load_libraries()
    monkeypatch.setenv("EXL2NB_KERNEL_CACHE", str(tmp_path))
    major, minor = torch.cuda.get_device_capability()
    compiler = kernel_code.nvrtc()
    code = compiler.compile(ROPE.unit, ROPE.arch(major, minor))
    assert kernel_code.kernel_symbol(code, "gather_rows") != kernel_code.kernel_symbol(code, ROPE.name)
    assert code == compiler.compile(ROPE.unit, ROPE.arch(major, minor))
    with pytest.raises(NoCompiler, match="does not compile"):
        compiler.compile(KernelId("attention/generic.cu", "none<1>"), f"{major}{minor}")


@pytest.fixture
def ready(compiler, monkeypatch, tmp_path):
    """Code for compute capability 8.0 in the package: a function that writes its index."""
    digest = kernel_code.source_digest()
    monkeypatch.setattr(kernel_code, "source_root", lambda: tmp_path)
    monkeypatch.setattr(kernel_code, "driver_version", lambda: (12, 8))
    monkeypatch.setenv("EXL2NB_KERNEL_CACHE", "off")
    folder = tmp_path / "ready" / "sm_80"
    folder.mkdir(parents=True)
    (folder / "0.xz").write_bytes(lzma.compress(b"anotherready"))

    def write(made_from=digest, version="12.8"):
        row = (SKINNY.source, SKINNY.name, "symbol", "0.xz", hashlib.sha256(b"ready").hexdigest(), "7", "5")
        (folder / "index.txt").write_text(f"{made_from}\n{version}\n" + "\t".join(row) + "\n")
        kernel_code.ready_made.cache_clear()
        return folder

    yield write
    kernel_code.ready_made.cache_clear()
    kernel_code.unpacked_code.cache_clear()


@pytest.mark.parametrize(
    ("index", "capability", "taken"),
    [
        ({}, (8, 0), True),
        ({}, (8, 9), True),  # machine code runs on later GPUs of the same major number
        ({}, (9, 0), False),
        ({"version": "13.0"}, (8, 0), False),  # the driver is older
        ({"made_from": "other sources"}, (8, 0), False),
    ],
)
def test_ready_code_is_taken_from_these_sources_where_the_driver_knows_its_cuda(ready, index, capability, taken):
    ready(**index)
    assert (kernel_code.missing_kernels([SKINNY], *capability) == []) == taken
    assert kernel_code.kernel_code_of(SKINNY, *capability).startswith(b"ready" if taken else b".visible")


def _flip(path):
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: _flip(folder / "0.xz"),
        lambda folder: (folder / "0.xz").write_bytes((folder / "0.xz").read_bytes()[:-9]),
        lambda folder: (folder / "0.xz").write_bytes(b""),
        lambda folder: (folder / "0.xz").write_bytes(lzma.compress(b"anotherREADY")),
        lambda folder: (folder / "0.xz").unlink(),
        lambda folder: ((folder / "0.xz").unlink(), (folder / "0.xz").mkdir()),
        lambda folder: (folder / "index.txt").write_text("\n".join((folder / "index.txt").read_text().split("\n")[:2]) + "\nhalf a row"),
        lambda folder: (folder / "index.txt").write_text(""),
        lambda folder: (folder / "index.txt").write_bytes(b"\xff\xfe"),
        lambda folder: _flip(folder / "index.txt"),
    ],
    ids=["flipped", "short", "empty", "other code", "gone", "a folder", "index half", "index empty", "index not text", "index flipped"],
)
def test_damaged_ready_code_is_compiled(ready, compiler, damage):
    folder = ready()
    damage(folder)
    assert kernel_code.kernel_code_of(SKINNY, 8, 0).startswith(b".visible")
    assert compiler.compiled == [(SKINNY, "80")]
