// Several products in one launch, each with what the one before it wrote: attention's output, gate and up, down, the next QKV. Every CTA
// stays on its multiprocessor from the first to the last; its weights, of all products, come through one ring that does not stop between
// them.
//
// Sixteen warps in two teams multiply (whole.cuh), one fetches weights, one waits for the other CTAs. A piece of the ring is eight items
// that lie one after the other in a strip, item n for warp n mod 8 of a team; the teams take turns. Between products the CTAs meet at a
// counter: results are stored, one thread adds with release, one warp polls. Activations go between products in fp16 and natural order;
// every CTA puts them in the order of its rows. All CTAs must be there together.
#pragma once
#include "gemv.cuh"
#include "whole.cuh"
#ifndef AHEAD
#define AHEAD 3
#endif
#ifndef BUDGET
#define BUDGET 184
#endif
#ifndef CNC
#define CNC 0
#endif
#ifndef CNW
#define CNW 0
#endif
#ifndef CNX
#define CNX 0
#endif

#ifdef CLOCKS
namespace exl2nb {
static __device__ long long chain_stamps[132][4][16];
}
#define STAMP(i) \
  if (threadIdx.x == 0) exl2nb::chain_stamps[blockIdx.x][q][i] = clock64();
#define STAMPW(i) \
  if (lane == 0) exl2nb::chain_stamps[blockIdx.x][q][i] = clock64();
#else
#define STAMP(i)
#define STAMPW(i)
#endif
namespace exl2nb {

constexpr int kChain = 4, kTeam = 8, kCrew = 2 * kTeam, kCrewThreads = kCrew * 32, kChainThreads = kCrewThreads + 64;
constexpr int kPiece = kTeam * kSlot, kMostPieces = 12, kAhead = AHEAD, kChainTokens = 4;
constexpr int kOwn = 4;  // strips of a residual's product that a CTA owns, at most
enum ChainBar { kImages = 2 * kMostPieces, kReady, kScaled, kChainBars };

struct ChainProduct {
  GemvArgs a;             // next.inverse null and next_natural: in natural order
  const uint16_t* order;  // as blob.h says; of products but the first, whose x lies in the order of the rows
  int width, stored;      // features; stored rows
  bool next_natural;
};
struct ChainRoom {  // where things lie in shared memory
  int pieces;       // of the ring; even: a team's lie in every other place
  int image[kChain], ring, bars, blocks, factors, squares, partial, kept, norms, xs, plain, bytes;
  int partial_size, owned, plain_row, plain_rows;
};
struct ChainArgs {
  ChainProduct product[kChain];
  int count, grid;
  unsigned* meet;  // [kChain]: how often CTAs came, in all launches, to the end of a product; the last one: of a launch
  ChainRoom room;
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void crew_sync() { asm volatile("bar.sync 1,%0;" ::"n"(kCrewThreads) : "memory"); }
__device__ __forceinline__ void some_sync(int threads) { asm volatile("bar.sync 2,%0;" ::"r"(threads) : "memory"); }
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void meet_arrive(unsigned* c) { asm volatile("red.release.gpu.global.add.u32 [%0],1;" ::"l"(c) : "memory"); }
__device__ __forceinline__ unsigned meet_now(const unsigned* c) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(c) : "memory");
  return v;
}
__device__ __forceinline__ void async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void copy_weights(void* to, const void* from, uint32_t bytes, uint64_t* b, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ uint64_t once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  return policy;
}
#else
__device__ __forceinline__ void crew_sync() {}
__device__ __forceinline__ void some_sync(int) {}
__device__ __forceinline__ void barrier_arrive(uint64_t*) {}
__device__ __forceinline__ void meet_arrive(unsigned*) {}
__device__ __forceinline__ unsigned meet_now(const unsigned*) { return 0; }
__device__ __forceinline__ void async_proxy() {}
__device__ __forceinline__ void copy_weights(void*, const void*, uint32_t, uint64_t*, uint64_t) {}
__device__ __forceinline__ uint64_t once() { return 0; }
#endif

__device__ __forceinline__ int chain_strips(const GemvArgs& A, int p, int first) {
  return A.part[p].whole + (first < A.part[p].rest ? 1 : 0);
}

