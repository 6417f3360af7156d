// What kernels and host code of GPTQ share: sizes, and arguments of the kernels.
#pragma once
#include "cuda/gptq/gptq.h"
#include "cuda/runtime/types.h"

namespace exl2nb {

constexpr int kOptions = 16, kLanes = 32, kGptqWarps = 8, kStage = 64;
constexpr int kGrid = 16, kCandidates = 24, kSpan = 4, kEach = kCandidates / kGptqWarps;

// The current group of every option; rows 0: none.
struct Step {
  int bits[kOptions], first[kOptions], rows[kOptions];
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
static_assert(kOptions == kGptqOptions);

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
