// What the products of a chain (chain.cuh) write.
#pragma once
#include "chain_args.cuh"
#include "chain_sync.cuh"

namespace exl2nb {

struct ChainWarp {
  uint8_t* shared;
  uint64_t* bars;
  int block, warp, lane, slot, set;  // set: bytes to what is this launch's between products
  uint32_t phase;
  float residual[kOwn / 2];  // warp m's of token m

  __device__ __forceinline__ void wait() const { barrier_wait(bars + slot, phase); }
  __device__ __forceinline__ void release(int pieces) {
    __syncwarp();
    if (lane == 0) barrier_arrive(bars + kMostPieces + slot);
    if ((slot += 2) >= pieces) slot -= pieces, phase ^= 1;  // an even number
  }
};

// Sums of the warps of a strip's column, in a fixed order.
__device__ __forceinline__ float crew_total(const float* p, int M) {
  float v[4];
#pragma unroll
  for (int k = 0; k < 4; k++) v[k] = (p[4 * k * M * 16] + p[(4 * k + 1) * M * 16]) + (p[(4 * k + 2) * M * 16] + p[(4 * k + 3) * M * 16]);
  return (v[0] + v[1]) + (v[2] + v[3]);
}

// Into the next matrix's input; the last product's is another kernel's.
__device__ __forceinline__ void chain_put(const ChainProduct& P, bool last, int m, int column, float v, const ChainWarp& w) {
  const MatrixInput& to = P.a.next;
  half* const row = to.x + static_cast<size_t>(m) * to.stride + (last ? 0 : w.set / 2);
  if (P.next_natural) {
    store_for_all(row + column, announced(saturated(v)));
  } else {
#pragma unroll 1
    for (int p = 0; p < to.num_perms; p++)
      store_for_all(row + static_cast<size_t>(p) * to.perm_stride + fragment_place(to.inverse[p] ? to.inverse[p][column] : column),
                    announced(saturated(v)));
  }
}

// y + residual, by warp m for token m.
__device__ __forceinline__ void chain_add(const ChainArgs& C, const ChainProduct& P, int q, ChainWarp& w) {
  const GemvArgs& A = P.a;
  const int M = A.tokens, m = w.warp, strip0 = first_strip(A, w.block, 0), columns = chain_strips(P, 0, strip0, 0) * 16;
  const bool last = q + 1 == C.count;
  if (m >= M) return;
  const float* const norms = reinterpret_cast<const float*>(w.shared + C.room.norms) + (q ? C.room.owned : 0);
  const float* const partial = reinterpret_cast<const float*>(w.shared + C.room.partial) + m * 16;
  const float factor = reinterpret_cast<const float*>(w.shared + C.room.factors)[m];
  float squares = 0.f;
#pragma unroll
  for (int k = 0; k < kOwn / 2; k++) {
    const int r = w.lane + 32 * k, column = (strip0 + (r >> 4) * A.grid) * 16 + (r & 15);
    if (r < columns && column < A.part[0].outputs) {
      const float y = crew_total(partial + (r >> 4) * kCrew * 16 * M + (r & 15), M) * factor,
                  v = w.residual[k] + A.scale * (y + (A.bias ? A.bias[column] : 0.f));
      w.residual[k] = v;
      if (q) A.residual[static_cast<size_t>(m) * A.residual_stride + column] = v;
      squares = fmaf(v, v, squares);
      if (A.next_norm) chain_put(P, last, m, column, v * norms[r], w);
    }
  }
  if (A.next_norm) {
    squares = warp_sum(squares);
    if (w.lane == 0) store_for_all(A.next_squares + m * A.grid + w.block + (last ? 0 : w.set / 4), announced(squares));
  }
}

// What a thread writes of the other epilogues; e: which of a round's values, [part][token][column], of gates those of the first part.
struct ChainOut {
  int sums;  // of the strip, token and column; negative: nothing
  int token, column;
  float bias, bias_up;
};

__device__ __forceinline__ int num_outs(const ChainProduct& P) {
  return (P.a.epilogue == kStore ? P.a.num_parts : 1) * P.a.tokens * P.strips * 16;
}

__device__ __forceinline__ ChainOut make_out(const ChainProduct& P, int round, int e, const ChainWarp& w) {
  const GemvArgs& A = P.a;
  const int n = P.strips * 16;
  int r = e, m = 0, part = 0;
#pragma unroll 1
  while (r >= n) r -= n, m++;
#pragma unroll 1
  while (m >= A.tokens) m -= A.tokens, part++;
  if (part >= (A.epilogue == kStore ? A.num_parts : 1)) return {-1};
  const int strip0 = first_strip(A, w.block, part), column = (strip0 + (round * P.strips + (r >> 4)) * A.grid) * 16 + (r & 15);
  if ((r >> 4) >= chain_strips(P, part, strip0, round) || column >= A.part[part].outputs) return {-1};
  const int out = A.part[part].first_column + column;
  return {((part * P.strips + (r >> 4)) * kCrew * A.tokens + m) * 16 + (r & 15), m, A.epilogue == kStore ? out : column,
          A.bias ? A.bias[out] : 0.f, A.bias && A.gated ? A.bias[A.part[0].outputs + column] : 0.f};
}

__device__ __forceinline__ void chain_write(const ChainArgs& C, const ChainProduct& P, const ChainOut& o, const ChainWarp& w) {
  const GemvArgs& A = P.a;
  if (o.sums < 0) return;
  const float* const partial = reinterpret_cast<const float*>(w.shared + C.room.partial) + o.sums;
  const float factor = reinterpret_cast<const float*>(w.shared + C.room.factors)[o.token],
              v = crew_total(partial, A.tokens) * factor + o.bias;
  if (A.epilogue == kStore && C.announces)
    store_for_all(A.out + o.token * A.out_stride + o.column, announced(v));
  else if (A.epilogue == kStore)
    A.out[o.token * A.out_stride + o.column] = v;
  else if (A.gated)
    chain_put(P, false, o.token, o.column,
              activation(v, A.activation) * (crew_total(partial + P.strips * kCrew * 16 * A.tokens, A.tokens) * factor + o.bias_up), w);
  else
    chain_put(P, false, o.token, o.column, activation(v, A.activation), w);
}

// Of a residual's product: what the CTA owns.
__device__ __forceinline__ void chain_norms(const ChainArgs& C, const ChainWarp& w) {
  float* const norms = reinterpret_cast<float*>(w.shared + C.room.norms);
#pragma unroll
  for (int q = 0; q < 3; q += 2) {
    const GemvArgs& A = C.product[q].a;
    const int strip0 = first_strip(A, w.block, 0);
    if (const int i = threadIdx.x; i < kOwn * 16) {
      const int column = (strip0 + (i >> 4) * A.grid) * 16 + (i & 15);
      if (A.next_norm && i < C.room.owned && column < A.part[0].outputs) norms[(q ? C.room.owned : 0) + i] = __ldg(A.next_norm + column);
    }
  }
}

__device__ __forceinline__ void chain_residual(const ChainArgs& C, ChainWarp& w) {
  const GemvArgs& A = C.product[0].a;
  const int strip0 = first_strip(A, w.block, 0), strips = chain_strips(C.product[0], 0, strip0, 0);
#pragma unroll
  for (int k = 0; k < kOwn / 2; k++) {
    const int r = w.lane + 32 * k, column = (strip0 + (r >> 4) * A.grid) * 16 + (r & 15);
    w.residual[k] = w.warp < A.tokens && r < strips * 16 && column < A.part[0].outputs
                        ? __ldcg(A.residual + static_cast<size_t>(w.warp) * A.residual_stride + column)
                        : 0.f;
  }
}

}  // namespace exl2nb
