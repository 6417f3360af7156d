#include "gptq.h"

namespace exl2nb::gptq {
namespace {
constexpr int VF = 4;
#include "gptq.inc"
}  // namespace
Kernels kernels_base() { return {best_step, candidates, rows, coupled, trail}; }
}  // namespace exl2nb::gptq