// What fetches weights: one thread.
__device__ __forceinline__ void fetch_pieces(const ChainArgs& C, uint8_t* shared, uint64_t* full, uint64_t* empty, int block) {
  const uint64_t policy = once();
  int slot = 0, old = 0, issued = 0;
  uint32_t phase = 1, old_phase = 0;
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const GemvArgs& A = C.product[q].a;
    const uint8_t* const image = shared + C.room.image[q];
    const Item* const items = reinterpret_cast<const Item*>(image);
    const uint16_t* const ends = reinterpret_cast<const uint16_t*>(image + image_ends(A.items, A.units));
#pragma unroll 1
    for (int p = 0; p < A.num_parts; p++) {
      const int strip0 = first_strip(A, block, p), count = chain_strips(A, p, strip0), first = ends[p * kEnds],
                last = ends[p * kEnds + kWarps];
      const uint8_t* from = A.part[p].data + strip0 * A.part[p].strip_bytes;
      const int64_t hop = A.grid * A.part[p].strip_bytes;
#pragma unroll 1
      for (int s = 0; s < count; s++, from += hop)
#pragma unroll 1
        for (int n = first; n < last; n += kTeam) {
          const int end = min(n + kTeam, last) - 1;
          const uint32_t offset = items[n].offset, bytes = items[end].offset + items[end].bytes - offset;
          barrier_wait(empty + slot, phase);
          if (issued >= kAhead) {  // no more than so many under way
            barrier_wait(full + old, old_phase);
            if (++old == C.room.pieces) old = 0, old_phase ^= 1;
          }
          issued++;
          barrier_expect(full + slot, bytes);
          copy_weights(shared + C.room.ring + slot * kPiece, from + offset, bytes, full + slot, policy);
          if (++slot == C.room.pieces) slot = 0, phase ^= 1;
        }
    }
  }
}

// What waits for the other CTAs: a warp. Says when the activations are there, and the factors.
__device__ __forceinline__ void await_inputs(const ChainArgs& C, uint8_t* shared, uint64_t* bars, int lane) {
  float* const factors = reinterpret_cast<float*>(shared + C.room.factors);
  unsigned before = 0;  // all counters, when this launch began
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const GemvArgs& A = C.product[q].a;
    if (q == 0) {
      pdl_wait();
    } else if (!CNX && lane == 0) {
      while (static_cast<int>(meet_now(C.meet + q - 1) - before - C.grid) < 0) {}
    }
    __syncwarp();
    STAMPW(10)
    if (lane == 0) barrier_arrive(bars + kReady);
    if (q == 0 && lane == 0) before = meet_now(C.meet + kChain - 1);  // the others' last cannot come before this CTA's first
#pragma unroll 1
    for (int m = 0; m < A.tokens; m++) {
      constexpr int kSide = 5;  // loads side by side
      float some[kSide] = {}, sum = 0.f;
      const float* const squares = A.squares + static_cast<size_t>(m) * A.squares_count;
      if (A.squares) {
#pragma unroll
        for (int k = 0; k < kSide; k++)
          if (const int i = lane + 32 * k; i < A.squares_count) some[k] = __ldcg(squares + i);
      }
#pragma unroll
      for (int k = 0; k < kSide; k++) sum += some[k];
      if (A.squares)
        for (int i = lane + 32 * kSide; i < A.squares_count; i += 32) sum += __ldcg(squares + i);
      sum = warp_sum(sum);
      if (lane == 0) factors[m] = A.squares ? rsqrtf(sum * A.inverse_width + A.eps) : 1.f;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(bars + kScaled);
  }
}

struct ChainWarp {
  uint8_t* shared;
  uint64_t* bars;
  int block, warp, lane, slot;
  uint32_t phase, turn;      // turn: of the next strip's first piece
  float* sums;               // where the next partial sums go
  float residual[kOwn / 2];  // warp m's of token m
};

