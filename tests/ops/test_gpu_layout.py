"""What the head of a GPU blob says of its weights: laid out on the host, as packing does (csrc/format/gpu_layout.cpp)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++")
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "format/gpu_layout.h"
using namespace exl2nb;
// Arguments: of each matrix its groups, bits and rows by turns, and a 0.
int main(int count, char** text) {
  std::vector<PartLayout> parts;
  int K = 0;
  for (int i = 1; i < count; i++) {
    std::vector<Group> groups;
    for (K = 0; std::atoi(text[i]); i += 2) groups.push_back({std::atoi(text[i]), std::atoi(text[i + 1])}), K += groups.back().rows;
    parts.push_back(layout_exl2(groups, std::vector<uint16_t>(groups.size(), 0x3c00), 1.0, 96, {}));
  }
  BlobLayout out;
  if (layout_blob(K, parts, out).empty()) std::printf("%d", fewest_bits(out.meta.data()));
}
"""
CASES = {
    "one width": ([[(4, 128)] * 32], 4),
    "most of it wider": ([[(6, 128), *[(5, 128)] * 31]], 5),
    "the last rows of the second matrix": ([[(4, 128)] * 4, [*[(3, 128)] * 3, (3, 96), (2, 32)]], 2),
    "two bits in front": ([[(2, 64), (4, 64)], [(4, 64)] * 2], 2),
    "three bits everywhere": ([[(3, 32)] * 4, [(3, 64)] * 2], 3),
    "two bits behind more runs than a head lists": ([[(8, 32), *[(6, 64), (5, 32)] * 4, (4, 32), (3, 64), (2, 32)]], 2),
    "so many runs that there may be some": ([[(8, 32), *[(6, 64), (5, 32)] * 4]], 2),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None or not CSRC.exists():
        pytest.skip("needs the sources and a C++ compiler")
    folder = tmp_path_factory.mktemp("layout")
    (folder / "main.cpp").write_text(PROGRAM)
    command = [COMPILER, "-std=c++20", "-O1", "-I", str(CSRC), str(folder / "main.cpp"), str(CSRC / "format" / "gpu_layout.cpp")]
    done = subprocess.run([*command, "-o", str(folder / "layout")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "layout"


@pytest.mark.parametrize("name", CASES)
def test_fewest_bits_of_a_blob(program: Path, name: str) -> None:
    matrices, fewest = CASES[name]
    numbers = [str(n) for groups in matrices for n in (*(n for group in groups for n in group), 0)]
    assert subprocess.run([str(program), *numbers], capture_output=True, text=True, timeout=20).stdout == str(fewest)
