// Where an activation lies in the input of a matrix product: rows of 32 in the order of the tensor cores' B fragments.
//
// The input of a matrix is half[token][stride], stride >= K. Inside a block of 32 stored rows, lane t (0..3) of a token reads 8 halves in a
// row: rows 2t, 2t+1, 2t+8, 2t+9 of the first 16, then of the second: both registers of two m16n8k16 steps in one 16-byte load.
//
// Grouped, for products of more tokens (stream_k_gemm.cuh): blocks of `group` tokens, stride halves a token like the other; inside, eight
// stored rows after the other, of each eight tokens after the other: row by row of these their halves. So all that an item multiplies lies
// together, in the tensor cores' own order, and who writes a feature of many tokens writes eight neighbours.
#pragma once
#include <cuda_fp16.h>

namespace exl2nb {

// Place of stored row r within a token's input.
__host__ __device__ __forceinline__ int fragment_place(int r) {
  return (r & ~31) + ((r & 7) >> 1) * 8 + ((r >> 4) & 1) * 4 + ((r >> 3) & 1) * 2 + (r & 1);
}

// Halves before a token's first, and from there to stored row r. group: a power of two, or 0.
__host__ __device__ __forceinline__ size_t token_place(int group, int stride, int token) {
  return group ? static_cast<size_t>(token & -group) * stride + ((token & (group - 1)) >> 3) * 64 + (token & 7)
               : static_cast<size_t>(token) * stride;
}
__host__ __device__ __forceinline__ int row_place(int group, int r) {
  return group ? (r >> 3) * (8 * group) + (r & 7) * 8 : fragment_place(r);
}

// fp16 of a value, at most the largest finite one: an overflow must not become an infinity, which times a zero weight is NaN.
__device__ __forceinline__ half saturated(float v) { return __float2half_rn(fminf(fmaxf(v, -65504.f), 65504.f)); }

// A matrix's input buffer: one copy for each distinct permutation of its parts. inverse[p]: feature -> stored row, null = the same.
struct MatrixInput {
  static constexpr int kMaxPerms = 3;
  half* x;
  int stride, perm_stride, num_perms;  // in halves; perm_stride between the copies
  const int* inverse[kMaxPerms];
  int group;
};

}  // namespace exl2nb
