// Arguments of the unpacking kernel (unpack.cu).
#pragma once
#include "cuda/runtime/types.h"
#include "format/gpu_blob.h"

namespace exl2nb {

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
