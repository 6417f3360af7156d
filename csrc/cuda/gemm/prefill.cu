// Element-wise kernels of prefill, one pass over the rows each: norm (f32 to f16), gate, rotary embedding with cache write;
// and attention over several runs of keys put together.
#include "cuda/gemm/elementwise.h"

#include <cmath>
#include <type_traits>

#include "cuda/gemm/norm.cuh"
#include "format/pool.h"

namespace exl2nb {

// One CTA per token; rows up to 1024 * HELD numbers stay in registers, longer ones are read again.
template <int HELD>
__global__ void __launch_bounds__(kNormThreads, HELD > 4 ? 3 : 4) norm_rows(const __grid_constant__ NormRowsArgs a) {
  const float* const x = a.x + static_cast<int64_t>(blockIdx.x) * a.width;
  const auto at = [](int j) { return 4 * (static_cast<int>(threadIdx.x) + j * kNormThreads); };
  float4 v[HELD];
#pragma unroll
  for (int j = 0; j < HELD; j++) v[j] = at(j) < a.width ? written<true>(x, at(j), a.width) : float4{0, 0, 0, 0};
  const auto each = [&](auto take) {
#pragma unroll
    for (int j = 0; j < HELD; j++)
      if (at(j) < a.width) take(v[j], at(j));
    for (int i = at(HELD); i < a.width; i += 4 * kNormThreads) take(written<true>(x, i, a.width), i);
  };
  float mean = 0.f, factor = 1.f;
  if (a.weight) {
    float sum = 0.f;
    if (a.layer_norm) {
      each([&](float4 r, int) { sum += (r.x + r.y) + (r.z + r.w); });
      mean = cta_sum<kNormThreads>(sum) / a.width, sum = 0.f;
    }
    each([&](float4 r, int i) {  // ignore elements past the end
      const int left = a.width - i;
      sum += square_sum({r.x, left > 1 ? r.y : mean, left > 2 ? r.z : mean, left > 3 ? r.w : mean}, mean);
    });
    factor = rsqrtf(cta_sum<kNormThreads>(sum) / a.width + a.eps);
  }
  half* const out = static_cast<half*>(a.out) + static_cast<int64_t>(blockIdx.x) * a.width;
  each([&](float4 r, int i) {
    const float4 w = a.weight ? constant<true>(a.weight, i, a.width) : float4{1, 1, 1, 1};
    const float4 b = a.weight && a.bias ? constant<true>(a.bias, i, a.width) : float4{0, 0, 0, 0};
    const auto one = [&](float y, float w1, float b1) { return saturated(fmaf((y - mean) * factor, w1, b1)); };
    const half h[4] = {one(r.x, w.x, b.x), one(r.y, w.y, b.y), one(r.z, w.z, b.z), one(r.w, w.w, b.w)};
    if (a.width % 4 == 0) {
      *reinterpret_cast<uint2*>(out + i) = *reinterpret_cast<const uint2*>(h);
    } else {
      for (int k = 0; k < 4 && i + k < a.width; k++) out[i + k] = h[k];
    }
  });
}

// EIGHT: elements per thread, 8 or 1. Grid: columns along x, tokens along y.
template <int EIGHT>
__global__ void __launch_bounds__(kGateThreads)
    gate_rows(const half* __restrict__ y, int64_t tokens, int width, bool gated, int kind, half* __restrict__ out) {
  const int column = (blockIdx.x * kGateThreads + threadIdx.x) * EIGHT;
  if (column >= width) return;
  using Words = std::conditional_t<EIGHT == 8, uint4, half>;
  for (int64_t token = blockIdx.y; token < tokens; token += gridDim.y) {
    const half* const row = y + token * width * (gated ? 2 : 1) + column;
    alignas(16) half gate[EIGHT], up[EIGHT], made[EIGHT];
    *reinterpret_cast<Words*>(gate) = *reinterpret_cast<const Words*>(row);
    if (gated) *reinterpret_cast<Words*>(up) = *reinterpret_cast<const Words*>(row + width);
#pragma unroll
    for (int i = 0; i < EIGHT; i++) {
      const float v = activation(__half2float(gate[i]), kind);
      made[i] = saturated(gated ? v * __half2float(up[i]) : v);
    }
    *reinterpret_cast<Words*>(out + token * width + column) = *reinterpret_cast<const Words*>(made);
  }
}

// One thread: eight pairs of one head of a token.
__global__ void __launch_bounds__(kGateThreads) rotate_rows(const __grid_constant__ RotateRowsArgs a) {
  const int half_way = a.head_dim / 2, per = a.head_dim / 16, heads = a.num_heads + 2 * a.num_kv_heads;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kGateThreads + threadIdx.x, row = number / per;
  const int token = static_cast<int>(row / heads), head = static_cast<int>(row % heads), first = static_cast<int>(number % per) * 8;
  if (token >= a.tokens) return;
  half* const at = static_cast<half*>(a.qkv) + row * a.head_dim + first;
  alignas(16) half x[8], y[8];
  *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(at);
  *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(at + half_way);
  if (head < a.num_heads + a.num_kv_heads) {
    const int64_t angle = static_cast<int64_t>(a.positions[token]) * half_way + first;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float c = __ldg(a.cos + angle + i), s = __ldg(a.sin + angle + i), v = __half2float(x[i]), w = __half2float(y[i]);
      x[i] = saturated(v * c - w * s), y[i] = saturated(w * c + v * s);
    }
    *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(x);
    *reinterpret_cast<uint4*>(at + half_way) = *reinterpret_cast<const uint4*>(y);
  }
  if (head < a.num_heads) return;
  const int slot = a.slots[token];
  if (slot < 0) return;
  const bool is_key = head < a.num_heads + a.num_kv_heads;
  const int kv_head = head - a.num_heads - (is_key ? 0 : a.num_kv_heads);
  half* const pool = static_cast<half*>(is_key ? a.k_pool : a.v_pool);
  half* const to = pool + ((static_cast<int64_t>(slot / kPage) * a.num_kv_heads + kv_head) * kPage + slot % kPage) * a.head_dim + first;
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(x);
  *reinterpret_cast<uint4*>(to + half_way) = *reinterpret_cast<const uint4*>(y);
}

// One thread: eight dims of one head of a token.
__global__ void __launch_bounds__(kGateThreads) merge_parts(const __grid_constant__ MergePartsArgs a) {
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kGateThreads + threadIdx.x, row = number / (a.head_dim / 8);
  const int64_t token = row / a.heads, at = row % a.heads * a.tokens + token;
  if (token >= a.tokens) return;
  float most = -INFINITY, total = 0.f, y[8] = {};
  for (int p = 0; p < a.count; p++) most = fmaxf(most, __ldg(a.lse[p] + at));
  for (int p = 0; p < a.count; p++) {
    const float weight = expf(__ldg(a.lse[p] + at) - most);
    alignas(16) half x[8];
    *reinterpret_cast<uint4*>(x) = __ldcs(static_cast<const uint4*>(a.part[p]) + number);
    total += weight;
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = fmaf(weight, __half2float(x[i]), y[i]);
  }
  alignas(16) half made[8];
#pragma unroll
  for (int i = 0; i < 8; i++) made[i] = __float2half_rn(y[i] / total);
  static_cast<uint4*>(a.out)[number] = *reinterpret_cast<const uint4*>(made);
}

}  // namespace exl2nb