// The activations to whole numbers, in the order of the rows: the first product's, which lie so.
__device__ __forceinline__ void chain_copy(const ChainArgs& C, const ChainProduct& P, const ChainWarp& w) {
  const GemvArgs& A = P.a;
  const int blocks = (P.stored + 63) >> 6, octs = blocks * 8;
  WholeBlock* const to = reinterpret_cast<WholeBlock*>(w.shared + C.room.blocks);
  uint8_t* const xs = w.shared + C.room.xs;
#pragma unroll 1
  for (int m = 0; m < A.tokens; m++) {
    const half* const row = A.x + static_cast<size_t>(m) * A.x_stride;
#pragma unroll 2
    for (int i = w.warp * 32; i < octs; i += kCrewThreads) {
      const int at = min(i + w.lane, octs - 1);
      uint4 v = make_uint4(0, 0, 0, 0);  // past the last row lie other products' numbers
      if (at * 8 < P.stored) v = __ldcg(reinterpret_cast<const uint4*>(row + at * 8));
      to_whole(v, xs + (m * blocks + (at >> 3)) * 128, to + m * blocks + (at >> 3), w.lane, i + w.lane < octs);
    }
  }
}
// Of the others. order: of this thread's first kOrders octets, loaded before the activations are there.
constexpr int kOrders = 3;
__device__ __forceinline__ void load_order(const ChainProduct& P, uint4 (&order)[kOrders]) {
  const int octs = (P.stored + 63) / 64 * 8;
#pragma unroll
  for (int k = 0; k < kOrders; k++)
    if (const int i = threadIdx.x + k * kCrewThreads; i < octs) order[k] = __ldg(reinterpret_cast<const uint4*>(P.order) + i);
}
__device__ __forceinline__ void chain_gather(const ChainArgs& C, const ChainProduct& P, int q, const uint4 (&order)[kOrders],
                                             const ChainWarp& w) {
  const GemvArgs& A = P.a;
  const int blocks = (P.stored + 63) >> 6, octs = blocks * 8, most = C.room.plain_rows;
  half* const plain = reinterpret_cast<half*>(w.shared + C.room.plain) + kOrderPad;
  WholeBlock* const to = reinterpret_cast<WholeBlock*>(w.shared + C.room.blocks);
  uint8_t* const xs = w.shared + C.room.xs;
#pragma unroll 1
  for (int first = 0; first < A.tokens; first += most) {
    const int last = min(first + most, A.tokens);
    if (first) crew_sync();
#pragma unroll 1
    for (int m = first; m < last; m++) {
      const half* const from = A.x + static_cast<size_t>(m) * A.x_stride;
      half* const row = plain + (m - first) * (C.room.plain_row / 2);
#pragma unroll 4
      for (int i = threadIdx.x * 8; i < P.width; i += kCrewThreads * 8)
        *reinterpret_cast<uint4*>(row + i) = __ldcg(reinterpret_cast<const uint4*>(from + i));
    }
    STAMP(2)
    crew_sync();
    STAMP(3)
#pragma unroll 1
    for (int m = first; m < last; m++) {
      const uint16_t* const row = reinterpret_cast<const uint16_t*>(plain - kOrderPad) + (m - first) * (C.room.plain_row / 2);
      const auto put = [&](int i, const uint4& n) {  // octet i of lane 0
        const int at = min(i + w.lane, octs - 1);
        const auto two = [&](uint32_t pair) { return __byte_perm(row[pair & 0xffff], row[pair >> 16], 0x5410); };
        const uint4 v = make_uint4(two(n.x), two(n.y), two(n.z), two(n.w));
        to_whole(v, xs + (m * blocks + (at >> 3)) * 128, to + m * blocks + (at >> 3), w.lane, i + w.lane < octs);
      };
      int i = w.warp * 32;
#pragma unroll
      for (int k = 0; k < kOrders; k++, i += kCrewThreads)
        if (i < octs) put(i, order[k]);
#pragma unroll 1
      for (; i < octs; i += kCrewThreads) put(i, __ldg(reinterpret_cast<const uint4*>(P.order) + min(i + w.lane, octs - 1)));
    }
  }
}

