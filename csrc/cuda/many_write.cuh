// What becomes of a tile's sums (many.cuh): outputs, the residual and the next input, or gates.
#pragma once
#include "many_args.cuh"

namespace exl2nb {

// What the outputs of each token are multiplied by: four tokens a warp.
__device__ __forceinline__ void load_factors(const ManyArgs& A, float* factors, int warp, int lane) {
  float sum[kManyTokens / kManyWarps] = {};
  if (A.squares)
    for (int i = lane; i < A.squares_count; i += 32)
#pragma unroll
      for (int k = 0; k < kManyTokens / kManyWarps; k++)
        if (warp + k * kManyWarps < A.tokens) sum[k] += __ldcg(A.squares + (warp + k * kManyWarps) * A.squares_count + i);
#pragma unroll
  for (int k = 0; k < kManyTokens / kManyWarps; k++) {
    const float factor = A.squares ? rsqrtf(warp_sum(sum[k]) * A.inverse_width + A.eps) : 1.f;
    if (lane == 0) factors[warp + k * kManyWarps] = factor;
  }
}
// Into the cache: what add_quads reads and no kernel writes.
__device__ __forceinline__ void touch_constants(const ManyArgs& A, int column) {
  if (column >= A.part[0].outputs) return;
  if (A.bias) prefetch_line(A.bias + column);
  if (A.next_norm) prefetch_line(A.next_norm + column);
  for (int p = 0; p < A.next.num_perms; p++)
    if (A.next.inverse[p]) prefetch_line(A.next.inverse[p] + column);
}

// This CTA's sums of a tile in registers into shared memory: four of a lane together, [strip][eight tokens][lane].
template <int NB>
__device__ __forceinline__ void lay_down(float* sums, int warp, int lane, const float (&y)[NB][4]) {
#pragma unroll
  for (int n = 0; n < NB; n++) *reinterpret_cast<float4*>(sums + ((warp * NB + n) * 32 + lane) * 4) = {y[n][0], y[n][1], y[n][2], y[n][3]};
}
__device__ __forceinline__ float4 read_rank(const float* at, int rank) {
  return rank == static_cast<int>(blockIdx.x) ? *reinterpret_cast<const float4*>(at) : read_peer(at, rank);
}
// What a lane has of two strips and eight tokens: v[strip][k] is of column lane / 4 + 8 * (k / 2) and token 2 * (lane % 4) + k % 2.
struct Quads {
  float v[2][4];
  // The sums of the cluster's CTAs, in order.
  __device__ __forceinline__ void load(const ManyArgs& A, const float* at, int strip) {
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int k = 0; k < 4; k++) v[j][k] = 0.f;
    constexpr int kTogether = 4;
#pragma unroll
    for (int first = 0; first < kManySplits; first += kTogether) {
      float4 part[2][kTogether];
#pragma unroll
      for (int r = 0; r < kTogether; r++)
        if (first + r < A.splits) part[0][r] = read_rank(at, first + r), part[1][r] = read_rank(at + strip, first + r);
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int r = 0; r < kTogether; r++)
          if (first + r < A.splits) v[j][0] += part[j][r].x, v[j][1] += part[j][r].y, v[j][2] += part[j][r].z, v[j][3] += part[j][r].w;
    }
  }
};
// Each warp's turns: f(turn, place of its sums, its first token, the lane's first column of the tile); the second strip's lie behind.
template <int NB, class F>
__device__ __forceinline__ void each_turn(const ManyArgs& A, int warp, int lane, F f) {
  constexpr int kPairs = kManyStrips / 2;
  const int count = (A.tokens + 7) / 8 * kPairs;
  for (int i = warp * A.splits + blockIdx.x, turn = 0; i < count; i += kManyWarps * A.splits, turn++) {
    const int pair = i % kPairs, n = i / kPairs;
    f(turn, ((pair * 2 * NB + n) * 32 + lane) * 4, n * 8 + 2 * (lane & 3), pair * 2 * kStripColumns + (lane >> 2));
  }
}
// f(strip, k, token, column) of a lane's eight.
template <class F>
__device__ __forceinline__ void each_quad(int token, int column, F f) {
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) f(j, k, token + (k & 1), column + j * kStripColumns + (k >> 1) * 8);
}
// What is needed of a lane's four columns, [strip][column / 8 % 2], and no kernel writes: of the first copy of the next input the rows.
struct QuadColumns {
  int rows[2][2];
  float norm[2][2];
  __device__ __forceinline__ void load(const ManyArgs& A, int column) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int c = min(column + (i >> 1) * kStripColumns + (i & 1) * 8, A.part[0].outputs - 1);
      rows[i >> 1][i & 1] = A.next.inverse[0] ? __ldg(A.next.inverse[0] + c) : c;
      norm[i >> 1][i & 1] = A.next_norm ? __ldg(A.next_norm + c) : 1.f;
    }
  }
};
// Two tokens' numbers of the lane's columns into the next product's input.
__device__ __forceinline__ void put_quads(const ManyArgs& A, int token, int column, const Quads& q, const QuadColumns& to) {
  const MatrixInput& in = A.next;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int c = column + (i >> 1) * kStripColumns + (i & 1) * 8;
    if (c >= A.part[0].outputs) continue;
    const half2 v = __halves2half2(saturated(q.v[i >> 1][(i & 1) * 2]), saturated(q.v[i >> 1][(i & 1) * 2 + 1]));
    half* const x = in.x + token_place(in.group, in.stride, token);
    *reinterpret_cast<half2*>(x + row_place(in.group, to.rows[i >> 1][i & 1])) = v;
    for (int p = 1; p < in.num_perms; p++)
      *reinterpret_cast<half2*>(x + static_cast<size_t>(p) * in.perm_stride +
                                row_place(in.group, in.inverse[p] ? __ldg(in.inverse[p] + c) : c)) = v;
  }
}
__device__ __forceinline__ void old_residual(const ManyArgs& A, int token, int column, Quads& old) {
  each_quad(token, column, [&](int j, int k, int t, int c) {
    old.v[j][k] = t < A.tokens && c < A.part[0].outputs ? __ldcg(A.residual + static_cast<size_t>(t) * A.residual_stride + c) : 0.f;
  });
}
// Sums are added to the residual; what becomes of it goes to the next product.
__device__ __forceinline__ void add_quads(const ManyArgs& A, int token, int column, const float* factors, Quads& q, const Quads& old,
                                          const QuadColumns& to, int lane) {
  float squares[2] = {0.f, 0.f};
  each_quad(token, column, [&](int j, int k, int t, int c) {
    float v = 0.f;
    if (c < A.part[0].outputs) {
      v = old.v[j][k] + A.scale * fmaf(q.v[j][k], factors[t], A.bias ? __ldg(A.bias + c) : 0.f);
      if (t < A.tokens) A.residual[static_cast<size_t>(t) * A.residual_stride + c] = v;
      q.v[j][k] = v * to.norm[j][k >> 1];
    }
    squares[k & 1] = fmaf(v, v, squares[k & 1]);
  });
  put_quads(A, token, column, q, to);
#pragma unroll
  for (int k = 0; k < 2; k++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) squares[k] += __shfl_xor_sync(~0u, squares[k], d);
    if (lane < 4 && token + k < A.tokens)
      A.next_squares[static_cast<size_t>(token + k) * A.tiles * (kManyColumns / 32) + column / 32] = squares[k];
  }
}

