// Sources of the packing kernels (pack.cu).
#pragma once
#include <cstdint>

namespace exl2nb {

// EXL2 tensors.
struct PackSource {
  const uint32_t *q_weight, *q_scale;
  const int* row_word;  // per 32 stored rows: first word row
  const int* row_group;
  int K, N, outputs;
};

// GPTQ tensors. perm: of `stored` rows, K for padding, or null; block_group: group of every 32 stored rows; zeros int16 (G, N) or
// null. A padding row's zero point must be a code.
struct GptqPacking {
  const uint32_t* qweight;
  const void* scales;  // f16 (G, N)
  const int16_t* zeros;
  const int *perm, *block_group, *item_of_unit;
  int K, N, stored, bits, units;
};

}  // namespace exl2nb
