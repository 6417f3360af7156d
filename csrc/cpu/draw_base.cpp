#include "draw.h"

namespace exl2nb::draw {
namespace {
constexpr int VF = 4;
#include "draw.inc"
}  // namespace
Kernels kernels_base() { return {look, weigh, above, collect, best}; }
}  // namespace exl2nb::draw
