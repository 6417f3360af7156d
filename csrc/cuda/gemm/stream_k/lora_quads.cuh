// Adapters in a stream-K GEMM. The launch before, lora_sums of lora.cu, runs beside it: it waits for the kernel before both, says so and
// makes the sums of x a. In the epilogue a warp that finishes a strip and 8 rows adds the sums times its 16 columns of b, ahead of the norm
// factor.
#pragma once
#include "cuda/gemm/lora.h"
#include "cuda/runtime/lamport.cuh"
#include "cuda/runtime/pdl.cuh"
#include "format/gpu_workspace.h"

namespace exl2nb {

struct StreamKLora {
  LoraRows of;
  const float* low;  // scaled sums of x a: [row][width], of all parts
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
  __device__ __forceinline__ void end(uint64_t*, int) const {}
  __device__ __forceinline__ void wait_for_sums(uint64_t*) const {}
};
struct LoraQuads {
  static constexpr bool kAny = true;
  const StreamKLora& L;

  // Instead of griddepcontrol.wait: a warp watches `begun`, the others wait at a barrier of the CTA. The next kernel may start only then:
  // when it does, the one before lora_sums is complete, whose place of `begun` is used again. When the warp has nothing else to do it waits
  // for lora_sums itself, for the epilogue and as this kernel may not be complete before that one. Barriers: [sums are there][begun].
  __device__ __forceinline__ void prepare(uint64_t* barriers) const {
    if (threadIdx.x < 2) barrier_init(barriers + threadIdx.x, kWarpArrivals), barrier_fence();
  }
  __device__ __forceinline__ void watch(uint64_t* barriers, int lane) const {
    if (lane == 0)  // an acquire would drop L1 each time; what is read from here on comes from L2
      while (!ld_relaxed(L.begun)) {}
    __syncwarp();
    asm volatile("fence.proxy.async.global;" ::: "memory");
    warp_arrive(barriers + 1, lane);
    pdl_launch_dependents();
  }
  __device__ __forceinline__ void wait(uint64_t* barriers) const { barrier_wait(barriers + 1, 0); }
  __device__ __forceinline__ void end(uint64_t* barriers, int lane) const {
    pdl_wait();
    __syncwarp();
    warp_arrive(barriers, lane);
  }
  __device__ __forceinline__ void wait_for_sums(uint64_t* barriers) const { barrier_wait(barriers, 0); }
  // By all consumer warps before there is something to do: b into the L2 cache, the tables' words for `of` into L1.
  __device__ __forceinline__ void touch(int tokens, int warp, int lane) const {
    for (int row = warp; row < tokens; row += kStreamKStrips) lora_prefetch<true>(L.of, row, 0, lane);
  }
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
          for (int j = 0; j < kTogether; j++) lora_multiply(s[j], b[j], y);
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
