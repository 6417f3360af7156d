// Adapters in a stream-K GEMM. The launch before, lora_sums of lora.cu, runs beside it: it waits for the kernel before both, says so, makes
// the sums of x a and brings b to the L2 cache. In the epilogue a warp that finishes a strip and 8 rows adds the sums times its 16 columns
// of b, ahead of the norm factor.
#pragma once
#include "cuda/gemm/lora.h"
#include "cuda/runtime/lamport.cuh"
#include "cuda/runtime/pdl.cuh"
#include "format/gpu_workspace.h"

namespace exl2nb {

struct StreamKLora {
  LoraRows of;
  const float* low;  // scaled sums of x a: [row][width], of all parts, with Lamport flags
  int width;
  const unsigned* begun;  // 1: x is there
};

#ifdef __CUDACC__
// What a kernel is made with: adapters, or none, which is no code.
struct NoQuads {
  static constexpr bool kAny = false;
  __device__ __forceinline__ void prepare(uint64_t*) const { pdl_launch_dependents(); }
  __device__ __forceinline__ void watch(uint64_t*, int) const { pdl_wait(); }
  __device__ __forceinline__ void wait(uint64_t*) const { pdl_wait(); }
  __device__ __forceinline__ void touch(int, int, int) const {}
  __device__ __forceinline__ void end() const {}
};
struct LoraQuads {
  static constexpr bool kAny = true;
  const StreamKLora& L;

  // Instead of griddepcontrol.wait: a warp watches `begun`, the others wait at a barrier of the CTA. The next kernel may start only then:
  // when it does, the one before lora_sums is complete, whose places are used again. end: lora_sums is complete when this kernel is.
  __device__ __forceinline__ void prepare(uint64_t* barrier) const {
    if (threadIdx.x == 0) barrier_init(barrier, kWarpArrivals), barrier_fence();
  }
  __device__ __forceinline__ void watch(uint64_t* barrier, int lane) const {
    if (lane == 0)
      while (!ld_acquire(L.begun)) {}
    __syncwarp();
    asm volatile("fence.proxy.async.global;" ::: "memory");
    warp_arrive(barrier, lane);
    pdl_launch_dependents();
  }
  __device__ __forceinline__ void wait(uint64_t* barrier) const { barrier_wait(barrier, 0); }
  __device__ __forceinline__ void end() const { pdl_wait(); }
  // The tables' words for `of` into the L1 cache, before there is something to do: by all consumer warps.
  __device__ __forceinline__ void touch(int tokens, int warp, int lane) const {
    for (int row = warp; row < tokens; row += kStreamKStrips)
      if (const LoraChange* const change = L.of.of(row); change && lane * 32 < change->num_parts * int(sizeof(LoraPart)))
        prefetch_word(reinterpret_cast<const uint8_t*>(change->parts) + lane * 32);
  }

  static __device__ __forceinline__ bool all_written(const float4& v) {
    return is_written(v.x) && is_written(v.y) && is_written(v.z) && is_written(v.w);
  }
  // What is added, in the order of a Quad (stream_k_gemm.cuh), to 16 columns of y from `column` on and 8 rows from `first` on. Called by
  // whole warps. Lane 4 t + 2 h + b takes row t, columns 8 h to 8 h + 7 and every other eight ranks from the b-th on.
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
#pragma unroll 1
        for (int r0 = 8 * odd; r0 < part.rank; r0 += 16) {
          uint4 b[8];
#pragma unroll
          for (int j = 0; j < 8; j++) {
            b[j] = uint4{0, 0, 0, 0};
            if (r0 + j < part.rank) b[j] = __ldg(reinterpret_cast<const uint4*>(part.b + (r0 + j) * part.columns + at));
          }
          float4 s[2];
          do {  // lora_sums writes zeros behind the rank
            s[0] = ld_relaxed4(low + r0), s[1] = ld_relaxed4(low + r0 + 4);
          } while (!all_written(s[0]) || !all_written(s[1]));
#pragma unroll
          for (int j = 0; j < 8; j += 4) {
            const float4 v = s[j / 4];
            lora_multiply(v.x, b[j], y), lora_multiply(v.y, b[j + 1], y), lora_multiply(v.z, b[j + 2], y), lora_multiply(v.w, b[j + 3], y);
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