// Sums of the warps for strip f of a flush, token m, column n of 16, in the order of the warps.
__device__ __forceinline__ float crew_total(const float* sums, int M, int f, int m, int n) {
  float v = 0.f;
#pragma unroll
  for (int k = 0; k < kCrew; k++) v += sums[((f * kCrew + k) * M + m) * 16 + n];
  return v;
}
// Into the next matrix's input.
__device__ __forceinline__ void chain_put(const ChainProduct& P, int m, int column, float v) {
  const MatrixInput& to = P.a.next;
  half* const row = to.x + static_cast<size_t>(m) * to.stride;
  if (P.next_natural) {
    row[column] = saturated(v);
  } else {
#pragma unroll 1
    for (int p = 0; p < to.num_perms; p++)
      row[static_cast<size_t>(p) * to.perm_stride + fragment_place(to.inverse[p] ? to.inverse[p][column] : column)] = saturated(v);
  }
}
// y + residual, by warp m for token m; `done` strips, all of them.
__device__ __forceinline__ void chain_add(const ChainArgs& C, const ChainProduct& P, int q, int done, int strip0, const float* sums,
                                          ChainWarp& w) {
  const GemvArgs& A = P.a;
  const int M = A.tokens, m = w.warp;
  if (m >= M) return;
  const float factor = reinterpret_cast<const float*>(w.shared + C.room.factors)[m];
  const float* const norms = reinterpret_cast<const float*>(w.shared + C.room.norms) + (q ? C.room.owned : 0);
  float squares = 0.f;
#pragma unroll
  for (int k = 0; k < kOwn / 2; k++) {
    const int r = w.lane + 32 * k, column = (strip0 + (r >> 4) * A.grid) * 16 + (r & 15);
    if (r < done * 16 && column < A.part[0].outputs) {
      const float y = crew_total(sums, M, r >> 4, m, r & 15) * factor + (A.bias ? A.bias[column] : 0.f);
      const float v = w.residual[k] + A.scale * y;
      w.residual[k] = v;
      if (q) A.residual[static_cast<size_t>(m) * A.residual_stride + column] = v;
      squares = fmaf(v, v, squares);
      if (A.next_norm) chain_put(P, m, column, v * norms[r]);
    }
  }
  if (A.next_norm) {
    squares = warp_sum(squares);
    if (w.lane == 0) A.next_squares[m * A.grid + w.block] = squares;
  }
}
// The other epilogues; `before`: strips of this part that were written before.
__device__ __forceinline__ void chain_write(const ChainArgs& C, const ChainProduct& P, int part, int before, int done, int strip0,
                                            const float* sums, const ChainWarp& w) {
  const GemvArgs& A = P.a;
  const int M = A.tokens, owned = C.room.owned;
  const bool paired = A.epilogue == kActivation && A.gated;
  const float* const factors = reinterpret_cast<const float*>(w.shared + C.room.factors);
  float* const kept = reinterpret_cast<float*>(w.shared + C.room.kept);
#pragma unroll 1
  for (int e = threadIdx.x; e < done * 16 * M; e += kCrewThreads) {
    const int m = M == 1 ? 0 : e / (done * 16), r = e - m * done * 16, i = before * 16 + r;
    const int column = (strip0 + (before + (r >> 4)) * A.grid) * 16 + (r & 15);
    if (column >= A.part[part].outputs) continue;
    const int out = A.part[part].first_column + column;
    const float v = crew_total(sums, M, r >> 4, m, r & 15) * factors[m] + (A.bias ? A.bias[out] : 0.f);
    if (A.epilogue == kStore)
      A.out[m * A.out_stride + out] = v;
    else if (paired && part == 0)
      kept[m * owned + i] = activation(v, A.activation);
    else
      chain_put(P, m, column, paired ? kept[m * owned + i] * v : activation(v, A.activation));
  }
}

// The product of q and what it writes.
template <int CHUNKS>
__device__ __forceinline__ void chain_multiply(const ChainArgs& C, int q, ChainWarp& w) {
  const ChainProduct& P = C.product[q];
  const GemvArgs& A = P.a;
  const int M = A.tokens, blocks = (P.stored + 63) >> 6, lane = w.lane;
  const uint32_t team = w.warp / kTeam;
  const int mate = w.warp % kTeam;
  const uint8_t* const image = w.shared + C.room.image[q];
  const Item* const items = reinterpret_cast<const Item*>(image);
  const half2* const steps = reinterpret_cast<const half2*>(image + image_steps(A.items));
  const uint16_t* const ends = reinterpret_cast<const uint16_t*>(image + image_ends(A.items, A.units));
  const WholeInput<CHUNKS> in(w.shared + C.room.xs, reinterpret_cast<const WholeBlock*>(w.shared + C.room.blocks), blocks, M, lane);
#pragma unroll 1
  for (int part = 0; part < A.num_parts; part++) {
    const int strip0 = first_strip(A, w.block, part), count = chain_strips(A, part, strip0), first = ends[part * kEnds],
              last = ends[part * kEnds + kWarps];
    const int pieces = (last - first + kTeam - 1) / kTeam;
    int before = 0, done = 0;
#pragma unroll 1
    for (int s = 0; s < count; s++) {
      WholeSums<CHUNKS> y;
#pragma unroll 1
      for (int n = first + (w.turn ^ team) * kTeam; n < last; n += kCrew) {
        const bool mine = n + mate < last;
        const ItemWords it(items[mine ? n + mate : n]);
        const uint32_t kind = __shfl_sync(0xffffffffu, it.words.y, 0), rest = __shfl_sync(0xffffffffu, it.words.w, 0);
        const uint8_t* const st = w.shared + C.room.ring + w.slot * kPiece + (it.words.x - items[n].offset);
        if (!CNW) barrier_wait(w.bars + w.slot, w.phase);
        if (CNC)
          y.y[0][0] += st[lane];
        else if (mine)
          whole_item(Brief{kind, rest, it.unit0()}, st, steps, in, lane, y);
        __syncwarp();
        if (!CNW && lane == 0) barrier_arrive(w.bars + kMostPieces + w.slot);
        if ((w.slot += 2) >= C.room.pieces) w.slot -= C.room.pieces, w.phase ^= 1;
      }
      w.turn ^= pieces & 1;
      float* const p = w.sums + (done * kCrew + w.warp) * 16 * M;
      const float v0 = y.joined(0), v1 = y.joined(1);
      if (in.first) p[in.token * 16 + in.g] = v0, p[in.token * 16 + in.g + 8] = v1;
      if (++done < A.flush && s + 1 < count) continue;
      STAMP(6)
      barrier_wait(w.bars + kScaled, q & 1);
      crew_sync();
      STAMP(7)
      if (A.epilogue == kResidual)
        chain_add(C, P, q, done, strip0, w.sums, w);
      else
        chain_write(C, P, part, before, done, strip0, w.sums, w);
      before += done, done = 0;
      float* const partial = reinterpret_cast<float*>(w.shared + C.room.partial);
      w.sums = w.sums == partial ? partial + C.room.partial_size : partial;
    }
  }
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
  const int strip0 = first_strip(A, w.block, 0), strips = chain_strips(A, 0, strip0);
#pragma unroll
  for (int k = 0; k < kOwn / 2; k++) {
    const int r = w.lane + 32 * k, column = (strip0 + (r >> 4) * A.grid) * 16 + (r & 15);
    w.residual[k] = w.warp < A.tokens && r < strips * 16 && column < A.part[0].outputs
                        ? __ldcg(A.residual + static_cast<size_t>(w.warp) * A.residual_stride + column)
                        : 0.f;
  }
}

