#include "draw.h"

namespace exl2nb::draw {
namespace {
constexpr int VF = 8;
#include "draw.inc"
}  // namespace
Kernels kernels_avx2() { return {look, weigh, above, collect, best}; }
}  // namespace exl2nb::draw
