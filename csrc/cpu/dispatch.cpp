#include "dispatch.h"

#include <cstdlib>
#include <cstring>

namespace exl2nb {
namespace {

Isa detect() {
  Isa best = Isa::base;
#if defined(EXL2NB_X86)
  __builtin_cpu_init();
  // F16C comes with every processor that has AVX2 and FMA.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = Isa::avx2;
  if (best == Isa::avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    best = Isa::avx512;
  }
#endif
  if (const char* limit = std::getenv("EXL2NB_ISA")) {
    if (!std::strcmp(limit, "base")) best = Isa::base;
    if (!std::strcmp(limit, "avx2") && best > Isa::avx2) best = Isa::avx2;
  }
  return best;
}

}  // namespace

Isa isa() {
  static const Isa found = detect();
  return found;
}

const Kernels& kernels() {
#if defined(EXL2NB_X86)
  static const Kernels* table = isa() == Isa::avx512 ? kernels_avx512() : isa() == Isa::avx2 ? kernels_avx2() : kernels_base();
#else
  static const Kernels* table = kernels_base();
#endif
  return *table;
}

}  // namespace exl2nb
