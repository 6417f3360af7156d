// GPTQ with EXL2's scales on the GPU, one block of rows at a time. No torch header here.
#pragma once
#include <cstdint>

namespace exl2nb {

constexpr int kGptqOptions = 16;        // ways to cut the same rows into groups that one launch may try side by side
constexpr int kGptqMostCoupled = 1024;  // columns per block of coupling: a CTA's threads

// Rows [first, first + rows) of P copies of one matrix, each with its own groups.
struct GptqBlock {
  float* w;                    // [K][P * N], stored order; of these rows, what is behind a group is compensated for it
  const float* factor;         // [K][K], upper triangular, inverse Hessian = U^T U
  const float* column_weight;  // [N]: how much a column's loss counts when the shared maximum of a group is chosen
  const int32_t* groups;       // on the host, [P][S][2]: bits, rows; no rows: no such group
  const float* coupling;       // [N / B][B][B], or null: every column for itself
  const float* spread;         // [N]
  int K, N, P, S, first, rows, B;
  uint8_t* codes;        // [rows][P * N]
  uint8_t* scale_index;  // [S][P * N], 0..15
  void* scale_max;       // f16 [S][P]
  float* loss;           // [S][P * N]: of each group
  float* errors;         // [rows][P * N]: compensated errors; rows behind the block get w[t] -= sum_r U[r][t] * errors[r]
  uint8_t* scratch;      // gptq_scratch_bytes
};

int64_t gptq_scratch_bytes(const GptqBlock& block);
const char* gptq_block_launch(const GptqBlock& block, void* stream);  // nullptr, or what went wrong

}  // namespace exl2nb
