// Chooses the instruction set once. CMakeLists.txt compiles kernels.inc, draw.inc and gptq.inc for each one.

#include <cstdlib>
#include <cstring>

#include "draw.h"
#include "gptq.h"
#include "kernels.h"

namespace exl2nb {

#define EXL2NB_TABLES(isa)    \
  namespace isa {             \
  extern const Kernels table; \
  }                           \
  namespace draw::isa {       \
  extern const Kernels table; \
  }                           \
  namespace gptq::isa {       \
  extern const Kernels table; \
  }
EXL2NB_TABLES(base)
EXL2NB_TABLES(avx2)
EXL2NB_TABLES(avx512)

#if defined(EXL2NB_X86)
#define EXL2NB_TABLE (isa() == Isa::avx512 ? avx512::table : isa() == Isa::avx2 ? avx2::table : base::table)
#else
#define EXL2NB_TABLE base::table
#endif

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
  static const Kernels& table = EXL2NB_TABLE;
  return table;
}
const draw::Kernels& draw::kernels() {
  static const Kernels& table = EXL2NB_TABLE;
  return table;
}
const gptq::Kernels& gptq::kernels() {
  static const Kernels& table = EXL2NB_TABLE;
  return table;
}

}  // namespace exl2nb
