// Arguments of the small kernels around the matrix products.
#pragma once
#include <cstdint>

#include "cuda/gemm/norm.cuh"

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
// act(gate) * up of y's rows [gate; up] of `width` numbers each, or act(y) where not gated, into the next matrix's input.
struct GatesArgs {
  const float* y;
  int64_t stride;
  int width;
  bool gated;
  int activation;
  MatrixInput next;
};
const char* gates_launch(const GatesArgs&, int tokens, void*, bool pdl);
const char* embed_launch(const EmbedArgs&, int tokens, void*, bool pdl);
const char* rows_launch(const RowsArgs&, int rows, void*, bool pdl);

}  // namespace exl2nb
