// The small kernels around the matrix products: embedding, and rows with what is added to them and their norms. One CTA per token.
#include "cuda/gemm/elementwise.h"

namespace exl2nb {

__device__ float element(const void* table, int dtype, size_t i) {
  if (dtype == 0) return static_cast<const float*>(table)[i];
  if (dtype == 1) return __half2float(static_cast<const half*>(table)[i]);
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(table)[i]) << 16);
}

// Where numbers i to i + 3 go in a matrix's input, brought near.
__device__ __forceinline__ void touch(const MatrixInput& next, int i) {
  for (int p = 0; p < next.num_perms; p++)
    if (next.inverse[p]) prefetch_line(next.inverse[p] + i);
}
// What the norm's row needs that no kernel writes.
__device__ __forceinline__ void near(const MatrixInput& next, const NormArgs& n) {
#pragma unroll
  for (int j = 0; j < kHeld; j++) {
    const int i = Row::place(j);
    if (i >= n.width) return;
    touch(next, i);
    if (n.weight) prefetch_line(n.weight + i);
  }
}
// The row's norm into row `token` of a matrix's input.
__device__ __forceinline__ void normed(Row& row, const NormArgs& n, const float* tail, int token, const MatrixInput& next, RowSums& sums) {
  row.norm<true>(n, tail, sums, [&](int i, float4 v) { put_input<true>(next, token, i, n.width, v); });
}

__global__ void __launch_bounds__(kRowThreads) embed_kernel(const __grid_constant__ EmbedArgs a) {
  __shared__ RowSums sums;
  if (a.next.x) near(a.next, a.norm);
  pdl_wait();  // before others may start, so that no later kernel of this step runs beside the previous step
  pdl_launch_dependents();
  const int token = blockIdx.x;
  int id = __ldcg(a.ids + token), position = a.position_table ? __ldcg(a.positions + token) : 0;
  id = min(max(id, 0), a.vocab - 1), position = min(max(position, 0), a.max_positions - 1);
  float* const x = a.x + static_cast<size_t>(token) * a.width;
  const auto load = [&](int i) {
    if (i >= a.width) return 0.f;
    const float v = element(a.table, a.dtype, static_cast<size_t>(id) * a.width + i) * a.scale;
    return a.position_table ? v + element(a.position_table, a.position_dtype, static_cast<size_t>(position) * a.width + i) : v;
  };
  const auto four = [&](int i) { return float4{load(i), load(i + 1), load(i + 2), load(i + 3)}; };
  Row row;
#pragma unroll
  for (int j = 0; j < kHeld; j++) row.v[j] = four(Row::place(j));
#pragma unroll
  for (int j = 0; j < kHeld; j++) Row::put_four<true>(x, Row::place(j), a.width, row.v[j]);
  for (int i = Row::place(kHeld); i < a.width; i += 4 * kRowThreads) Row::put_four<true>(x, i, a.width, four(i));
  if (a.next.x) normed(row, a.norm, x, token, a.next, sums);
}

__global__ void __launch_bounds__(kRowThreads) rows_kernel(const __grid_constant__ RowsArgs a) {
  __shared__ RowSums sums;
  pdl_launch_dependents();
  if (a.next.x) near(a.next, a.from.norm);
  pdl_wait();
  int from = a.rows ? __ldcg(a.rows + blockIdx.x) : blockIdx.x;
  from = min(max(from, 0), a.tokens - 1);
  RowSource source = a.from;
  if (const LoraChange* const change = a.lora.adapters ? a.lora.of(from) : nullptr) {
    if (source.post_norm && change[-1].norm) source.post_norm = change[-1].norm;
    if (source.norm.kind != kNoNorm && change->norm) source.norm.weight = change->norm, source.norm.bias = change->norm_bias;
  }
  Row row;
  row.load<true>(source, from, source.to != nullptr, sums);
  const float* const tail = (source.y ? source.to : source.x) + static_cast<size_t>(from) * source.norm.width;
  if (a.next.x) normed(row, source.norm, tail, blockIdx.x, a.next, sums);
}

// Four numbers a thread; tokens along y.
__global__ void __launch_bounds__(kRowThreads) gates_kernel(const __grid_constant__ GatesArgs a) {
  const int i = (blockIdx.x * kRowThreads + threadIdx.x) * 4, token = blockIdx.y;
  pdl_launch_dependents();
  if (i < a.width) touch(a.next, i);
  pdl_wait();
  if (i >= a.width) return;
  const float* const y = a.y + token * a.stride;
  float4 v = written<true>(y, i, a.width);
  v = {activation(v.x, a.activation), activation(v.y, a.activation), activation(v.z, a.activation), activation(v.w, a.activation)};
  if (a.gated) {
    const float4 up = written<true>(y + a.width, i, a.width);
    v.x *= up.x, v.y *= up.y, v.z *= up.z, v.w *= up.w;
  }
  put_input<true>(a.next, token, i, a.width, v);
}

}  // namespace exl2nb
