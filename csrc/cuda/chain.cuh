// Several products in one launch, each with what the one before it wrote: attention's output, gate and up, down, the next QKV; or the head
// alone, whose weights the ring brings quicker than gemv.cuh does. Every CTA stays on its multiprocessor from the first to the last; its
// weights, of all products, come through one ring that does not stop between them.
//
// Sixteen warps in two teams multiply (whole.cuh), one fetches weights, one waits for the other CTAs. A piece is at most sixteen items that
// lie one after the other in a strip: item n of it is warp n's. It comes in two halves, a team's each, that follow one another in the ring.
// A warp keeps what it knows of its item, activations included, while the same piece of all strips passes by, then goes on to the next
// piece of the strips. Between products the CTAs meet at a counter: results are stored, one thread adds, one warp polls; nothing orders the
// two, but what is not written yet is seen (announced.cuh), by attention behind the last one, too. Activations go between products in fp16,
// in natural order where there is room to put them into the order of the rows here, otherwise in that order; every CTA makes whole numbers
// of them. All CTAs must be there together.
#pragma once
#include <type_traits>

#include "chain_fetch.cuh"
#include "chain_write.cuh"
#include "whole.cuh"

namespace exl2nb {

// A token's activations: the first product's are another kernel's.
__device__ __forceinline__ const half* x_of(const ChainProduct& P, int q, int m, const ChainWarp& w) {
  return P.a.x + static_cast<size_t>(row_of(P.a, m)) * P.a.x_stride + (q ? w.set / 2 : 0);
}

// The activations to whole numbers in the order of the rows. order: of this thread's first kOrders octets, loaded before the activations
// are there.
__device__ __forceinline__ void load_order(const ChainProduct& P, uint4 (&order)[kOrders]) {
  const int octs = P.blocks * 8;
#pragma unroll
  for (int k = 0; k < kOrders; k++)
    if (const int i = threadIdx.x + k * kCrewThreads; P.order && i < octs) order[k] = __ldg(reinterpret_cast<const uint4*>(P.order) + i);
}

__device__ __forceinline__ void chain_quantise(const ChainArgs& C, const ChainProduct& P, int q, const uint4 (&order)[kOrders],
                                               const ChainWarp& w) {
  const GemvArgs& A = P.a;
  const int octs = P.blocks * 8;
  WholeBlock* const blocks = reinterpret_cast<WholeBlock*>(w.shared + C.room.blocks);
  uint8_t* const xs = w.shared + C.room.xs;
  if (P.order) {
#pragma unroll 1
    for (int m = 0; m < A.tokens; m++) {
      const half* const from = x_of(P, q, m, w);
      half* const row = reinterpret_cast<half*>(w.shared + C.room.plain + m * C.room.plain_row) + kOrderPad;
      constexpr int kSide = 4;  // loads side by side
#pragma unroll 1
      for (int first = threadIdx.x * 8; first < P.width; first += kSide * kCrewThreads * 8) {
        uint4 v[kSide];
#pragma unroll
        for (int k = 0; k < kSide; k++)
          if (const int i = first + k * kCrewThreads * 8; i < P.width) v[k] = load_now(from + i);
#pragma unroll
        for (int k = 0; k < kSide; k++)
          if (const int i = first + k * kCrewThreads * 8; i < P.width)
            *reinterpret_cast<uint4*>(row + i) = is_there(v[k]) ? v[k] : await(from + i);
      }
    }
    crew_sync();
  }
#pragma unroll 1
  for (int m = 0; m < A.tokens; m++) {
    const uint16_t* const row = reinterpret_cast<const uint16_t*>(w.shared + C.room.plain + m * C.room.plain_row);
    const half* const x = x_of(P, q, m, w);
    const auto two = [&](uint32_t pair) { return __byte_perm(row[pair & 0xffff], row[pair >> 16], 0x5410); };
    const auto put = [&](int i, const uint4& n) {  // octet i of lane 0
      const int at = min(i + w.lane, octs - 1);
      uint4 v = make_uint4(0, 0, 0, 0);  // past the last row there is nothing
      if (P.order)
        v = make_uint4(two(n.x), two(n.y), two(n.z), two(n.w));
      else if (at * 8 < P.width)
        v = q ? await(x + at * 8) : __ldcg(reinterpret_cast<const uint4*>(x) + at);
      to_whole(v, xs + (m * P.blocks + (at >> 3)) * 128, blocks + m * P.blocks + (at >> 3), w.lane, i + w.lane < octs);
    };
    int i = w.warp * 32;
#pragma unroll
    for (int k = 0; k < kOrders; k++, i += kCrewThreads)
      if (i < octs) put(i, order[k]);
#pragma unroll 1
    for (; i < octs; i += kCrewThreads)
      put(i, P.order ? __ldg(reinterpret_cast<const uint4*>(P.order) + min(i + w.lane, octs - 1)) : order[0]);
  }
}

// What a warp does with a piece of all strips of a part. All of a product's are made before the activations are there.
struct Leg {
  uint32_t kind, rest;  // of the item (Brief)
  int offset;           // of the item in its half of the piece
  int steps;            // the item's first
  int strips;           // 0: nothing to do; negative: no item for this warp
  int sums;             // where they go; odd: added to what is there
};

__device__ __forceinline__ int num_legs(const ChainProduct& P) {
  int n = 0;
  for (int p = 0; p < P.a.num_parts; p++) n += P.piece[p].passes;
  return n;
}

__device__ __forceinline__ Leg make_leg(const ChainArgs& C, int q, int round, int number, const ChainWarp& w) {
  const ChainProduct& P = C.product[q];
  const ChainImage image(C, w.shared, q);
  int p = 0, pass = number;
#pragma unroll 1
  while (p < P.a.num_parts && pass >= P.piece[p].passes) pass -= P.piece[p++].passes;
  if (p == P.a.num_parts) return {};
  const int count = max(chain_strips(P, p, first_strip(P.a, w.block, p), round), 0);
  const Piece piece(P, image, p, pass);
  const int n = piece.first + w.warp;
  const bool mine = n < piece.last;
  const ItemWords it(image.items[mine ? n : piece.first]);
  const int begin = image.items[mine ? piece.first + w.warp / kTeam * kTeam : piece.first].offset;
  const int sums = (p * P.strips * kCrew + w.warp) * 16 * P.a.tokens;
  return {it.words.y, it.words.w, static_cast<int>(it.words.x) - begin, it.unit0(), mine ? count : -count, sums + (pass > 0)};
}

// A warp's legs lie in shared memory.
__device__ __forceinline__ Leg* legs_of(const ChainArgs& C, const ChainWarp& w) {
  return reinterpret_cast<Leg*>(w.shared + C.room.legs) + w.warp * kLegs;
}

__device__ __forceinline__ void make_legs(const ChainArgs& C, int q, int round, const ChainWarp& w) {
  if (w.lane < kLegs) legs_of(C, w)[w.lane] = make_leg(C, q, round, w.lane, w);
  __syncwarp();
}

template <int CHUNKS>
__device__ __forceinline__ void run_leg(const ChainArgs& C, const ChainProduct& P, const Leg& leg, const half2* steps,
                                        const WholeInput<CHUNKS>& in, ChainWarp& w) {
  const int lane = w.lane, step = kCrew * 16 * P.a.tokens, count = abs(leg.strips);
  const bool add = leg.sums & 1;
  const uint8_t* const ring = w.shared + C.room.ring;
  float* to = reinterpret_cast<float*>(w.shared + C.room.partial) + (leg.sums & ~1);
  if (leg.strips < 0) {
#pragma unroll 1
    for (int s = 0; s < count; s++, to += step) {
      WholeSums<CHUNKS> y;
      w.wait();
      w.release(C.room.pieces);
      y.put(to, in, lane, add);
    }
    return;
  }
  const Brief brief{leg.kind, leg.rest};
  kind_of<CHUNKS>(brief, [&](auto* kind) {
    using Kind = std::remove_pointer_t<decltype(kind)>;
    const Kind item(brief, steps + leg.steps, in);
    const auto here = [&] { return ring + w.slot * C.room.piece + leg.offset; };
    if constexpr (Kind::kAhead) {
      typename Kind::Words words;
      w.wait();
      item.load(here(), lane, words);
#pragma unroll 1
      for (int left = count;; to += step) {
        int c[Kind::kAheadRounds][2][4];
        uint32_t code[Kind::kAheadRounds];
        WholeSums<CHUNKS> y;
        item.products(words, c);
#pragma unroll
        for (int r = 0; r < Kind::kAheadRounds; r++) code[r] = words.code[r];
        if constexpr (Kind::kRounds > Kind::kAheadRounds) item.multiply(here(), lane, y, Kind::kAheadRounds);
        w.release(C.room.pieces);
        const bool more = --left;
        if (more) {
          w.wait();
          item.load(here(), lane, words);
        }
        item.finish(code, c, y);
        y.put(to, in, lane, add);
        if (!more) break;
      }
    } else {
#pragma unroll 1
      for (int s = 0; s < count; s++, to += step) {
        WholeSums<CHUNKS> y;
        w.wait();
        item.multiply(here(), lane, y);
        w.release(C.room.pieces);
        y.put(to, in, lane, add);
      }
    }
  });
}

// The product of q and what it writes. out: of the first round, this thread's.
template <int CHUNKS>
__device__ __forceinline__ void chain_multiply(const ChainArgs& C, int q, int legs, ChainOut out, const WholeInput<CHUNKS>& in,
                                               ChainWarp& w) {
  const ChainProduct& P = C.product[q];
  const half2* const steps = ChainImage(C, w.shared, q).steps;
#pragma unroll 1
  for (int round = 0;;) {
#pragma unroll 1
    for (int i = 0; i < legs; i++) {
      Leg now = legs_of(C, w)[i];
      now.kind = __shfl_sync(0xffffffffu, now.kind, 0),
      now.rest = __shfl_sync(0xffffffffu, now.rest, 0);  // the same, so that the compiler knows
      if (now.strips) run_leg<CHUNKS>(C, P, now, steps, in, w);
    }
    barrier_wait(w.bars + kScaled, q & 1);
    if (q == 0) w.set = *reinterpret_cast<const int*>(w.shared + C.room.factors + kChainTokens * sizeof(float));
    crew_sync();
    if (P.a.epilogue == kResidual) {
      chain_add(C, P, q, w);
    } else {
      chain_write(C, P, out, w);
#pragma unroll 1
      for (int e = threadIdx.x + kCrewThreads; e < num_outs(P); e += kCrewThreads) chain_write(C, P, make_out(P, round, e, w), w);
    }
    if (++round == P.rounds) return;
    make_legs(C, q, round, w);
    out = make_out(P, round, threadIdx.x, w);
    crew_sync();  // the sums are read
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
  if (threadIdx.x < C.product[0].a.tokens && C.room.plain_row) {
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
      fetch_pieces(C, shared, bars, bars + kMostPieces, block);
    }
    return;
  }
  if (warp > kCrew) {
    await_inputs(C, shared, bars, block, lane);
    return;
  }
  ChainWarp w{shared, bars, block, warp, lane, warp / kTeam, 0, 0, {}};
  chain_norms(C, w);
  barrier_wait(bars + kImages, 0);
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const ChainProduct& P = C.product[q];
    uint4 order[kOrders] = {};
    load_order(P, order);
    const int legs = num_legs(P);
    make_legs(C, q, 0, w);
    const ChainOut out = P.a.epilogue == kResidual ? ChainOut{-1} : make_out(P, 0, threadIdx.x, w);
    const WholeInput<CHUNKS> in(shared + C.room.xs, reinterpret_cast<const WholeBlock*>(shared + C.room.blocks), P.blocks, P.a.tokens,
                                lane);
    barrier_wait(bars + kReady, q & 1);
    if (q == 0 && P.a.epilogue == kResidual) chain_residual(C, w);
    chain_quantise(C, P, q, order, w);
    crew_sync();
    chain_multiply<CHUNKS>(C, q, legs, out, in, w);
    if (q + 1 < C.count) {
      if (P.writers > 1) {
        if (w.warp < P.writers) some_sync(P.writers * 32);
      } else {
        __syncwarp();
      }
      if (threadIdx.x == 0) meet_arrive(C.meet + q), barrier_arrive(bars + kMine);
    }
  }
  if (C.count == 1) return;
  // Of the products that this launch does not have, too. Nobody reads the number of launches any more, but the next ones.
  if (threadIdx.x >= C.count - 1 && threadIdx.x < kChain) meet_arrive(C.meet + threadIdx.x);
  if (block == 0 && threadIdx.x == kChain) meet_arrive(C.meet + kChain);
}

}  // namespace exl2nb
