// Chooses the instruction set once. CMakeLists.txt compiles kernels.inc, draw.inc and gptq.inc for each one.

#include <cstdlib>
#include <cstring>

#include <unistd.h>
#include <sys/syscall.h>
#include "amx.h"
#include "knobs.h"
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

bool amx::allowed() {
#if defined(EXL2NB_AMX_TEST)
  return true;
#endif
  static const bool is = __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("gfni") && __builtin_cpu_supports("avx512vbmi") && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return is;
}
static void gemm(const uint8_t* blob, const BlobPart& part, const Rows& rows, int tile, int end, const Output& out) {
  if (knobs.amx && quantised(part) && rows.M == 1 && amx::allowed()) return void(amx::one_row(blob, part, rows, tile, end, out));
  return avx512::table.gemm(blob, part, rows, tile, end, out);
}
const Kernels& kernels() {
  static const Kernels table = [] {
    Kernels t = EXL2NB_TABLE;
    if (isa() == Isa::avx512) t.gemm = gemm;
    return t;
  }();
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
