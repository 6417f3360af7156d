// Arguments of the small kernels around the matrix products.
#pragma once
#include <cuda_runtime.h>

#include "norm.cuh"

namespace exl2nb {

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
// Row rows[r] of `from` (norm.cuh), rows null: row r; where next.x, its norm becomes row r of that.
struct RowsArgs {
  RowSource from;
  const int* rows;
  int tokens;
  MatrixInput next;
};
const char* embed_launch(const EmbedArgs&, int tokens, cudaStream_t, bool pdl);
const char* rows_launch(const RowsArgs&, int rows, cudaStream_t, bool pdl);

}  // namespace exl2nb
