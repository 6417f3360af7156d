"""Exchanges of ranks on GPUs: the kernels' own code, run by threads of the processor, with a rank that is late."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from exl2nb.ops import peers

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++")
TYPES = """#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#define __CUDACC__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
struct Place { unsigned x; };
constexpr Place blockIdx{0}, threadIdx{0}, gridDim{1}, blockDim{1};
using half = float;
inline half __float2half_rn(float v) { return v; }
template <class T> T __ldcg(const T* p) { return *static_cast<const volatile T*>(p); }
template <class T> T __ldg(const T* p) { return *p; }
inline unsigned __float_as_uint(float v) { unsigned u; std::memcpy(&u, &v, 4); return u; }
inline float __uint_as_float(unsigned u) { float v; std::memcpy(&v, &u, 4); return v; }
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None or not CSRC.exists():
        pytest.skip("needs the sources and a C++ compiler")
    folder = tmp_path_factory.mktemp("peers")
    (folder / "cuda" / "runtime").mkdir(parents=True)
    (folder / "cuda" / "runtime" / "types.h").write_text(TYPES)
    pdl = "#pragma once\nnamespace exl2nb { inline void pdl_wait() {} inline void pdl_launch_dependents() {} }\n"
    (folder / "cuda" / "runtime" / "pdl.cuh").write_text(pdl)
    command = [COMPILER, "-std=c++20", "-O1", "-pthread", "-DEXL2NB_PEERS_ON_HOST", "-I", str(folder), "-I", str(CSRC)]
    done = subprocess.run([*command, str(HERE / "peers_host.cpp"), "-o", str(folder / "peers")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "peers"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_exchanges_of_ranks(program: Path, size: int) -> None:
    """Sums, parts side by side and in a permuted order, numbers of one rank alone; one rank always reads late."""
    done = subprocess.run([str(program), str(size), "24"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 wrong\n"


def test_sizes_are_those_of_the_kernels() -> None:
    text = (CSRC / "cuda" / "runtime" / "peers.cuh").read_text()
    assert f"kMaxRanks = {peers.MOST_RANKS}, kPeerHeader = {peers.HEADER_BYTES};" in text
    assert peers.peer_buffer_bytes(2, 100) == peers.HEADER_BYTES + 2 * 2 * 100 * 8
