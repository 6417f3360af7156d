"""Every op of the namespace has a reference and a fake kernel, and the compiled library asks torch for nothing newer than 2.10."""

import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
import torch

from exl2nb import ops
from exl2nb.ops import _library, _load

for module in pkgutil.iter_modules(ops.__path__):
    importlib.import_module(f"exl2nb.ops.{module.name}")  # each defines its ops
# `isa` is left out: it asks the compiled library about itself
NAMES = sorted({name.removeprefix("exl2nb::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("exl2nb::")} - {"isa"})
# Ops of `exl2nb/ops/gpu.py`: launches on memory of the GPU, without data-free shapes or a meaning elsewhere. What they compute is held
# against the references of the other ops by tests marked `gpu`.
GPU_ONLY = [name for name in NAMES if name.startswith("gpu_")]
# What the libraries may need of libtorch: all of it is in 2.10. Before adding a name, look for its version guard in torch's shim headers.
SYMBOLS = set((Path(__file__).parent / "torch_2_10_symbols.txt").read_text().split())


def test_the_ops_page_lists_ops_that_exist():
    page = (Path(__file__).parents[2] / "docs" / "internals" / "ops.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert {"embed", "linear", "paged_attention", "norm_head"} <= set(NAMES)
    assert listed <= set(NAMES) | set(ops.__all__)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(GPU_ONLY)))
def test_op_has_reference_and_fake(name):
    assert name in _library.REFERENCE_OPS
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"exl2nb::{name}", "CompositeExplicitAutograd")
    assert torch._library.simple_registry.singleton.find(f"exl2nb::{name}").fake_impl.kernel is not None


@pytest.mark.parametrize("name", GPU_ONLY)
def test_gpu_op_has_no_reference_and_answers_where_its_library_is_loaded(name):
    """Plans and sizes are computed on the host; they are in the GPU's library, too, which another test may have loaded."""
    loaded = any(Path(path).name.startswith("libexl2nb_cuda") for path in torch.ops.loaded_libraries)
    assert name not in _library.REFERENCE_OPS
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"exl2nb::{name}", "CompositeExplicitAutograd")
    keys = [key for key in ("CPU", "CUDA") if torch._C._dispatch_has_kernel_for_dispatch_key(f"exl2nb::{name}", key)]
    assert len(keys) == loaded, f"{name} has kernels for {keys}, the library is {'loaded' if loaded else 'not loaded'}"


@pytest.mark.parametrize("name", NAMES)
def test_mutation_is_in_the_schema(name):
    """An op that returns nothing must say what it writes, or torch.compile would drop it."""
    schema = getattr(torch.ops.exl2nb, name).default._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    assert schema.returns or writes


def libraries() -> list[Path]:
    found = _load.load_libraries()
    return [path for path in (found.cpu, found.cuda) if path is not None]


@pytest.mark.parametrize("path", libraries(), ids=lambda p: p.name)
def test_library_needs_only_torch_2_10(path):
    out = subprocess.run(["nm", "-D", "--undefined-only", str(path)], capture_output=True, text=True, check=True).stdout
    needed = {m for m in re.findall(r" U (\S+)", out) if re.match(r"(aoti_)?torch_|_ZN?K?(2at|3c10|5torch)", m)}
    assert needed, "the library registers ops, so it must need torch"
    assert needed <= SYMBOLS


@pytest.mark.parametrize("path", libraries(), ids=lambda p: p.name)
def test_library_needs_no_python_and_no_cuda_runtime(path):
    out = subprocess.run(["readelf", "-dW", str(path)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(\S+)\]", out)
    assert not [n for n in needed if re.search("python|cudart|cublas|libtorch_cuda|gomp", n)]
    assert "RPATH" not in out
    assert "RUNPATH" not in out


def test_compiled_library_is_in_use():
    """Without it every other test would quietly measure the torch references."""
    assert "cpu" in _load.load_libraries().loaded
