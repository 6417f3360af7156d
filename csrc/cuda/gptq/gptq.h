// GPTQ with EXL2's scales on the GPU, one block of rows at a time. No torch header here.
#pragma once
#include <cstdint>

namespace exl2nb {

constexpr int kGptqOptions = 16;        // most options (ways to group the rows) per launch
constexpr int kGptqMostCoupled = 1024;  // most columns per coupling block (threads of a CTA)

// Rows [first, first + rows) of P copies of one matrix, each with its own groups.
struct GptqBlock {
  float* w;                    // [K][P * N], stored order; later rows of the block are compensated in place
  const float* factor;         // [K][K], upper triangular, inverse Hessian = U^T U
  const float* column_weight;  // [N]: weight of a column's loss in the choice of the shared maximum
  const int32_t* groups;       // host, [P][S][2]: bits, rows; rows 0: none
  const float* coupling;       // [N / B][B][B]; null: independent columns
  const float* spread;         // [N]
  int K, N, P, S, first, rows, B;
  uint8_t* codes;        // [rows][P * N]
  uint8_t* scale_index;  // [S][P * N], 0..15
  void* scale_max;       // f16 [S][P]
  float* loss;           // [S][P * N]: of each group
  float* errors;         // [rows][P * N]: compensated errors; the caller updates later rows: w[t] -= sum_r U[r][t] * errors[r]
  uint8_t* scratch;      // gptq_scratch_bytes
};

int64_t gptq_scratch_bytes(const GptqBlock& block);
const char* gptq_block_launch(const GptqBlock& block, void* stream);  // nullptr, or what went wrong

}  // namespace exl2nb
