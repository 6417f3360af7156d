// What becomes of a tile's sums (many.cuh): outputs, the residual and the next input, or gates.
#pragma once
#include "many_args.cuh"

namespace exl2nb {

// What the outputs of each token are multiplied by.
__device__ __forceinline__ void load_factors(const ManyArgs& A, float* factors, int warp, int lane) {
  for (int token = warp; token < kManyTokens; token += kManyWarps) {
    float sum = 0.f;
    if (A.squares && token < A.tokens)
      for (int i = lane; i < A.squares_count; i += 32) sum += __ldcg(A.squares + token * A.squares_count + i);
    const float factor = A.squares ? rsqrtf(warp_sum(sum) * A.inverse_width + A.eps) : 1.f;
    if (lane == 0) factors[token] = factor;
  }
}
// Into the cache: what add_four reads and no kernel writes.
__device__ __forceinline__ void touch_constants(const ManyArgs& A, int column) {
  if (column >= A.part[0].outputs) return;
  if (A.bias) prefetch_line(A.bias + column);
  if (A.next_norm) prefetch_line(A.next_norm + column);
  for (int p = 0; p < A.next.num_perms; p++)
    if (A.next.inverse[p]) prefetch_line(A.next.inverse[p] + column);
}
__device__ __forceinline__ float4 old_residual(const ManyArgs& A, int token, int column) {
  if (A.out || token >= A.tokens || column >= A.part[0].outputs) return {0.f, 0.f, 0.f, 0.f};
  return __ldcg(reinterpret_cast<const float4*>(A.residual + static_cast<size_t>(token) * A.residual_stride + column));
}
// Four sums are added to a token's residual v; what becomes of it goes to the next product. A warp has 128 neighbouring columns.
__device__ __forceinline__ void add_four(const ManyArgs& A, int token, int column, float factor, float4 sum, float4 v, int lane) {
  float squares = 0.f;
  if (column < A.part[0].outputs) {  // a multiple of four
    float4 bias{0.f, 0.f, 0.f, 0.f};
    if (A.bias) bias = {__ldg(A.bias + column), __ldg(A.bias + column + 1), __ldg(A.bias + column + 2), __ldg(A.bias + column + 3)};
    v.x += A.scale * fmaf(sum.x, factor, bias.x), v.y += A.scale * fmaf(sum.y, factor, bias.y);
    v.z += A.scale * fmaf(sum.z, factor, bias.z), v.w += A.scale * fmaf(sum.w, factor, bias.w);
    *reinterpret_cast<float4*>(A.residual + static_cast<size_t>(token) * A.residual_stride + column) = v;
    squares = square_sum(v, 0.f);
    const float4 w = __ldg(reinterpret_cast<const float4*>(A.next_norm + column));
    put_input<false>(A.next, token, column, A.part[0].outputs, {v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w});
  }
  squares = warp_sum(squares);
  if (lane == 0) A.next_squares[static_cast<size_t>(token) * 2 * gridDim.y + blockIdx.y * 2 + column / 128 % 2] = squares;
}

// This CTA's sums of a tile in registers into shared memory.
template <int NB>
__device__ __forceinline__ void lay_down(float* sums, int warp, int lane, const float (&y)[2][NB][4]) {
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        sums[(n * 8 + 2 * (lane & 3) + (k & 1)) * kManySums + (warp * 2 + j) * kStripColumns + (lane >> 2) + (k >> 1) * 8] = y[j][n][k];
}
// The sums of the cluster's CTAs, in order.
__device__ __forceinline__ float4 all_sums(const ManyArgs& A, const float* at) {
  float4 part[kManySplits], all{0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int r = 0; r < kManySplits; r++)
    if (r < A.splits) part[r] = read_peer(at, r);
#pragma unroll
  for (int r = 0; r < kManySplits; r++)
    if (r < A.splits) all.x += part[r].x, all.y += part[r].y, all.z += part[r].z, all.w += part[r].w;
  return all;
}
// Sums of a tile in registers: to memory, or through the shared memory of the cluster.
template <int NB>
__device__ __forceinline__ void write_tile(const ManyArgs& A, const ManyTile& tile, int split, const float* factors, float* sums, int warp,
                                           int lane, const float (&y)[2][NB][4]) {
  const ManyPart& P = A.part[tile.part];
  const int g = lane >> 2, t = lane & 3, first = tile.first_strip * kStripColumns;
  const auto each = [&](auto put) {
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int n = 0; n < NB; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) put(n * 8 + 2 * t + (k & 1), (warp * 2 + j) * kStripColumns + g + (k >> 1) * 8, y[j][n][k]);
  };
  const auto store = [&](int token, int column, float v) {
    if (token < A.tokens && first + column < P.outputs) {
      const int at = P.first_column + first + column;
      A.out[token * A.out_stride + at] = v * factors[token] + (A.bias ? __ldg(A.bias + at) : 0.f);
    }
  };
  if (A.splits == 1 && A.out) {
    each(store);
    return;
  }
  lay_down<NB>(sums, warp, lane, y);
  const int mine = threadIdx.x + split * kManyThreads;  // four sums of a token
  const float4 old = old_residual(A, mine / (kManyColumns / 4), first + mine % (kManyColumns / 4) * 4);
  cluster_barrier();
  for (int i = mine; i < A.tokens * (kManyColumns / 4); i += A.splits * kManyThreads) {
    const int token = i / (kManyColumns / 4), column = i % (kManyColumns / 4) * 4;
    const float4 all = all_sums(A, sums + token * kManySums + column);
    if (A.out)
      store(token, column, all.x), store(token, column + 1, all.y), store(token, column + 2, all.z), store(token, column + 3, all.w);
    else
      add_four(A, token, first + column, factors[token], all,
               i < mine + A.splits * kManyThreads ? old : old_residual(A, token, first + column), lane);
  }
  cluster_barrier();  // nobody leaves while others read
}

// Gates: both tiles through the shared memory of the cluster.
template <int NB>
__device__ __forceinline__ void write_gates(const ManyArgs& A, const ManyTile& tile, int split, const float* factors, float* sums, int warp,
                                            int lane, const float (&gate)[2][NB][4], const float (&up)[2][NB][4]) {
  float* const second = sums + NB * 8 * kManySums;
  lay_down<NB>(sums, warp, lane, gate);
  lay_down<NB>(second, warp, lane, up);
  cluster_barrier();
  const int width = A.part[0].outputs;
  for (int i = threadIdx.x + split * kManyThreads; i < A.tokens * (kManyColumns / 4); i += A.splits * kManyThreads) {
    const int token = i / (kManyColumns / 4), inside = i % (kManyColumns / 4) * 4, column = tile.first_strip * kStripColumns + inside;
    if (column >= width) continue;  // a multiple of four
    const float4 g = all_sums(A, sums + token * kManySums + inside), u = all_sums(A, second + token * kManySums + inside);
    const auto one = [&](float a, float b, int k) {
      const float bias = A.bias ? __ldg(A.bias + column + k) : 0.f,
                  bias_up = A.bias ? __ldg(A.bias + A.part[1].first_column + column + k) : 0.f;
      return activation(fmaf(a, factors[token], bias), A.activation) * fmaf(b, factors[token], bias_up);
    };
    put_input<false>(A.next, token, column, width, {one(g.x, u.x, 0), one(g.y, u.y, 1), one(g.z, u.z, 2), one(g.w, u.w, 3)});
  }
  cluster_barrier();  // nobody leaves while others read
}

}  // namespace exl2nb
