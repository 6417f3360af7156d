#include "gptq.h"

namespace exl2nb::gptq {
namespace {
constexpr int VF = 8;
#include "gptq.inc"
}  // namespace
Kernels kernels_avx2() { return {best_step, candidates, rows, coupled, trail}; }
}  // namespace exl2nb::gptq
