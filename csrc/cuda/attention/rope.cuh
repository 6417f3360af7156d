// A row of q, k or v before attention: clip, norm, RoPE. A warp owns a row; lane l holds dims l, l + 32, ... in slots.
#pragma once
#include "cuda/attention/cache_format.cuh"
#include "cuda/runtime/lamport.cuh"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

constexpr int kMaxHeadDim = 256;

#ifdef __CUDACC__
// Cosines and sines of one position, in the slots of a row.
template <int SLOTS>
struct CosSin {
  float c[SLOTS], s[SLOTS];
  __device__ __forceinline__ void load(const RopeArgs& rope, int position) {
    if (!rope.cos || rope.half <= 0) return;
    const int64_t row = static_cast<int64_t>(position) * rope.half;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
      const int d = threadIdx.x % 32 + 32 * i, at = rope.interleaved ? d / 2 : d < rope.half ? d : d - rope.half;
      c[i] = 1.f, s[i] = 0.f;
      if (d < 2 * rope.half) c[i] = rope.cos[row + at], s[i] = rope.sin[row + at];
    }
  }
};

template <int SLOTS>
struct Row {  // SLOTS * 32 >= D
  float x[SLOTS];

  __device__ __forceinline__ void load(const float* from, int D) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) x[i] = lane + 32 * i < D ? __ldcg(from + lane + 32 * i) : 0.f;
  }
  // Polls until all of the row is written (Lamport flags), and of another row, if given.
  __device__ __forceinline__ void poll_rest(const float* from, int D, Row* other = nullptr, const float* other_from = nullptr) {
    const int lane = threadIdx.x % 32;
    for (;;) {
      bool missing = false;
#pragma unroll
      for (int i = 0; i < SLOTS; i++) missing |= lane + 32 * i < D && (!is_written(x[i]) || (other_from && !is_written(other->x[i])));
      if (!__any_sync(kAll, missing)) return;
#pragma unroll
      for (int i = 0; i < SLOTS; i++) {
        if (lane + 32 * i >= D) continue;
        x[i] = ld_relaxed(from + lane + 32 * i);
        if (other_from) other->x[i] = ld_relaxed(other_from + lane + 32 * i);
      }
    }
  }
  __device__ __forceinline__ void clip(float limit) {
    if (limit == 0.f) return;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) x[i] = fminf(fmaxf(x[i], -limit), limit);
  }
  // weight: (D,).
  __device__ __forceinline__ void norm(const float* weight, float eps, bool layer, int D) {
    const int lane = threadIdx.x % 32;
    float w[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; i++) w[i] = lane + 32 * i < D ? weight[lane + 32 * i] : 0.f;
    if (layer) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < SLOTS; i++) sum += x[i];
      const float mean = warp_sum(sum) / D;
#pragma unroll
      for (int i = 0; i < SLOTS; i++) x[i] = lane + 32 * i < D ? x[i] - mean : 0.f;
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) squares = fmaf(x[i], x[i], squares);
    const float factor = rsqrtf(warp_sum(squares) / D + eps);
#pragma unroll
    for (int i = 0; i < SLOTS; i++) x[i] *= factor * w[i];
  }
  // RoPE. scratch: D floats of shared memory, the warp's own.
  __device__ __forceinline__ void rotate(const CosSin<SLOTS>& cos_sin, const RopeArgs& rope, float* scratch, int D) {
    if (!rope.cos || rope.half <= 0) return;
    const int lane = threadIdx.x % 32, half = rope.half;
    if constexpr (SLOTS % 2 == 0) {
      if (!rope.interleaved && half == SLOTS * 16 && D == SLOTS * 32) {  // both numbers of a pair are in one lane
#pragma unroll
        for (int i = 0; i < SLOTS / 2; i++) {
          const float a = x[i], b = x[i + SLOTS / 2];
          x[i] = a * cos_sin.c[i] + -b * cos_sin.s[i], x[i + SLOTS / 2] = b * cos_sin.c[i + SLOTS / 2] + a * cos_sin.s[i + SLOTS / 2];
        }
        return;
      }
    }
    store(scratch, D);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
      const int d = lane + 32 * i;
      if (d < 2 * half) {
        const bool first = rope.interleaved ? d % 2 == 0 : d < half;
        const float other = scratch[rope.interleaved ? d ^ 1 : first ? d + half : d - half];
        x[i] = x[i] * cos_sin.c[i] + (first ? -other : other) * cos_sin.s[i];
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void store(float* to, int D) const {
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
      if (threadIdx.x % 32 + 32 * i < D) to[threadIdx.x % 32 + 32 * i] = x[i];
  }
};

// Clip, norm and RoPE of head `head` of q or k; v is only clipped.
template <int SLOTS>
__device__ __forceinline__ void prepare(Row<SLOTS>& row, const RopeArgs& rope, const float* norm, int head, const CosSin<SLOTS>& cos_sin,
                                        float* scratch, int D) {
  if (!rope.norm_whole) row.clip(rope.clip);
  if (norm && !rope.norm_whole) row.norm(norm + (rope.norm_per_head ? head * D : 0), rope.eps, rope.layer_norm, D);
  row.rotate(cos_sin, rope, scratch, D);
}

#endif  // __CUDACC__

}  // namespace exl2nb
