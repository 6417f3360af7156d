// What the products of a chain (chain.cuh) write.
#pragma once
#include "cuda/gemm/persistent/chain_args.cuh"
#include "cuda/gemm/persistent/chain_sync.cuh"

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
    warp_arrive(bars + kMostPieces + slot, lane);
    if ((slot += 2) >= pieces) slot -= pieces, phase ^= 1;  // an even number
  }
};

// How many tokens a launch has; of one or two the compiler knows it.
template <int CHUNKS>
__device__ __forceinline__ int tokens_of(const ChainProduct& P) {
  return CHUNKS == 4 ? 1 : CHUNKS == 2 ? 2 : P.a.tokens;
}

// Sums of the warps of a strip's column, in a fixed order.
__device__ __forceinline__ float crew_total(const float* p, int M) {  // M: tokens
  float v[4];
#pragma unroll
  for (int k = 0; k < 4; k++) v[k] = (p[4 * k * M * 16] + p[(4 * k + 1) * M * 16]) + (p[(4 * k + 2) * M * 16] + p[(4 * k + 3) * M * 16]);
  return (v[0] + v[1]) + (v[2] + v[3]);
}

__device__ __forceinline__ ChainShared& near(const ChainWarp& w) { return *reinterpret_cast<ChainShared*>(w.shared); }
__device__ __forceinline__ float* partials(const ChainWarp& w) { return reinterpret_cast<float*>(w.shared + kPartials); }
__device__ __forceinline__ ChainOut* outs_of(const ChainArgs& C, const ChainWarp& w) {
  return reinterpret_cast<ChainOut*>(w.shared + C.room.outs);
}

__device__ __forceinline__ half* place_of(const MatrixInput& to, int copy, int column) {
  return to.x + static_cast<size_t>(copy) * to.perm_stride + fragment_place(to.inverse[copy] ? __ldg(to.inverse[copy] + column) : column);
}

__device__ __forceinline__ int owned_column(const ChainProduct& P, const ChainWarp& w, int r) {
  return (first_strip(P.a, w.block, 0) + (r >> 4) * P.a.grid) * 16 + (r & 15);
}

// What stays the same for the whole launch.
__device__ __forceinline__ void prepare(const ChainArgs& C, const ChainWarp& w) {
  if (const int q = threadIdx.x - kCrewThreads / 2; q >= 0 && q < C.count) {
    const ChainProduct& P = C.product[q];
    const GemvArgs& A = P.a;
    near(w).now[q] = {C.meet + q,
                      A.epilogue == kResidual && A.next_norm ? A.next_squares + w.block : nullptr,
                      P.outs,
                      static_cast<uint16_t>(A.activation),
                      A.epilogue == kResidual,
                      A.epilogue == kStore,
                      A.gated,
                      C.announces};
  }
  const int q = threadIdx.x / (kOwn * 16) * 2, r = threadIdx.x % (kOwn * 16);
  if (q >= C.count || q > 2 || C.product[0].a.epilogue != kResidual) return;
  const ChainProduct& P = C.product[q];
  const GemvArgs& A = P.a;
  const int column = owned_column(P, w, r);
  ChainOut o{};
  o.sums = ChainOut::kNone;
  if (column < A.part[0].outputs) {
    o.sums = (r >> 4) * kCrew * 16 * A.tokens + (r & 15), o.other = A.scale;
    if (A.bias) o.bias = __ldg(A.bias + column);
    if (q) o.residual = A.residual + column;
    if (A.next_norm) o.norm = __ldg(A.next_norm + column), o.to = place_of(A.next, 0, column);
  }
  near(w).owned[q / 2][r] = o;
}

// A warp has stored its part of a product's results, if it has any, and needs nothing more of the factors: the other CTAs may look soon. By
// all warps.
__device__ __forceinline__ void come(const ChainNow& now, const ChainWarp& w) {
  __syncwarp();
  if (threadIdx.x == 0) meet_arrive(now.meet);
  warp_arrive(w.bars + kMine, w.lane);
}

