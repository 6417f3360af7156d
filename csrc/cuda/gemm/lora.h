// Low-rank adapters of a step's rows (format/lora.h): two launches behind a product, or one behind the embedding.
//
// Every row names its adapter in memory, and a table on the device says what the adapter changes in each op. So a captured step stays valid
// while adapters are loaded and unloaded and requests come and go.
#pragma once
#include <cstdint>

#include "cuda/gemm/fragment.cuh"
#include "format/lora.h"

namespace exl2nb {

constexpr int kLoraThreads = 256, kLoraChunk = 256, kLoraRows = 64;  // of a CTA; inputs of a CTA; rows of a launch
constexpr int kLoraSumsThreads = 128, kLoraSlots = 4;                // of a CTA of lora_sums; places of `begun`

// What the adapters change in one op, by row.
struct LoraRows {
  const LoraChange* changes;  // of adapter 0; those of the next one are `ops` further on, those of the op before one earlier
  int64_t ops;
  const int* adapters;  // by token, -1 for none; null: no adapters at all
  const int* rows;      // the token of each row; null: row r is token r
  int tokens;
#ifdef __CUDACC__
  // Of a row; null: nothing. Only what no kernel of the step writes is read, so it may come before griddepcontrol.wait.
  __device__ __forceinline__ const LoraChange* of(int row) const {
    const int token = rows ? min(max(__ldg(rows + row), 0), tokens - 1) : row;
    const int adapter = __ldg(adapters + token);
    return adapter < 0 ? nullptr : changes + adapter * ops;
  }
#endif
};

// y[row] += gain * (y + parts) + parts + bias, with a row's input x. Of the embedding x is none, and ids choose rows of the parts' a.
// next.x: y stays as it was, and act(gate) * up of [gate; up], or act(y) where not gated, goes there.
struct LoraArgs {
  LoraRows of;
  MatrixInput x;
  int K;
  const int* ids;
  float* sums;  // of x a: [row][chunk of K][width], kLoraRows rows
  int width;    // of the widest change
  float* y;
  int64_t stride;
  int N;
  MatrixInput next;
  int activation;
  bool gated;
};

// Scaled sums of x a of at most kLoraRows rows, for a product that adds the rest itself (lora_quads.cuh) and runs beside this launch, which
// comes before it. `begun` becomes 1 when x is there; it has kLoraSlots places, used by turns.
struct LoraSumsArgs {
  LoraRows of;
  MatrixInput x;
  int K, rows;
  float* sums;  // as in LoraArgs
  int width;
  unsigned* arrived;  // a zero for each 16 of low, which stays one
  float* low;         // [row][width]
  unsigned* begun;
  unsigned* later_begun;  // of the launch after the next: becomes 0
};

inline int64_t lora_chunks(int64_t K) { return (K + kLoraChunk - 1) / kLoraChunk; }
const char* lora_launch(LoraArgs a, int rows, void* stream, bool pdl);
const char* lora_sums_launch(const LoraSumsArgs& a, void* stream, bool pdl);

#ifdef __CUDACC__
// By a warp: this CTA's share of a row's matrices a, or b, into the L2 cache, unless an earlier row brings the same.
template <bool B>
__device__ __forceinline__ void lora_prefetch(const LoraRows& of, int row, int K, int lane) {
#if __CUDA_ARCH__ >= 900
  const LoraChange* const change = of.of(row);
  bool known = false;
  for (int other = lane; other < row; other += 32) known |= of.of(other) == change;
  if (__any_sync(~0u, known) || !change || lane >= change->num_parts) return;
  const LoraPart& part = change->parts[lane];
  const int pieces = static_cast<int>(B ? part.rank * part.columns : K * ((part.rank + 15) & ~15)) / 8;  // of 16 bytes
  const int each = (pieces + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x), from = static_cast<int>(blockIdx.x) * each;
  if (const int count = min(each, pieces - from); count > 0)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"((B ? part.b : part.a) + from * 8), "r"(count * 16) : "memory");
#endif
}
// y[n] += v * a[n], of 8 halves.
__device__ __forceinline__ void lora_multiply(float v, const uint4& a, float* y) {
  const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
  for (int n = 0; n < 4; n++) {
    y[2 * n] = fmaf(v, __half2float(__ushort_as_half(static_cast<uint16_t>(w[n]))), y[2 * n]);
    y[2 * n + 1] = fmaf(v, __half2float(__ushort_as_half(static_cast<uint16_t>(w[n] >> 16))), y[2 * n + 1]);
  }
}
// Two lanes that differ in bit `d` add up 2 * N numbers; the one with the bit keeps the second N.
template <int N>
__device__ __forceinline__ void lora_halve(float* y, int lane, int d) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float other = __shfl_xor_sync(~0u, lane & d ? y[n] : y[n + N], d);
    y[n] = (lane & d ? y[n + N] : y[n]) + other;
  }
}
// Adds what the lanes have of 16 columns: every other lane the first eight, the others the second. Lanes without bit 1 then have the sum
// of a column, the one returned, in y[0].
__device__ __forceinline__ int lora_reduce(float (&y)[8], int lane) {
  lora_halve<4>(y, lane, 16), lora_halve<2>(y, lane, 8), lora_halve<1>(y, lane, 4);
  y[0] += __shfl_xor_sync(~0u, y[0], 2);
  return 8 * (lane & 1) + (lane >> 4) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
}
#endif

}  // namespace exl2nb
