// Picks the kernels of this processor once.
#pragma once
#include "kernels.h"

namespace exl2nb {

enum class Isa { base, avx2, avx512 };

Isa isa();  // the best this processor has, at most EXL2NB_ISA=base|avx2|avx512
const Kernels& kernels();

}  // namespace exl2nb
