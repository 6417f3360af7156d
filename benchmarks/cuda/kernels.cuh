// The engine's kernels for a program without Python: their code is read from the folder that `tools/compile_kernels.py --out` has written,
// $EXL2NB_KERNELS or ./build/kernels/sm_90. Such a program is compiled with nvcc and linked with the engine's host code:
//   python tools/compile_kernels.py --arch 90 --out build/kernels
//   nvcc -O3 -std=c++20 -arch=sm_90 --expt-relaxed-constexpr -Icsrc benchmarks/cuda/NAME.cu $(find csrc/cuda -name '*.cpp')
//     csrc/format/gpu_layout.cpp -ldl -o NAME
#pragma once
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <utility>

#include "cuda/runtime/kernel.h"

namespace {

inline int kernel_code(const char* source, const char* name, int, int, const void** code, const char** text) {
  static const std::string folder = std::getenv("EXL2NB_KERNELS") ? std::getenv("EXL2NB_KERNELS") : "build/kernels/sm_90";
  static std::map<std::string, std::pair<std::string, std::string>> found;  // "source\tname" -> symbol, code
  if (found.empty()) {
    std::ifstream index(folder + "/index.txt");
    std::string line;
    std::getline(index, line);  // digest
    std::getline(index, line);  // CUDA version
    while (std::getline(index, line)) {
      std::istringstream fields(line);
      std::string of[4];
      for (auto& field : of) std::getline(fields, field, '\t');
      std::ifstream file(folder + "/" + of[3], std::ios::binary);
      found[of[0] + "\t" + of[1]] = {of[2], {std::istreambuf_iterator<char>(file), {}}};
    }
  }
  const auto at = found.find(std::string(source) + "\t" + name);
  *text = "not in the folder that tools/compile_kernels.py has written";
  if (at == found.end()) return 1;
  *text = at->second.first.c_str(), *code = at->second.second.data();
  return 0;
}
const bool registered = (exl2nb::set_kernel_code(kernel_code), true);

}  // namespace
