// Arguments of the small kernels around the matrix products.
#pragma once
#include <cuda_runtime.h>

#include "fragment.cuh"

namespace exl2nb {

enum NormKind { kNoNorm = 0, kRmsNorm = 1, kLayerNorm = 2 };
struct NormArgs {
  int kind, width;
  float eps;
  const float *weight, *bias;  // f32 (width,); bias may be null
};
// x[token] = table[ids[token]] * scale (+ position_table[positions[token]]); where next.x, normed into it as well.
struct EmbedArgs {
  const int *ids, *positions;
  const void *table, *position_table;  // dtype: 0 f32, 1 f16, 2 bf16
  int dtype, position_dtype, vocab, max_positions, width;
  float scale;
  float* x;
  NormArgs norm;
  MatrixInput next;
};
// next[r] = norm(x[rows[r]]), rows null: all.
struct PrepareArgs {
  const float* x;
  const int* rows;
  int tokens;
  NormArgs norm;
  MatrixInput next;
};
// x += scale * rms_norm(sum over a token's `pairs` rows of y, weighted, in order) * post_norm, null: without a norm; where next.x, what
// results is normed into it.
struct CombineArgs {
  float* x;
  const float *y, *weights;  // (tokens, pairs, width); (tokens, pairs), null: 1
  int pairs, width;
  const float* post_norm;
  float post_eps, scale;
  NormArgs norm;
  MatrixInput next;
};
const char* embed_launch(const EmbedArgs&, int tokens, cudaStream_t, bool pdl);
const char* prepare_launch(const PrepareArgs&, int rows, cudaStream_t, bool pdl);
const char* combine_launch(const CombineArgs&, int tokens, cudaStream_t, bool pdl);

}  // namespace exl2nb
