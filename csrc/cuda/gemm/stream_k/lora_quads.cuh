// Adapters in the epilogue of a stream-K GEMM of 17 to 64 rows: the launch before has made the sums of x a (lora_sums of lora.cu) and begun
// to bring b to the L2 cache; a warp that finishes a strip and 8 rows adds the sums times its 16 columns of b, ahead of the norm factor.
#pragma once
#include "cuda/gemm/lora.h"
#include "cuda/runtime/pdl.cuh"
#include "format/gpu_blob.h"

namespace exl2nb {

struct StreamKLora {
  LoraRows of;
  const float* low;  // scaled sums of x a: [row][width], of all parts
  int width;
  // Of up to 16 rows (lora_strips.cuh) instead of low: sums that count, [row][width], and those of the launch before, which become zero.
  unsigned long long *sums, *clear;
  int steps;                   // stored rows / 16
  int first_strip[kMaxParts];  // of each part of the matrix
};

#ifdef __CUDACC__
// What a kernel is made with: adapters, or none, which is no code.
struct NoQuads {
  static constexpr bool kAny = false, kInside = false;
};
struct LoraQuads {
  static constexpr bool kAny = true, kInside = false;
  const StreamKLora& L;

  // What is added, in the order of a Quad (stream_k_gemm.cuh), to 16 columns of y from `column` on and 8 rows from `first` on. Called by
  // whole warps. Lane 4 t + 2 h + b takes row t, columns 8 h to 8 h + 7 and every other rank from b on.
  __device__ __forceinline__ float4 of(int first, int tokens, int64_t column, int lane) const {
    const int row = first + (lane >> 2), odd = lane & 1;
    const LoraChange* const change = row < tokens ? L.of.of(row) : nullptr;
    const float* low = L.low + static_cast<int64_t>(row) * L.width;
    float y[8] = {};
#pragma unroll 1
    for (int i = 0; change && i < change->num_parts; i++) {
      const LoraPart part = change->parts[i];
      const int64_t at = column + 8 * (lane >> 1 & 1) - part.first;
      if (at >= 0 && at < part.columns) {
        constexpr int kTogether = 8;  // loads in flight
#pragma unroll 1
        for (int r0 = odd; r0 < part.rank; r0 += 2 * kTogether) {
          uint4 b[kTogether];
          float s[kTogether];
#pragma unroll
          for (int j = 0; j < kTogether; j++) {
            const int r = r0 + 2 * j;
            const bool has = r < part.rank;
            b[j] = has ? __ldg(reinterpret_cast<const uint4*>(part.b + r * part.columns + at)) : uint4{0, 0, 0, 0};
            s[j] = has ? __ldcg(low + r) : 0.f;
          }
#pragma unroll
          for (int j = 0; j < kTogether; j++) {
            const uint32_t w[4] = {b[j].x, b[j].y, b[j].z, b[j].w};
#pragma unroll
            for (int n = 0; n < 4; n++) {
              y[2 * n] = fmaf(s[j], __half2float(__ushort_as_half(static_cast<uint16_t>(w[n]))), y[2 * n]);
              y[2 * n + 1] = fmaf(s[j], __half2float(__ushort_as_half(static_cast<uint16_t>(w[n] >> 16))), y[2 * n + 1]);
            }
          }
        }
      }
      low += (part.rank + 15) / 16 * 16;
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 4; n++) {  // lane 4 t + q then has columns 4 q to 4 q + 3
      const float other = __shfl_xor_sync(~0u, odd ? y[n] : y[n + 4], 1);
      y[n] = (odd ? y[n + 4] : y[n]) + other;
    }
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int from = 4 * (2 * (lane & 3) + (k & 1)) + (lane >> 4) + 2 * (k >> 1);
#pragma unroll
      for (int n = 0; n < 4; n++)
        if (const float some = __shfl_sync(~0u, y[n], from); n == (lane >> 2 & 3)) v[k] = some;
    }
    return {v[0], v[1], v[2], v[3]};
  }
};
#endif

}  // namespace exl2nb
