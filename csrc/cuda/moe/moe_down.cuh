// The second products of a sparse MLP: one CTA's columns of the residual, for one token, through all of its experts.
//
// As in gemv.cuh a CTA owns whole strips of 16 columns; its warps split the items of all chosen matrices, one expert after the other, and a
// warp's sum over a strip is that over its items in the order of the experts' numbers, each times its expert's weight. What was chosen is
// known before the first products begin, and both kernels find room on a multiprocessor: the ring is filled while those run. Bytes: strips
// of the chosen matrices once per token.
#pragma once
#include "cuda/moe/moe.h"
#include "cuda/moe/moe_stream.cuh"

namespace exl2nb {

struct DownArgs {
  GemvArgs out;  // of one token: strips and outputs of all experts, x, what is done with the results
  Choice choice;
  const ExpertMatrix* table;
  int pairs, image;  // image: bytes of the largest
  RingShape ring;
  int room;        // as in UpArgs
  bool sums_near;  // as there
};

// Of the dynamic shared memory.
struct DownShared {
  uint8_t *ring, *images;
  uint64_t* bars;  // of the ring, then of what arrives before and of the activations
  ExpertMatrix* matrices;
  Segment* segments;
  ushort2* ranges;
  uint8_t *own, *choice;  // GemvShared; Chosen
  half* xs;

