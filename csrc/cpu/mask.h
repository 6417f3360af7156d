// Rows of logits with the tokens taken out that a bit mask does not allow.
#pragma once
#include <cstdint>

namespace exl2nb {

// out[i] = bit i of `bits` (word i / 32, low bit first) ? logits[i] : -infinity, for one row of V logits.
void mask_row(const float* logits, const uint32_t* bits, int64_t V, float* out);

}  // namespace exl2nb
