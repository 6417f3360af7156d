// One row of q, k or v in a warp: clip, norm, rotation, Hadamard transform, storage. Lane l holds dims l, l + 32, ... of the row.
#pragma once
#include <cuda_fp8.h>

#include "cuda/attention/cache_format.cuh"
#include "cuda/runtime/announced.cuh"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

constexpr int kMaxHeadDim = 256;
constexpr unsigned kAll = 0xffffffffu;

// Programmatic dependent launch: let the successor start; wait for the predecessor. Nothing where the hardware has neither.
__device__ __forceinline__ void let_successor_start() { pdl_launch_dependents(); }
__device__ __forceinline__ void wait_for_predecessor() { pdl_wait(); }

// Cosines and sines of one position, dealt like a row.
template <int SLOTS>
struct Turn {
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
  // Again until all of it is there, and of another row, if there is one.
  __device__ __forceinline__ void await_rest(const float* from, int D, Row* other = nullptr, const float* other_from = nullptr) {
    const int lane = threadIdx.x % 32;
    for (;;) {
      bool missing = false;
#pragma unroll
      for (int i = 0; i < SLOTS; i++) missing |= lane + 32 * i < D && (!is_there(x[i]) || (other_from && !is_there(other->x[i])));
      if (!__any_sync(kAll, missing)) return;
#pragma unroll
      for (int i = 0; i < SLOTS; i++) {
        if (lane + 32 * i >= D) continue;
        x[i] = load_now(from + lane + 32 * i);
        if (other_from) other->x[i] = load_now(other_from + lane + 32 * i);
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
  // scratch: D floats of shared memory that belong to the warp.
  __device__ __forceinline__ void rotate(const Turn<SLOTS>& turn, const RopeArgs& rope, float* scratch, int D) {
    if (!rope.cos || rope.half <= 0) return;
    const int lane = threadIdx.x % 32, half = rope.half;
    if constexpr (SLOTS % 2 == 0) {
      if (!rope.interleaved && half == SLOTS * 16 && D == SLOTS * 32) {  // both of a pair are in the same lane
#pragma unroll
        for (int i = 0; i < SLOTS / 2; i++) {
          const float a = x[i], b = x[i + SLOTS / 2];
          x[i] = a * turn.c[i] + -b * turn.s[i], x[i + SLOTS / 2] = b * turn.c[i + SLOTS / 2] + a * turn.s[i + SLOTS / 2];
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
        x[i] = x[i] * turn.c[i] + (first ? -other : other) * turn.s[i];
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

// N numbers per lane, of N groups of G neighbouring lanes each, go through the same steps side by side: their latencies overlap.
template <int N>
using Numbers = float[N];

// Walsh-Hadamard transform over sqrt(G) of G neighbouring lanes; its own inverse. Rounded like the format's: no fused multiply-add.
template <int G, int N>
__device__ __forceinline__ void hadamard(Numbers<N>& v) {
  static_assert(G == 8 || G == 16 || G == 32, "a group of the cache");
#pragma unroll
  for (int i = 1; i < G; i *= 2)
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float other = __shfl_xor_sync(kAll, v[n], i);
      v[n] = threadIdx.x & i ? __fsub_rn(other, v[n]) : __fadd_rn(v[n], other);
    }
#pragma unroll
  for (int n = 0; n < N; n++) v[n] = __fmul_rn(v[n], G == 32 ? 0.17677669529663687f : G == 16 ? 0.25f : 0.35355339059327373f);
}
template <int G>
__device__ __forceinline__ float hadamard(float v) {
  Numbers<1> one = {v};
  hadamard<G, 1>(one);
  return one[0];
}
// Sum over G neighbouring lanes in the format's order; the largest.
template <int G, int N>
__device__ __forceinline__ void tree(Numbers<N>& v) {
#pragma unroll
  for (int i = 1; i < G; i *= 2)
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = __fadd_rn(v[n], __shfl_xor_sync(kAll, v[n], i));
}
template <int G, int N>
__device__ __forceinline__ void group_max(Numbers<N>& v) {
#pragma unroll
  for (int i = 1; i < G; i *= 2)
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = fmaxf(v[n], __shfl_xor_sync(kAll, v[n], i));
}

// A group's scale and this lane's code, by cache/FORMAT.md, "Encoding", step for step.
struct Coded {
  half scale;
  int code;
};
__device__ __forceinline__ float as_half(float v) { return __half2float(__float2half_rn(v)); }
// 1 / scale to nearest, without a branch: a scale is an fp16 number, so neither it nor its inverse is subnormal.
__device__ __forceinline__ float inverse_of(float scale) {
  float r;
  asm("rcp.approx.f32 %0,%1;" : "=f"(r) : "f"(scale));
  return scale == 0.f ? 0.f : fmaf(r, fmaf(-scale, r, 1.f), r);
}
template <int BITS>
__device__ __forceinline__ float level(float g, float scale) {  // code - z
  constexpr float z = BITS == 8 ? 127.5f : 7.f;
  return fminf(fmaxf(rintf(__fadd_rn(__fmul_rn(g, inverse_of(scale)), z)), 0.f), (1 << BITS) - 1.f) - z;
}
__device__ __forceinline__ float squared_error(float g, float scale) {
  const float d = __fsub_rn(g, __fmul_rn(level<4>(g, scale), scale));
  return __fmul_rn(d, d);
}
__device__ __forceinline__ float candidate(float largest, int k) {
  constexpr float parts[8] = {float(21 / 160.0), float(20 / 160.0), float(19 / 160.0), float(18 / 160.0),
                              float(17 / 160.0), float(16 / 160.0), float(15 / 160.0), float(14 / 160.0)};
  const float low = k & 1 ? (k & 2 ? parts[3] : parts[1]) : (k & 2 ? parts[2] : parts[0]);
  const float high = k & 1 ? (k & 2 ? parts[7] : parts[5]) : (k & 2 ? parts[6] : parts[4]);
  return as_half(__fmul_rn(largest, k & 4 ? high : low));
}
// Eight sums over G lanes in the order of `tree`, together: at 1, 2 and 4 a lane keeps half of its sums and gives the other half away. Then
// the lanes whose lowest bits are b hold the sum of candidate 4 * (b & 1) + (b & 2) + (b >> 2).
template <int G, int N>
__device__ __forceinline__ void search_scales(const Numbers<N>& g, const Numbers<N>& largest, Numbers<N>& scale) {
  const int lane = threadIdx.x % 32;
  float e[N][8];
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int k = 0; k < 8; k++) e[n][k] = squared_error(g[n], candidate(largest[n], k));
#pragma unroll
  for (int h = 1, half_of = 4; h < 8; h *= 2, half_of /= 2) {
    const bool upper = lane & h;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int k = 0; k < half_of; k++) {
        const float given = __shfl_xor_sync(kAll, upper ? e[n][k] : e[n][k + half_of], h);
        e[n][k] = __fadd_rn(upper ? e[n][k + half_of] : e[n][k], given);
      }
  }
  Numbers<N> least, over, under, error;
  int first[N];
#pragma unroll
  for (int n = 0; n < N; n++) least[n] = e[n][0], first[n] = 4 * (lane & 1) + (lane & 2) + (lane >> 2 & 1);
#pragma unroll
  for (int h = 8; h < G; h *= 2)
#pragma unroll
    for (int n = 0; n < N; n++) least[n] = __fadd_rn(least[n], __shfl_xor_sync(kAll, least[n], h));
#pragma unroll
  for (int h = 1; h < 8; h *= 2)
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float other = __shfl_xor_sync(kAll, least[n], h);
      const int k = __shfl_xor_sync(kAll, first[n], h);
      if (other < least[n] || (other == least[n] && k < first[n])) least[n] = other, first[n] = k;
    }
#pragma unroll
  for (int n = 0; n < N; n++) {
    scale[n] = candidate(largest[n], first[n]);
    const float c = level<4>(g[n], scale[n]);
    over[n] = __fmul_rn(g[n], c), under[n] = __fmul_rn(c, c);
  }
  tree<G, N>(over);
  tree<G, N>(under);
#pragma unroll
  for (int n = 0; n < N; n++) {
    over[n] = under[n] == 0.f ? 0.f : as_half(__fdiv_rn(over[n], under[n]));
    error[n] = squared_error(g[n], over[n]);
  }
  tree<G, N>(error);
#pragma unroll
  for (int n = 0; n < N; n++)
    if (error[n] < least[n]) scale[n] = over[n];
}
// x rounded to fp16 first, unless the cache is f32. Plain formats: the number's own bits as code. 4 bits: an even lane has its neighbour's
// code too, as it is stored.
template <int FORMAT, int G, int N>
__device__ __forceinline__ void encode(const Numbers<N>& x, Coded (&out)[N]) {
  if constexpr (FORMAT == kCacheF32 || FORMAT == kCacheF16) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      out[n].scale = __ushort_as_half(0);
      out[n].code = FORMAT == kCacheF32 ? __float_as_int(x[n]) : __half_as_ushort(__float2half_rn(x[n]));
    }
  } else {
    Numbers<N> g, hi, lo, broken, scale;
#pragma unroll
    for (int n = 0; n < N; n++) g[n] = as_half(x[n]);
    if constexpr (is_rotated(FORMAT)) hadamard<G, N>(g);
#pragma unroll
    for (int n = 0; n < N; n++) hi[n] = g[n], lo[n] = -g[n], broken[n] = isfinite(g[n]) ? 0.f : 1.f;
    group_max<G, N>(hi);
    group_max<G, N>(lo);
    group_max<G, N>(broken);
    if constexpr (FORMAT == kCacheQ4) {
      Numbers<N> largest;
#pragma unroll
      for (int n = 0; n < N; n++) largest[n] = hi[n] >= lo[n] ? hi[n] : -lo[n];
      search_scales<G, N>(g, largest, scale);
    } else {
#pragma unroll
      for (int n = 0; n < N; n++)
        scale[n] = as_half(__fmul_rn(fmaxf(hi[n], lo[n]), FORMAT == kCacheFp8 ? float(1 / 448.0) : float(1 / 127.5)));
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      out[n].scale = __float2half_rn(scale[n] == 0.f ? 0.f : scale[n]);  // never -0: bytes are compared
      if constexpr (FORMAT == kCacheFp8) {
        const float v = fminf(fmaxf(__fmul_rn(g[n], inverse_of(scale[n])), -448.f), 448.f);
        out[n].code = __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
      } else if constexpr (FORMAT == kCacheQ8) {
        out[n].code = static_cast<int>(level<8>(g[n], scale[n]) + 127.5f);
      } else {
        out[n].code = static_cast<int>(level<4>(g[n], scale[n]) + 7.f);
      }
      if (broken[n] != 0.f) out[n].scale = __ushort_as_half(0x7e00), out[n].code = 0;
      if constexpr (FORMAT == kCacheQ4) out[n].code |= __shfl_down_sync(kAll, out[n].code, 1) << 4;
    }
  }
}
template <int FORMAT, int G>
__device__ __forceinline__ Coded encode(float x) {
  Coded out[1];
  encode<FORMAT, G, 1>({x}, out);
  return out[0];
}
// Dim d of a row into the row's codes and scales.
template <int FORMAT, int G>
__device__ __forceinline__ void put(const Coded& made, int d, uint8_t* codes, uint8_t* scales) {
  if constexpr (FORMAT == kCacheF32) {
    reinterpret_cast<int*>(codes)[d] = made.code;
  } else if constexpr (FORMAT == kCacheF16) {
    reinterpret_cast<uint16_t*>(codes)[d] = static_cast<uint16_t>(made.code);
  } else {
    if (d % G == 0) reinterpret_cast<half*>(scales)[d / G] = made.scale;
    if (FORMAT != kCacheQ4) codes[d] = static_cast<uint8_t>(made.code);
    if (FORMAT == kCacheQ4 && d % 2 == 0) codes[d / 2] = static_cast<uint8_t>(made.code);
  }
}

// What `row` becomes on its way into q or k, number `head` of its kind; v is only clipped.
template <int SLOTS>
__device__ __forceinline__ void prepare(Row<SLOTS>& row, const RopeArgs& rope, const float* norm, int head, const Turn<SLOTS>& turn,
                                        float* scratch, int D) {
  if (!rope.norm_whole) row.clip(rope.clip);
  if (norm && !rope.norm_whole) row.norm(norm + (rope.norm_per_head ? head * D : 0), rope.eps, rope.layer_norm, D);
  row.rotate(turn, rope, scratch, D);
}

}  // namespace exl2nb