  static EXL2NB_BOTH int bars_bytes(const DownArgs& D) { return (kWarps * D.ring.stages + 3) / 2 * 16; }
  static EXL2NB_BOTH int bytes(const DownArgs& D) {
    return D.room + bars_bytes(D) +
           D.pairs * static_cast<int>(sizeof(ExpertMatrix) + D.image + sizeof(Segment) + kWarps * sizeof(ushort2)) +
           GemvShared::bytes(D.out) + Chosen::bytes(D.choice);
  }
  __device__ __forceinline__ DownShared(const DownArgs& D, uint8_t* at) {
    ring = at;
    bars = reinterpret_cast<uint64_t*>(at + D.room);
    images = at + D.room + bars_bytes(D);
    matrices = reinterpret_cast<ExpertMatrix*>(images + D.pairs * D.image);
    choice = reinterpret_cast<uint8_t*>(matrices + D.pairs);
    own = choice + Chosen::bytes(D.choice);
    segments = reinterpret_cast<Segment*>(own + GemvShared::bytes(D.out));
    ranges = reinterpret_cast<ushort2*>(segments + D.pairs);
    xs = reinterpret_cast<half*>(ranges + D.pairs * kWarps);
  }
};

template <int PATH, bool STAGED>
__global__ void __launch_bounds__(kThreads, PATH == kBulk ? 2 : 1) down_kernel(const __grid_constant__ DownArgs D) {
  extern __shared__ __align__(128) uint8_t shared[];
  const GemvArgs& A = D.out;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.y, block = blockIdx.x, pairs = D.pairs;
  const DownShared L(D, shared);
  const GemvShared S(A, nullptr, L.own);
  const Chosen chosen(D.choice, L.choice);
  const int ring_bars = kWarps * D.ring.stages, count = (A.strips - block + A.grid - 1) / A.grid;
  Arrivals<PATH> arrivals{L.bars + ring_bars};
  uint64_t* const x_bar = L.bars + ring_bars + 1;

  init_barriers<PATH>(L.bars, ring_bars + 2);
  load_owned(A, S, block);
  __syncthreads();
  const auto* const near_sums = reinterpret_cast<const float*>(shared);  // where the ring will be
  if (D.sums_near) {
    arrivals.begin(D.choice.bytes());
    arrivals.copy(shared, reinterpret_cast<const uint8_t*>(D.choice.sums) + static_cast<size_t>(token) * D.choice.bytes(),
                  D.choice.bytes());
    arrivals.wait();
  }
  add_up(D.choice, chosen, D.sums_near ? near_sums : nullptr, token, 0);  // what is older than what this kernel waits for
  __syncthreads();
  rank(D.choice, chosen, scale_of(D.choice, chosen));
  weigh(D.choice, chosen);
  if constexpr (PATH == kBulk) barrier_fence();
  __syncthreads();
  constexpr int kVectors = sizeof(ExpertMatrix) / 16;
  for (int i = threadIdx.x; i < pairs * kVectors; i += kThreads)
    reinterpret_cast<uint4*>(L.matrices)[i] = __ldg(reinterpret_cast<const uint4*>(D.table + chosen.numbers[i / kVectors]) + i % kVectors);
  __syncthreads();
  const auto image_size = [&](const ExpertMatrix& m) { return (image_bytes(m.items, m.units, 1) + 15) / 16 * 16; };
  int bytes = 0;
  for (int p = 0; p < pairs; p++) bytes += image_size(L.matrices[p]);
  arrivals.begin(bytes);
  for (int p = 0; p < pairs; p++) arrivals.copy(L.images + p * D.image, L.matrices[p].image, image_size(L.matrices[p]));
  if (const int p = threadIdx.x; p < pairs) {
    const ExpertMatrix& m = L.matrices[p];
    const GemvPart& part = m.part[0];
    const uint8_t* const image = L.images + p * D.image;
    const size_t x = static_cast<size_t>(chosen.places[p]) * A.x_stride;
    L.segments[p] = {part.data + block * part.strip_bytes,
                     reinterpret_cast<const Item*>(image),
                     reinterpret_cast<const half2*>(image + image_steps(m.items)),
                     STAGED ? L.xs + x : A.x + static_cast<size_t>(token) * pairs * A.x_stride + x,
                     static_cast<int>(part.strip_bytes) * A.grid,
                     chosen.weights[p]};
  }
  arrivals.wait();
  for (int i = threadIdx.x; i < pairs * kWarps; i += kThreads) {  // each warp's share of all experts' bytes, in their order
    int all = 0, before = 0;
    for (int p = 0; p < pairs; p++) {
      before += p < i / kWarps ? static_cast<int>(L.matrices[p].part[0].strip_bytes) : 0;
      all += static_cast<int>(L.matrices[p].part[0].strip_bytes);
    }
    const ExpertMatrix& m = L.matrices[i / kWarps];
    const auto* const items = reinterpret_cast<const Item*>(L.images + i / kWarps * D.image);
    const auto first = [&](int w) {  // of warp w: the first item whose middle lies in its share
      const int64_t bound = static_cast<int64_t>(all) * w / kWarps - before;
      int low = 0, high = m.items;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (static_cast<int64_t>(items[middle].offset) + items[middle].bytes / 2 < bound)
          low = middle + 1;
        else
          high = middle;
      }
      return static_cast<uint16_t>(low);
    };
    L.ranges[i] = ushort2{first(i % kWarps), first(i % kWarps + 1)};
  }
  __syncthreads();
  const Stream stream{L.segments, L.ranges, L.ring, L.bars, D.ring, pairs, count};
  Fetcher<PATH> fetch(stream, warp, lane, true);
  fetch.fill();
  float* const residual = A.residual + static_cast<size_t>(token) * A.residual_stride;
  if (A.epilogue == kResidual && warp == 0) {  // older than what this kernel waits for, too
    for (int i = lane; i < S.owned; i += 32) {
      const int column = (block + (i >> 4) * A.grid) * 16 + (i & 15);
      if (column < A.part[0].outputs) S.kept[i] = __ldcg(residual + column);
    }
  }
  pdl_launch_dependents();
  pdl_wait();
  if constexpr (STAGED) {
    const half* const x = A.x + static_cast<size_t>(token) * pairs * A.x_stride;
    if constexpr (PATH == kBulk) {
      if (threadIdx.x == 0) {
        barrier_expect(x_bar, pairs * A.x_stride * 2);
        bulk_copy(L.xs, x, pairs * A.x_stride * 2, x_bar);
      }
      barrier_wait(x_bar, 0);
    } else {
      for (int v = threadIdx.x; v < pairs * A.x_stride / 8; v += kThreads)
        reinterpret_cast<uint4*>(L.xs)[v] = __ldcg(reinterpret_cast<const uint4*>(x) + v);
      __syncthreads();
    }
  }
  float squares = 0.f;
  run_stream<PATH, STAGED, true>(stream, fetch, S.partial, A.flush, warp, lane, [&](const float* sums, int first, int strips) {
    if (warp != 0) return;
#pragma unroll 1
    for (int r = lane; r < strips * 16; r += 32) {
      const int i = first * 16 + r, column = (block + (first + (r >> 4)) * A.grid) * 16 + (r & 15);
      if (column >= A.part[0].outputs) continue;
      float v = over_warps(sums + (r >> 4) * kWarps * 16 + (r & 15));
      if (A.epilogue == kStore) {
        A.out[static_cast<size_t>(token) * A.out_stride + column] = v;
        continue;
      }
      v = fmaf(A.scale, v, S.kept[i]);
      residual[column] = v;
      squares = fmaf(v, v, squares);
      if (!A.next_norm) continue;
      const half h = saturated(v * S.norms[i]);
#pragma unroll 1
      for (int q = 0; q < A.next.num_perms; q++)
        A.next.x[static_cast<size_t>(q) * A.next.perm_stride + static_cast<size_t>(token) * A.next.stride + S.places[q * S.owned + i]] = h;
    }
  });
  if (A.next_norm && warp == 0) {
    squares = warp_sum(squares);
    if (lane == 0) A.next_squares[static_cast<size_t>(token) * A.grid + block] = squares;
  }
}

}  // namespace exl2nb
