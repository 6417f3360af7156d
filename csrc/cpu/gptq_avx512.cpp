#include "gptq.h"

namespace exl2nb::gptq {
namespace {
constexpr int VF = 16;
#include "gptq.inc"
}  // namespace
Kernels kernels_avx512() { return {best_step, candidates, rows, coupled, trail}; }
}  // namespace exl2nb::gptq