__device__ __forceinline__ void store_one(const ManyArgs& A, const ManyTile& tile, const float* factors, int token, int inside, float v) {
  const ManyPart& P = A.part[tile.part];
  const int column = tile.first_strip * kStripColumns + inside, at = P.first_column + column;
  if (token < A.tokens && column < P.outputs) A.out[token * A.out_stride + at] = v * factors[token] + (A.bias ? __ldg(A.bias + at) : 0.f);
}
// A tile that no other CTA shares, from registers to memory.
template <int NB>
__device__ __forceinline__ void store_tile(const ManyArgs& A, const ManyTile& tile, const float* factors, int warp, int lane,
                                           const float (&y)[NB][4]) {
#pragma unroll
  for (int n = 0; n < NB; n++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      store_one(A, tile, factors, n * 8 + 2 * (lane & 3) + (k & 1), warp * kStripColumns + (lane >> 2) + (k >> 1) * 8, y[n][k]);
}
// A tile in registers: through the shared memory of the cluster to memory, or to the residual and the next product.
template <int NB>
__device__ __forceinline__ void write_tile(const ManyArgs& A, const ManyTile& tile, const float* factors, float* sums, int warp, int lane,
                                           const float (&y)[NB][4]) {
  const int first = tile.first_strip * kStripColumns;
  lay_down<NB>(sums, warp, lane, y);
  Quads old, all;
  QuadColumns to;
  each_turn<NB>(A, warp, lane, [&](int turn, int, int token, int inside) {
    if (turn == 0 && !A.out) old_residual(A, token, first + inside, old), to.load(A, first + inside);
  });
  cluster_barrier();
  each_turn<NB>(A, warp, lane, [&](int turn, int at, int token, int inside) {
    all.load(A, sums + at, NB * 128);
    if (A.out) {
      each_quad(token, inside, [&](int j, int k, int t, int c) { store_one(A, tile, factors, t, c, all.v[j][k]); });
    } else {
      if (turn) old_residual(A, token, first + inside, old), to.load(A, first + inside);
      add_quads(A, token, first + inside, factors, all, old, to, lane);
    }
  });
  cluster_leave();  // nobody leaves while others read
}

// As activation(), but for a quicker division.
__device__ __forceinline__ float gate_of(float v, int kind) { return kind == 0 ? __fdividef(v, 1.f + __expf(-v)) : activation(v, kind); }

// Gates: both tiles through the shared memory of the cluster.
template <int NB>
__device__ __forceinline__ void write_gates(const ManyArgs& A, const ManyTile& tile, const float* factors, float* sums, int warp, int lane,
                                            const float (&gate)[NB][4], const float (&up)[NB][4]) {
  lay_down<NB>(sums, warp, lane, gate);
  lay_down<NB>(sums + many_sums(NB), warp, lane, up);
  QuadColumns to;
  each_turn<NB>(A, warp, lane, [&](int turn, int, int, int inside) {
    if (turn == 0) to.load(A, tile.first_strip * kStripColumns + inside);
  });
  cluster_barrier();
  each_turn<NB>(A, warp, lane, [&](int turn, int at, int token, int inside) {
    Quads g, u;
    if (turn) to.load(A, tile.first_strip * kStripColumns + inside);
    g.load(A, sums + at, NB * 128), u.load(A, sums + many_sums(NB) + at, NB * 128);
    const int column = tile.first_strip * kStripColumns + inside;
    each_quad(token, column, [&](int j, int k, int t, int c) {
      if (c >= A.part[0].outputs) return;
      const float bias = A.bias ? __ldg(A.bias + c) : 0.f, bias_up = A.bias ? __ldg(A.bias + A.part[1].first_column + c) : 0.f;
      g.v[j][k] = gate_of(fmaf(g.v[j][k], factors[t], bias), A.activation) * fmaf(u.v[j][k], factors[t], bias_up);
    });
    put_quads(A, token, column, g, to);
  });
  cluster_leave();  // nobody leaves while others read
}

}  // namespace exl2nb
