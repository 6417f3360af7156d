// The second products of a sparse MLP: one CTA's columns of the residual, for one token, through all of its experts.
//
// As in gemv.cuh a CTA owns whole strips of 16 columns and its warps split the stored rows of every expert's matrix; a warp's sum over a
// strip is that over the experts in the order of their numbers, each times its weight. What was chosen is known before the first products
// are through, so the ring is filled as they end. Bytes: strips of the chosen matrices once per token.
#pragma once
#include "moe.h"
#include "moe_choice.cuh"

namespace exl2nb {

struct DownArgs {
  GemvArgs out;  // of one token: strips and outputs of all experts, x, what is done with the results
  Choice choice;
  const ExpertMatrix* table;
  int pairs, image;  // image: bytes of the largest
};

// Of the dynamic shared memory, behind the ring and its barriers.
struct DownShared {
  ExpertMatrix* matrices;  // of the pairs
  uint8_t* images;
  uint8_t* own;     // GemvShared
  uint8_t* choice;  // Chosen, then the activations
  static EXL2NB_BOTH int bytes(const DownArgs& D) {
    return D.pairs * (static_cast<int>(sizeof(ExpertMatrix)) + D.image) + GemvShared::bytes(D.out) + Chosen::bytes(D.choice);
  }
  __device__ __forceinline__ DownShared(const DownArgs& D, uint8_t* at) {
    matrices = reinterpret_cast<ExpertMatrix*>(at);
    images = at + D.pairs * sizeof(ExpertMatrix);
    own = images + D.pairs * D.image;
    choice = own + GemvShared::bytes(D.out);
  }
};

// A warp's way through its items: strip after strip, in each expert after expert.
struct DownWalk {
  int left, pair, item, end;
};

template <int PATH, bool STAGED>
__global__ void __launch_bounds__(kThreads, 1) down_kernel(const __grid_constant__ DownArgs D) {
  extern __shared__ __align__(128) uint8_t shared[];
  const GemvArgs& A = D.out;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.y, block = blockIdx.x, pairs = D.pairs;
  constexpr int kStages = stages_of(PATH);
  uint64_t* const bars = reinterpret_cast<uint64_t*>(shared + kStages * kWarps * kSlot);
  const DownShared L(D, reinterpret_cast<uint8_t*>(bars + kWarps * kStages));
  const GemvShared S(A, nullptr, L.own);
  const Chosen chosen(D.choice, L.choice);
  half* const xs = reinterpret_cast<half*>(L.choice + Chosen::bytes(D.choice));
  Ring ring{shared + warp * kStages * kSlot, bars + warp * kStages, kStages, 0, 0};

  load_owned(A, S, block);
  if constexpr (PATH == kBulk) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kWarps * kStages; i++) barrier_init(bars + i, 1);
      barrier_fence();
    }
  }
  choose(D.choice, chosen, token);  // by logits that are older than what this kernel waits for
  __syncthreads();
  constexpr int kVectors = sizeof(ExpertMatrix) / 16;
  for (int i = threadIdx.x; i < pairs * kVectors; i += kThreads)
    reinterpret_cast<uint4*>(L.matrices)[i] = __ldg(reinterpret_cast<const uint4*>(D.table + chosen.numbers[i / kVectors]) + i % kVectors);
  __syncthreads();
  for (int p = 0; p < pairs; p++) {
    const ExpertMatrix& m = L.matrices[p];
    for (int i = threadIdx.x; i < image_bytes(m.items, m.units, 1) / 16; i += kThreads)
      reinterpret_cast<uint4*>(L.images + p * D.image)[i] = __ldg(reinterpret_cast<const uint4*>(m.image) + i);
  }
  __syncthreads();
  const auto image = [&](int p) { return L.images + p * D.image; };
  const auto enter = [&](DownWalk& w) {  // the next expert of whose matrix this warp has something
    for (; w.pair < pairs; w.pair++) {
      const ExpertMatrix& m = L.matrices[w.pair];
      const auto* const ends = reinterpret_cast<const uint16_t*>(image(w.pair) + image_ends(m.items, m.units));
      w.item = ends[warp], w.end = ends[warp + 1];
      if (w.item < w.end) return true;
    }
    return false;
  };
  const int count = (A.strips - block + A.grid - 1) / A.grid;
  DownWalk f{count, 0, 0, 0};
  int f_slot = 0, f_strip = block;
  const uint8_t* f_data = nullptr;
  const auto f_enter = [&] {
    if (!enter(f)) {
      f.left--, f_strip += A.grid, f.pair = 0;
      if (f.left <= 0 || !enter(f)) {
        f.left = 0;
        return;
      }
    }
    f_data = L.matrices[f.pair].part[0].data + f_strip * L.matrices[f.pair].part[0].strip_bytes;
  };
  f_enter();
  const auto fetch = [&] {
    if (f.left > 0) {
      const Item it = reinterpret_cast<const Item*>(image(f.pair))[f.item];
      uint8_t* const to = ring.slots + f_slot * kSlot;
      if constexpr (PATH == kBulk) {
        barrier_expect(ring.bars + f_slot, it.bytes);
        bulk_copy(to, f_data + it.offset, it.bytes, ring.bars + f_slot);
      } else {
        for (int b = lane * 16; b < it.bytes; b += 512) copy16<PATH == kAsync>(to + b, f_data + it.offset + b);
      }
      f_slot = f_slot + 1 == kStages ? 0 : f_slot + 1;
      if (++f.item == f.end) {
        f.pair++;
        f_enter();
      }
    }
    if constexpr (PATH == kAsync) async_commit();
  };
  if (PATH != kBulk || lane == 0)
    for (int i = 0; i < kStages; i++) fetch();
  pdl_launch_dependents();
  pdl_wait();

  const half* const x_token = A.x + static_cast<size_t>(token) * pairs * A.x_stride;
  float* const residual = A.residual + static_cast<size_t>(token) * A.residual_stride;
  if (A.epilogue == kResidual && warp == 0) {
    for (int i = lane; i < S.owned; i += 32) {
      const int column = (block + (i >> 4) * A.grid) * 16 + (i & 15);
      if (column < A.part[0].outputs) S.kept[i] = __ldcg(residual + column);
    }
  }
  if constexpr (STAGED) {
    const int vectors = pairs * A.x_stride / 8;
    for (int v = threadIdx.x; v < vectors; v += 4 * kThreads) {
      uint4 x4[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (v + i * kThreads < vectors) x4[i] = __ldcg(reinterpret_cast<const uint4*>(x_token) + v + i * kThreads);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (v + i * kThreads < vectors) reinterpret_cast<uint4*>(xs)[v + i * kThreads] = x4[i];
    }
    __syncthreads();
  }

  const int g = lane >> 2, t = lane & 3;
  const bool live = g == 0;
  const half* const x_lane = (STAGED ? xs : x_token) + t * 8;
  float squares = 0.f;
  float* sums = S.partial;
  int before = 0, done = 0;
  for (int s = 0; s < count; s++) {
    float y[4] = {0, 0, 0, 0};
    DownWalk c{1, 0, 0, 0};
    for (; enter(c); c.pair++) {
      float part[4] = {0, 0, 0, 0};
      const auto* const steps = reinterpret_cast<const half2*>(image(c.pair) + image_steps(L.matrices[c.pair].items));
      for (; c.item < c.end; c.item++) {
        const ItemWords it(reinterpret_cast<const Item*>(image(c.pair))[c.item]);
        if constexpr (PATH == kBulk) barrier_wait(ring.bars + ring.slot, ring.phase);
        if constexpr (PATH == kAsync) async_wait<kStages - 1>();
        if constexpr (PATH != kBulk) __syncwarp();
        compute_item<PATH, STAGED>(it, ring.slots + ring.slot * kSlot, steps + it.unit0(),
                                   x_lane + chosen.places[c.pair] * A.x_stride + it.block() * 32, live, lane, part);
        __syncwarp();
        if (PATH != kBulk || lane == 0) fetch();
        if (++ring.slot == kStages) ring.slot = 0, ring.phase ^= 1;
      }
      const float weight = chosen.weights[c.pair];
#pragma unroll
      for (int j = 0; j < 4; j++) y[j] = fmaf(weight, part[j], y[j]);
    }
    float* const p = sums + (done * kWarps + warp) * 16;
    if (t == 0) p[g] = y[0], p[g + 8] = y[2];
    if (++done < A.flush && s + 1 < count) continue;
    __syncthreads();
    if (warp == 0) {
      for (int r = lane; r < done * 16; r += 32) {
        const int i = before * 16 + r, column = (block + (before + (r >> 4)) * A.grid) * 16 + (r & 15);
        if (column >= A.part[0].outputs) continue;
        float v = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; w++) v += sums[((r >> 4) * kWarps + w) * 16 + (r & 15)];
        if (A.epilogue == kStore) {
          A.out[static_cast<size_t>(token) * A.out_stride + column] = v;
          continue;
        }
        v = fmaf(A.scale, v, S.kept[i]);
        residual[column] = v;
        squares = fmaf(v, v, squares);
        if (!A.next_norm) continue;
        const half h = saturated(v * S.norms[i]);
        for (int q = 0; q < A.next.num_perms; q++)
          A.next.x[static_cast<size_t>(q) * A.next.perm_stride + static_cast<size_t>(token) * A.next.stride + S.places[q * S.owned + i]] =
              h;
      }
    }
    before += done, done = 0;
    sums = sums == S.partial ? S.partial + S.partial_size : S.partial;
  }
  if (A.next_norm && warp == 0) {
    squares = warp_sum(squares);
    if (lane == 0) A.next_squares[static_cast<size_t>(token) * A.grid + block] = squares;
  }
}

}  // namespace exl2nb
