// Decode kernel, third stage: the warps' results become the item's, the chunks' the row's; the row goes where it is read.
#pragma once
#include "attention_decode_state.cuh"

namespace exl2nb {

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ int64_t Decode<KF, VF, D, NT>::part_row(int r) const {
  const int row = it.part_token() + sh.token[r] - it.first_token;
  return (static_cast<int64_t>(row) * p.a.cache.num_heads + sh.head[r]) * max_splits(p.a.cache.num_kv_heads);
}

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ float Decode<KF, VF, D, NT>::highest(int r) const {
  float high = sh.max[0][r];
#pragma unroll
  for (int w = 1; w < kWarps; w++) high = fmaxf(high, sh.max[w][r]);
  return high;
}

// The warps' results to sh.joined and sh.inverse_sum where there is one chunk, else to the workspace.
template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::join_warps() {
  const bool single = it.chunks.count == 1;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float sum = row_sum[n][j];
#pragma unroll
      for (int i = 4; i < 32; i *= 2) sum += __shfl_xor_sync(kAll, sum, i);
      if (g == 0) sh.max[warp][n * 8 + 2 * t + j] = row_max[n][j], sh.sum[warp][n * 8 + 2 * t + j] = sum;
    }
#pragma unroll
  for (int n = 0; n < NT; n++) {
    if (n * 8 >= rows) break;
    __syncthreads();  // maxima are there; nobody reads the inputs or the former rows any more
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int r = 2 * t + j;
      if (n * 8 + r >= rows) continue;
      const float f = exp2_fast(row_max[n][j] - highest(n * 8 + r));
      static_for<D / 16>([&](auto tile) {
        constexpr int I = decltype(tile)::value, first = Value::fixed_dim(I), dims = Value::lane_dims(I);
        *reinterpret_cast<float2*>(&sh.o[warp][r][first + g * dims]) = make_float2(o[n][I][j] * f, o[n][I][2 + j] * f);
      });
    }
    __syncthreads();
    const int vectors = min(rows - n * 8, 8) * (D / 4);
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
      const int r = i / (D / 4), d = i % (D / 4) * 4;
      float4 x = *reinterpret_cast<const float4*>(&sh.o[0][r][d]);
#pragma unroll
      for (int w = 1; w < kWarps; w++) {
        const float4 y = *reinterpret_cast<const float4*>(&sh.o[w][r][d]);
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      }
      const int64_t at = single ? 0 : part_row(n * 8 + r) + it.chunk;
      *reinterpret_cast<float4*>(single ? &sh.joined[n * 8 + r][d] : p.part + at * D + d) = x;
      if (d == 0) {
        const float high = highest(n * 8 + r);
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; w++) sum = fmaf(sh.sum[w][n * 8 + r], exp2_fast(sh.max[w][n * 8 + r] - high), sum);
        if (single) sh.inverse_sum[n * 8 + r] = __fdividef(1.f, sum);
        if (!single) p.part_ml[at] = make_float2(high, sum);
      }
    }
  }
}

// Whether this CTA is the last of the item's chunks; all of them are in memory then.
template <int KF, int VF, int D, int NT>
__device__ __forceinline__ bool Decode<KF, VF, D, NT>::comes_last() const {
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t at = (static_cast<int64_t>(it.part_token()) * p.blocks_per_token + it.block) * p.a.cache.num_kv_heads + it.kv_head;
    __threadfence();                                                                          // what the barrier has gathered goes before
    sh.last = atomicInc(p.count + at, it.chunks.count - 1) == unsigned(it.chunks.count - 1);  // back to 0 with the last one
    __threadfence();
  }
  __syncthreads();
  return sh.last;
}

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::join_row(int r, int n) {
  constexpr int kVectors = (D + 127) / 128, kAhead = 16 / kVectors;  // loads in flight
  const int64_t at = part_row(r);
  const float4* from = reinterpret_cast<const float4*>(p.part + at * D) + lane;
  float4 x[kAhead][kVectors], acc[kVectors];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int s = 0; s < kAhead; s++)
