// Where an activation lies in the input of a matrix product: rows of 32 in the order of the tensor cores' B fragments.
//
// The input of a matrix is half[token][stride], stride >= K. Inside a block of 32 stored rows, lane t (0..3) of a token reads 8 halves in a
// row: rows 2t, 2t+1, 2t+8, 2t+9 of the first 16, then of the second: both registers of two m16n8k16 steps in one 16-byte load.
#pragma once
#include <cuda_fp16.h>

namespace exl2nb {

// Place of stored row r within a token's input.
__host__ __device__ __forceinline__ int fragment_place(int r) {
  return (r & ~31) + ((r & 7) >> 1) * 8 + ((r >> 4) & 1) * 4 + ((r >> 3) & 1) * 2 + (r & 1);
}

// fp16 of a value, at most the largest finite one: an overflow must not become an infinity, which times a zero weight is NaN.
__device__ __forceinline__ half saturated(float v) { return __float2half_rn(fminf(fmaxf(v, -65504.f), 65504.f)); }

// A matrix's input buffer: one copy for each distinct permutation of its parts. inverse[p]: feature -> stored row, null = the same.
struct MatrixInput {
  static constexpr int kMaxPerms = 3;
  half* x;
  int stride, perm_stride, num_perms;  // in halves; perm_stride between the copies
  const int* inverse[kMaxPerms];
  __device__ __forceinline__ void put(int token, int feature, float v) const {
    const half h = saturated(v);
    for (int p = 0; p < num_perms; p++) {
      const int row = inverse[p] ? inverse[p][feature] : feature;
      x[static_cast<size_t>(p) * perm_stride + static_cast<size_t>(token) * stride + fragment_place(row)] = h;
    }
  }
};

}  // namespace exl2nb
