// What a prompt needs between torch's matrix products, each in one pass over its rows: a norm in f32 that leaves f16, and a gate.
#include "prefill.h"

#include <algorithm>
#include <type_traits>

#include "device.cuh"
#include "norm.cuh"

namespace exl2nb {
namespace {

struct NormRows {
  RowSource from;
  half* out;
};

// A CTA per token.
__global__ void __launch_bounds__(kRowThreads) norm_rows(const __grid_constant__ NormRows a) {
  __shared__ RowSums sums;
  const NormArgs& n = a.from.norm;
  Row row;
  row.load<true>(a.from, blockIdx.x, false, sums);
  half* const out = a.out + static_cast<int64_t>(blockIdx.x) * n.width;
  row.norm<true>(n, a.from.x + static_cast<int64_t>(blockIdx.x) * n.width, sums, [&](int i, float4 v) {
    const half h[4] = {saturated(v.x), saturated(v.y), saturated(v.z), saturated(v.w)};
    if (n.width % 4 == 0) {
      *reinterpret_cast<uint2*>(out + i) = *reinterpret_cast<const uint2*>(h);
    } else {
      for (int k = 0; k < 4 && i + k < n.width; k++) out[i + k] = h[k];
    }
  });
}

constexpr int kGateThreads = 256, kPage = 256;

// EIGHT: numbers of a thread, eight or one. Columns along x, tokens along y and on.
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

template <int EIGHT>
const char* launch_gate(const half* y, int64_t tokens, int width, bool gated, int kind, half* out, cudaStream_t stream) {
  const int per = kGateThreads * EIGHT;
  const dim3 grid((width + per - 1) / per, static_cast<unsigned>(std::min<int64_t>(tokens, 65535)));
  gate_rows<EIGHT><<<grid, kGateThreads, 0, stream>>>(y, tokens, width, gated, kind, out);
  return error_text(cudaGetLastError());
}

// A thread: eight pairs of a token's head.
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

}  // namespace

const char* norm_rows_launch(const NormRowsArgs& args, void* stream) {
  if (args.tokens == 0) return nullptr;
  NormRows a{};
  const int kind = !args.weight ? kNoNorm : args.layer_norm ? kLayerNorm : kRmsNorm;
  a.from.x = args.x, a.from.norm = {kind, args.width, args.eps, args.weight, args.bias}, a.out = static_cast<half*>(args.out);
  norm_rows<<<static_cast<unsigned>(args.tokens), kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return error_text(cudaGetLastError());
}

const char* gate_rows_launch(const void* y, int64_t tokens, int width, bool gated, int kind, void* out, void* stream) {
  if (tokens == 0) return nullptr;
  const auto* from = static_cast<const half*>(y);
  auto* to = static_cast<half*>(out);
  const auto queue = static_cast<cudaStream_t>(stream);
  const bool eights = ((reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(out)) & 15) == 0 && width % 8 == 0;
  return eights ? launch_gate<8>(from, tokens, width, gated, kind, to, queue) : launch_gate<1>(from, tokens, width, gated, kind, to, queue);
}

const char* rotate_rows_launch(const RotateRowsArgs& a, void* stream) {
  if (a.tokens == 0) return nullptr;
  const int64_t threads = a.tokens * (a.num_heads + 2 * a.num_kv_heads) * (a.head_dim / 16);
  const auto blocks = static_cast<unsigned>((threads + kGateThreads - 1) / kGateThreads);
  rotate_rows<<<blocks, kGateThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return error_text(cudaGetLastError());
}

}  // namespace exl2nb