#pragma unroll
      for (int j = 0; j < kVectors; j++) {
        x[s][j] = make_float4(0, 0, 0, 0);
        if (first + s < n && lane + 32 * j < D / 4) x[s][j] = __ldcg(from + (first + s) * (D / 4) + 32 * j);
      }
  };
  fetch(0);
  const float2 none = make_float2(kLowest, 0.f);
  const float2 a = lane < n ? __ldcg(p.part_ml + at + lane) : none, b = lane + 32 < n ? __ldcg(p.part_ml + at + lane + 32) : none;
  float high = fmaxf(a.x, b.x);
#pragma unroll
  for (int i = 16; i; i /= 2) high = fmaxf(high, __shfl_xor_sync(kAll, high, i));
  const float fa = exp2_fast(a.x - high), fb = exp2_fast(b.x - high), sum = warp_sum(a.y * fa + b.y * fb);
#pragma unroll
  for (int j = 0; j < kVectors; j++) acc[j] = make_float4(0, 0, 0, 0);
#pragma unroll 1
  for (int first = 0; first < n; first += kAhead) {
#pragma unroll
    for (int s = 0; s < kAhead; s++) {
      const float f = __shfl_sync(kAll, first < 32 ? fa : fb, (first + s) % 32);  // 0 past the last chunk
#pragma unroll
      for (int j = 0; j < kVectors; j++) {
        acc[j].x = fmaf(f, x[s][j].x, acc[j].x), acc[j].y = fmaf(f, x[s][j].y, acc[j].y);
        acc[j].z = fmaf(f, x[s][j].z, acc[j].z), acc[j].w = fmaf(f, x[s][j].w, acc[j].w);
      }
    }
    if (first + kAhead < n) fetch(first + kAhead);
  }
  if (lane == 0) sh.inverse_sum[r] = __fdividef(1.f, sum);
#pragma unroll
  for (int j = 0; j < kVectors; j++)
    if (lane + 32 * j < D / 4) reinterpret_cast<float4*>(sh.joined[r])[lane + 32 * j] = acc[j];
}

// The CTA that comes last joins the chunks; then the result goes where it is read.
template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::finish() {
  if (it.chunks.count > 1 && !comes_last()) return;
  const AttentionOut& to = p.a.to;
  const int numbers = rows * D;
  int stored[kPerThread];  // of the first copy, fetched early
#pragma unroll
  for (int i = 0; i < kPerThread; i++) {
    const int at = threadIdx.x + i * kThreads;
    if (at < numbers) stored[i] = sh.head[at / D] * D + at % D;
    if (at < numbers && to.num_perms && to.inverse[0]) stored[i] = to.inverse[0][stored[i]];
  }
  if (it.chunks.count > 1)
    for (int r = warp; r < rows; r += kWarps) join_row(r, it.chunks.count);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerThread; i++) {
    const int at = threadIdx.x + i * kThreads, r = at / D, d = at % D;
    if (i * kThreads >= numbers) break;
    const bool inside = at < numbers;
    float x = inside ? sh.joined[r][d] * sh.inverse_sum[r] : 0.f;
    if constexpr (is_rotated(VF)) x = hadamard<scale_group(D)>(x);
    if (!inside) continue;
    const int64_t token = sh.token[r];
    if (to.num_perms) static_cast<half*>(to.x)[token_place(to.group, to.x_stride, token) + row_place(to.group, stored[i])] = saturated(x);
    if (to.num_perms > 1 || to.out) others(token, sh.head[r] * D + d, x);
  }
}

template <int KF, int VF, int D, int NT>
__device__ __forceinline__ void Decode<KF, VF, D, NT>::others(int64_t token, int feature, float x) const {  // further copies
  const AttentionOut& to = p.a.to;
  if (to.out) to.out[token * p.a.cache.num_heads * D + feature] = x;
  for (int copy = 1; copy < to.num_perms; copy++) {
    const int stored = to.inverse[copy] ? to.inverse[copy][feature] : feature;
    static_cast<half*>(
        to.x)[static_cast<int64_t>(copy) * to.x_perm_stride + token_place(to.group, to.x_stride, token) + row_place(to.group, stored)] =
        saturated(x);
  }
}

}  // namespace exl2nb
