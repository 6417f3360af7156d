// Arguments of the kernels that pack (pack.cu) and unpack (unpack.cu).
#pragma once
#include "cuda/runtime/types.h"
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

constexpr int kStrips = 4, kUnpackWarps = 4, kUnitsPerWarp = 2;

struct UnpackPart {
  const uint8_t* data;
  const half2* steps;  // of all parts
  const Item* items;   // of this part
  const int* perm;     // of the stored rows, or null
  int num_items, first_unit, num_units, strips, first_column, outputs, stored;
  bool whole;  // its rows in the result begin at multiples of 16 bytes
  int64_t strip_bytes;
};
struct UnpackParts {
  UnpackPart part[kMaxParts];
};

}  // namespace exl2nb