// y + residual, by warp m for token m. What the next product reads goes first.
template <int CHUNKS>
__device__ __forceinline__ void chain_add(const ChainArgs& C, const ChainProduct& P, int q, const ChainNow& now, ChainWarp& w) {
  const int M = tokens_of<CHUNKS>(P), m = M == 1 ? 0 : w.warp;
  const bool last = q + 1 == C.count;
  if (w.warp >= M) {
    if (!last) come(now, w);
    return;
  }
  const ChainOut* const owned = near(w).owned[q / 2] + w.lane;
  float squares = 0.f;
#pragma unroll
  for (int k = 0; k < kOwn / 2; k++) {
    const ChainOut o = owned[32 * k];
    if (!__any_sync(0xffffffffu, o.sums != ChainOut::kNone)) break;
    if (o.sums == ChainOut::kNone) continue;
    const float v = w.residual[k] + o.other * (crew_total(partials(w) + o.sums + m * 16, M) * near(w).factors[m] + o.bias);
    w.residual[k] = v;
    squares = fmaf(v, v, squares);
    if (o.to) {
      half* to = reinterpret_cast<half*>(static_cast<uint8_t*>(o.to) + (last ? 0 : w.set));
      if (M > 1) to += static_cast<size_t>(m) * P.a.next.stride;
      store_for_all(to, announced(saturated(v * o.norm)));
    }
  }
  if (!last) come(now, w);
  if (now.squares) {
    squares = warp_sum(squares);
    if (w.lane == 0) store_for_all(now.squares + (last ? 0 : w.set / 4) + (M == 1 ? 0 : m * P.a.grid), announced(squares));
  }
#pragma unroll
  for (int k = 0; k < kOwn / 2; k++)
    if (float* const to = owned[32 * k].residual) to[M == 1 ? 0 : static_cast<size_t>(m) * P.a.residual_stride] = w.residual[k];
  // Another kernel's input may have several copies.
  if (last && now.squares)
#pragma unroll 1
    for (int copy = 1; copy < P.a.next.num_perms; copy++)
      for (int k = 0; k < kOwn / 2; k++)
        if (const ChainOut& o = owned[32 * k]; o.sums != ChainOut::kNone)
          place_of(P.a.next, copy, owned_column(P, w, w.lane + 32 * k))[static_cast<size_t>(m) * P.a.next.stride] =
              saturated(w.residual[k] * o.norm);
}

// Of the other epilogues: [part][column], of gates the first part's. By threads from the `first` one on.
__device__ __forceinline__ void make_outs(const ChainArgs& C, const ChainProduct& P, int round, int first, const ChainWarp& w) {
  const GemvArgs& A = P.a;
  const int n = P.strips * 16, e = (threadIdx.x + kCrewThreads - first) % kCrewThreads;
  if (e >= P.outs) return;
  int r = e, part = 0;
#pragma unroll 1
  while (r >= n) r -= n, part++;
  const int strip0 = first_strip(A, w.block, part), column = (strip0 + (round * P.strips + (r >> 4)) * A.grid) * 16 + (r & 15),
            out = A.part[part].first_column + column;
  ChainOut o{};
  o.sums = ChainOut::kNone;
  if ((r >> 4) < chain_strips(P, part, strip0, round) && column < A.part[part].outputs) {
    o.sums = (part * P.strips + (r >> 4)) * kCrew * 16 * A.tokens + (r & 15);
    o.sums_up = o.sums + P.strips * kCrew * 16 * A.tokens;
    if (A.bias) o.bias = __ldg(A.bias + out);
    if (A.bias && A.gated) o.other = __ldg(A.bias + A.part[0].outputs + column);
    if (A.epilogue == kStore)
      o.to = A.out + out;
    else
      o.to = place_of(A.next, 0, column);
  }
  outs_of(C, w)[e] = o;
}

template <int CHUNKS>
__device__ __forceinline__ void chain_write(const ChainArgs& C, const ChainProduct& P, const ChainNow& now, const ChainWarp& w) {
  const int M = tokens_of<CHUNKS>(P);
  if (static_cast<int>(threadIdx.x) >= now.outs) return;
  const ChainOut o = outs_of(C, w)[threadIdx.x];
  if (o.sums == ChainOut::kNone) return;
#pragma unroll 1
  for (int m = 0; m < M; m++) {
    const float factor = near(w).factors[m];
    float v = crew_total(partials(w) + o.sums + m * 16, M) * factor + o.bias;
    if (now.store) {
      float* const to = static_cast<float*>(o.to) + (m ? m * P.a.out_stride : 0);
      if (now.announces)
        store_for_all(to, announced(v));
      else
        *to = v;
    } else {
      v = activation(v, now.activation);
      if (now.gated) v *= crew_total(partials(w) + o.sums_up + m * 16, M) * factor + o.other;
      store_for_all(reinterpret_cast<half*>(static_cast<uint8_t*>(o.to) + w.set) + (m ? static_cast<size_t>(m) * P.a.next.stride : 0),
                    announced(saturated(v)));
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
