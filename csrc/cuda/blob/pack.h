// Arguments of the packing kernels (pack.cu).
#pragma once
#include <cstdint>

#include "format/gpu_blob.h"

namespace exl2nb {

// The strips of a part of a blob, and its items, on the device.
struct PackTarget {
  const Item* items;
  const int* item_of_unit;
  int units, strips;
  uint8_t* data;
  int64_t strip_bytes;
#ifdef __CUDACC__
  __device__ uint8_t* strip(int number) const { return data + number * strip_bytes; }
#endif
};

// EXL2 tensors.
struct PackSource {
  const uint32_t *q_weight, *q_scale;
  const int* row_word;  // per 32 stored rows: first word row
  const int* row_group;
  int K, N;
};

// GPTQ tensors. perm: of `stored` rows, K for padding, or null; block_group: group of every 32 stored rows; zeros int16 (G, N) or
// null. A padding row's zero point must be a code.
struct GptqPacking {
  const uint32_t* qweight;
  const void* scales;  // f16 (G, N)
  const int16_t* zeros;
  const int *perm, *block_group;
  int K, N, stored, bits;
};

}  // namespace exl2nb
