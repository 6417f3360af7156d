// Order of activations in a GEMM's input: B fragments of the tensor cores.
//
// Input: half[token][stride], stride >= K. In a block of 32 stored rows, lane t (0..3) of a token reads 8 consecutive halves: rows 2t,
// 2t+1, 2t+8, 2t+9 of the first 16 rows, then of the second: both registers of two m16n8k16 steps in one 16-byte load.
//
// Grouped (stream-K): blocks of `group` tokens. In a block, 8 stored rows x group tokens are contiguous as 8 x 8 tiles, row by row. So
// everything an item multiplies is contiguous, and a writer of one feature of eight tokens writes eight neighbours.
#pragma once
#include "cuda/runtime/types.h"

namespace exl2nb {

// Position of stored row r in a token's input.
__host__ __device__ __forceinline__ int fragment_place(int r) {
  return (r & ~31) + ((r & 7) >> 1) * 8 + ((r >> 4) & 1) * 4 + ((r >> 3) & 1) * 2 + (r & 1);
}

// Offset of a token, and from there of stored row r, in halves. group: a power of two, or 0.
__host__ __device__ __forceinline__ size_t token_place(int group, int stride, int token) {
  return group ? static_cast<size_t>(token & -group) * stride + ((token & (group - 1)) >> 3) * 64 + (token & 7)
               : static_cast<size_t>(token) * stride;
}
__host__ __device__ __forceinline__ int row_place(int group, int r) {
  return group ? (r >> 3) * (8 * group) + (r & 7) * 8 : fragment_place(r);
}

#ifdef __CUDACC__
// fp16, clamped to finite values: infinity times a zero weight would be NaN.
__device__ __forceinline__ half saturated(float v) { return __float2half_rn(fminf(fmaxf(v, -65504.f), 65504.f)); }
#endif

// Input buffer: one copy per distinct permutation. inverse[p]: feature -> stored row; null: identity.
struct MatrixInput {
  static constexpr int kMaxPerms = 3;
  half* x;
  int stride, perm_stride, num_perms;  // halves; perm_stride: between copies
  const int* inverse[kMaxPerms];
  int group;
};

}  // namespace exl2nb