template <int CHUNKS>
__global__ void __launch_bounds__(kChainThreads, 1) chain_products(const __grid_constant__ ChainArgs C) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0), block = blockIdx.x;
  uint64_t* const bars = reinterpret_cast<uint64_t*>(shared + C.room.bars);
  pdl_launch_dependents();
  if (threadIdx.x < kChainBars) {
    barrier_init(bars + threadIdx.x, threadIdx.x >= kMostPieces && threadIdx.x < 2 * kMostPieces ? kTeam : 1);
    barrier_fence();
  }
  if (threadIdx.x < C.room.plain_rows) {
    half* const zeros = reinterpret_cast<half*>(shared + C.room.plain + threadIdx.x * C.room.plain_row);
    for (int i = 0; i < kOrderPad; i++) zeros[i] = __float2half_rn(0.f);
  }
  __syncthreads();
  if (warp == kCrew) {
    if (lane == 0) {
      uint32_t bytes = 0;
      for (int q = 0; q < C.count; q++) bytes += padded_image(C.product[q].a);
      barrier_expect(bars + kImages, bytes);
      for (int q = 0; q < C.count; q++)
        bulk_copy(shared + C.room.image[q], C.product[q].a.image, padded_image(C.product[q].a), bars + kImages);
      barrier_wait(bars + kImages, 0);
      if (!CNW) fetch_pieces(C, shared, bars, bars + kMostPieces, block);
    }
    return;
  }
  if (warp > kCrew) {
    await_inputs(C, shared, bars, lane);
    return;
  }
  ChainWarp w{shared, bars, block, warp, lane, warp / kTeam, 0, 0, reinterpret_cast<float*>(shared + C.room.partial), {}};
  chain_norms(C, w);
  barrier_wait(bars + kImages, 0);
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const ChainProduct& P = C.product[q];
    uint4 order[kOrders] = {};
    if (q) load_order(P, order);
    STAMP(0)
    barrier_wait(bars + kReady, q & 1);
    STAMP(1)
    if (q == 0) {
      chain_residual(C, w);
      chain_copy(C, P, w);
    } else {
      chain_gather(C, P, q, order, w);
    }
    STAMP(4)
    crew_sync();
    STAMP(5)
    chain_multiply<CHUNKS>(C, q, w);
    STAMP(8)
    barrier_wait(bars + kScaled, q & 1);  // of a CTA without strips, too
    if (P.a.epilogue == kResidual && P.a.next_norm && w.warp < P.a.tokens && lane == 0 &&
        chain_strips(P.a, 0, first_strip(P.a, block, 0)) == 0)
      P.a.next_squares[w.warp * P.a.grid + block] = 0.f;
    if (q + 1 < C.count) {
      const bool adds = P.a.epilogue == kResidual;
      const int writers = adds ? P.a.tokens : kCrew;
      if (writers > 1) {
        if (w.warp < writers) some_sync(writers * 32);
      } else {
        __syncwarp();
      }
      if (threadIdx.x == 0) meet_arrive(C.meet + q);
      STAMP(9)
    }
  }
  if (threadIdx.x >= C.count - 1 && threadIdx.x < kChain) meet_arrive(C.meet + threadIdx.x);  // those that this launch did not need, too
}

}  // namespace exl2nb
