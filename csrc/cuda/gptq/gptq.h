// GPTQ with EXL2's scales on the GPU, one block of rows at a time. No torch header here.
#pragma once
#include "cuda/runtime/types.h"

namespace exl2nb {

constexpr int kGptqOptions = 16;       // most options (ways to group the rows) per launch
constexpr int kGptqMaxCoupled = 1024;  // most columns per coupling block (threads of a CTA)

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

constexpr int kLanes = 32, kGptqWarps = 8, kStage = 64;
constexpr int kGrid = 16, kCandidates = 24, kSpan = 4, kEach = kCandidates / kGptqWarps;

// The current group of every option; rows 0: none.
struct Step {
  int bits[kGptqOptions], first[kGptqOptions], rows[kGptqOptions];
};
struct Sizes {
  int K, N, P;
  __device__ int64_t columns() const { return static_cast<int64_t>(P) * N; }
};
// Candidate maxima, relative to the largest best step.
struct Spread {
  float factor[kCandidates];
};
constexpr int kGptqThreads = 64, kPanel = 16, kDeep = 64, kTurn = 4;

#ifdef __CUDACC__
__device__ __forceinline__ float round_half(float x) { return __half2float(__float2half_rn(x)); }
__device__ __forceinline__ float unit_of(half scale_max) { return round_half(__half2float(scale_max) / 256.0f); }
#endif
// Scale codes of a group and where results go; first: first row of the block.
struct Chosen {
  const int* picked;    // [P]
  const uint8_t* code;  // [kCandidates][P * N]
  const half* scale_max;
  uint8_t *codes, *scale_index;  // [rows of the block][P * N], [P * N]
  float *loss, *errors;          // [P * N], [rows of the block][P * N]
  int first;

#ifdef __CUDACC__
  __device__ float step(Sizes size, int p, int64_t column, bool inside) const {
    if (!inside) return 0.0f;
    const uint8_t k = code[picked[p] * size.columns() + column];
    scale_index[column] = k;
    return round_half(static_cast<float>((k + 1) * (k + 1)) * unit_of(scale_max[p]));
  }
#endif
};

}  // namespace exl2nb
