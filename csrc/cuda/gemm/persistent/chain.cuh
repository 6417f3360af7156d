// Several products in one launch, each with what the one before it wrote: attention's output, gate and up, down, the next QKV; or the head
// alone, whose weights the ring brings quicker than gemv.cuh does. Every CTA stays on its multiprocessor from the first to the last; its
// weights, of all products, come through one ring that does not stop between them.
//
// Sixteen warps in two teams multiply (whole.cuh), one fetches weights, one waits for the other CTAs. A piece is at most sixteen items that
// lie one after the other in a strip: item n of it is warp n's. It comes in two halves, a team's each, that follow one another in the ring.
// Of one token, where a strip is sixteen small items, a warp takes two of them for one, and the teams take strips by turns (ChainTurns): an
// item costs as much as its instructions, which are those of four units.
// A warp keeps what it knows of its item, activations included, while the same piece of all strips passes by, then goes on to the next
// piece of the strips. Between products the CTAs meet at a counter: results are stored, one thread adds, one warp polls; nothing orders the
// two, but what is not written yet is seen (announced.cuh), by attention behind the last one, too. Looking begins when most of those that
// have most to do have come: every look in vain takes from the L2 cache what weights need of it, most of all where rows are wide. Results
// go between products in fp16 where the next matrix's stored rows lie, so that nobody has to gather them; every CTA makes whole numbers
// of them. All CTAs must be there together.
#pragma once
#include <type_traits>

#include "cuda/gemm/persistent/chain_fetch.cuh"
#include "cuda/gemm/persistent/chain_write.cuh"
#include "cuda/gemm/persistent/whole.cuh"

namespace exl2nb {

// The activations of a product, or where they will be. The first product's are another kernel's.
struct ChainInput {
  const half* x;  // token 0's
  int stride, width, blocks;
  __device__ __forceinline__ ChainInput(const ChainProduct& P, int q, const ChainWarp& w)
      : x(P.a.x + (q ? w.set / 2 : 0)), stride(P.a.x_stride), width(P.width), blocks(P.blocks) {
    asm volatile("" : "+l"(x), "+r"(stride), "+r"(width), "+r"(blocks));  // read now, not when the activations are there
  }
};

// The activations to whole numbers: 64 stored rows by LANES neighbouring lanes, which look for so many blocks at a time.
template <int CHUNKS, int LANES, int SIDE>
__device__ __forceinline__ void quantise(const ChainArgs& C, const ChainInput& in, int q, const ChainWarp& w) {
  constexpr int kBlocks = 32 / LANES, kPlaces = 8 / LANES;  // of a warp at a time; of a lane in a block
  WholeBlock* const blocks = reinterpret_cast<WholeBlock*>(w.shared + C.room.blocks);
  uint8_t* const xs = w.shared + C.room.xs;
  const int t = w.lane % LANES, tokens = tokens_of<CHUNKS>(C.product[q]);
#pragma unroll 1
  for (int m = 0; m < tokens; m++) {
    const half* const x = in.x + (q == 0 && C.product[0].a.rows ? row_of(C.product[0].a, m) : m) * in.stride + t * 8;
#pragma unroll 1
    for (int first = w.warp * kBlocks; first < in.blocks; first += SIDE * kCrew * kBlocks) {
      uint4 v[SIDE][kPlaces];
      const auto row = [&](int side, int k) { return (first + side * kCrew * kBlocks + w.lane / LANES) * 64 + k * LANES * 8; };
#pragma unroll
      for (int side = 0; side < SIDE; side++)
#pragma unroll
        for (int k = 0; k < kPlaces; k++) {
          v[side][k] = make_uint4(0, 0, 0, 0);  // past the last row there is nothing
          if (row(side, k) + t * 8 < in.width) v[side][k] = load_now(x + row(side, k));
        }
#pragma unroll 1
      for (int side = 0; side < SIDE && row(side, 0) - w.lane / LANES * 64 < in.width; side++) {
        uint4 own[kPlaces];
#pragma unroll
        for (int k = 0; k < kPlaces; k++) {
          own[k] = SIDE > 1 && side ? v[SIDE - 1][k] : v[0][k];
          // One after the other: looking in vain takes from the L2 cache what others need of it.
          if (q && row(side, k) + t * 8 < in.width && !is_there(own[k])) own[k] = await(x + row(side, k));
        }
        const int at = row(side, 0) / 64, to = m * in.blocks + at;
        to_whole<LANES>(own, xs + to * 128, blocks + to, t, at < in.blocks);
      }
    }
  }
}
template <int CHUNKS>
__device__ __forceinline__ void chain_quantise(const ChainArgs& C, const ChainInput& in, int q, const ChainWarp& w) {
  if (in.blocks <= kCrew * 4)
    quantise<CHUNKS, 8, 1>(C, in, q, w);
  else
    quantise<CHUNKS, 4, 2>(C, in, q, w);
}

// What a warp does with a piece of all strips of a part. All of a product's are made before the activations are there.
struct Leg {
  uint32_t kind, rest;                                     // of the item (Brief)
  int offset;                                              // of the item in its half of the piece
  int steps;                                               // the item's first
  int strips;                                              // 0: nothing to do; negative: no item for this warp
  int sums;                                                // where they go, a multiple of 16, and what follows
  static constexpr int kAdds = 1, kPairs = 2, kEmpty = 4;  // to what is there; as ChainProduct says; a slot without a strip comes last
};

__device__ __forceinline__ Leg make_leg(const ChainArgs& C, int q, int round, int warp, int number, const ChainWarp& w) {
  const ChainProduct& P = C.product[q];
  const ChainImage image(C, w.shared, q);
  int p = 0, pass = number;
#pragma unroll 1
  while (pass >= P.piece[p].passes) pass -= P.piece[p++].passes;
  const int count = max(chain_strips(P, p, first_strip(P.a, w.block, p), round), 0);
  const Piece piece(P, image, p, pass);
  if (P.piece[p].pairs) {
    const int team = warp / kTeam, n = piece.first + warp % kTeam * 2;
    const ChainTurns turns(count, p, team);
    const ItemWords it(image.items[n]);
    const int sums = ((p * P.strips + turns.first) * kCrew + warp % kTeam * 2) * 16;
    return {it.words.y, it.words.w, static_cast<int>(it.words.x),
            it.unit0(), turns.own,  sums | Leg::kPairs | (turns.empty ? Leg::kEmpty : 0)};
  }
  const int n = piece.first + warp;
  const bool mine = n < piece.last;
  const ItemWords it(image.items[mine ? n : piece.first]);
  const int begin = image.items[mine ? piece.first + warp / kTeam * kTeam : piece.first].offset;
  const int sums = (p * P.strips * kCrew + warp) * 16 * P.a.tokens;
  return {
      it.words.y, it.words.w, static_cast<int>(it.words.x) - begin, it.unit0(), mine ? count : -count, sums | (pass > 0 ? Leg::kAdds : 0)};
}

// The warps' legs lie in shared memory, each leg those of all warps; made by threads from the `first` one on.
__device__ __forceinline__ Leg* legs_of(const ChainArgs& C, const ChainWarp& w) { return reinterpret_cast<Leg*>(w.shared + C.room.legs); }

__device__ __forceinline__ void make_legs(const ChainArgs& C, int q, int round, int first, const ChainWarp& w) {
  const int i = static_cast<int>(threadIdx.x) - first;
  if (i >= 0 && i < C.product[q].legs * kCrew) legs_of(C, w)[i] = make_leg(C, q, round, i % kCrew, i / kCrew, w);
}

template <int CHUNKS, WholeWeights WEIGHTS>
__device__ __forceinline__ void run_leg(const ChainArgs& C, const ChainProduct& P, const Leg& leg, const half2* steps,
                                        const WholeInput<CHUNKS>& in, ChainWarp& w) {
  const bool add = leg.sums & Leg::kAdds;
  const int lane = w.lane, step = kCrew * 16 * tokens_of<CHUNKS>(P), count = abs(leg.strips);
  const uint8_t* const ring = w.shared + C.room.ring;
  float* to = partials(w) + (leg.sums & ~15);
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
  kind_of<CHUNKS, WEIGHTS>(brief, leg.sums & Leg::kPairs, [&](auto* kind) {
    using Kind = std::remove_pointer_t<decltype(kind)>;
    const Kind item(brief, steps + leg.steps, in);
    const auto here = [&] { return ring + w.slot * C.room.piece + leg.offset; };
    if constexpr (Kind::kAhead) {
      typename Kind::Words words;
      w.wait();
      item.load(here(), lane, words);
#pragma unroll 1
      for (int left = count;; to += Kind::kPairs ? 2 * step : step) {
        int c[Kind::kSums][4];
        WholeSums<CHUNKS> y;
        item.products(words, c);
        const uint32_t code = words.code;
        if constexpr (Kind::kRounds > 1) item.multiply(here(), lane, y, 1);
        w.release(C.room.pieces);
        const bool more = --left;
        if (more) {
          w.wait();
          item.load(here(), lane, words);
        }
        item.finish(code, c, y);
        y.template put<Kind::kPairs>(to, in, lane, add);
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

// The product of q and what it writes.
template <int CHUNKS, WholeWeights WEIGHTS>
__device__ __forceinline__ void chain_multiply(const ChainArgs& C, int q, const WholeInput<CHUNKS>& in, ChainWarp& w) {
  const ChainProduct& P = C.product[q];
  const half2* const steps = ChainImage(C, w.shared, q).steps;
  const int legs = P.legs;
#pragma unroll 1
  for (int round = 0;;) {
#pragma unroll 1
    for (int i = 0; i < legs; i++) {
      Leg now = legs_of(C, w)[i * kCrew + w.warp];
      now.kind = __shfl_sync(0xffffffffu, now.kind, 0),
      now.rest = __shfl_sync(0xffffffffu, now.rest, 0);  // the same, so that the compiler knows
      if (now.strips) run_leg<CHUNKS, WEIGHTS>(C, P, now, steps, in, w);
      if (CHUNKS == 4 && now.sums & Leg::kEmpty) w.wait(), w.release(C.room.pieces);
    }
    barrier_wait(w.bars + kScaled, q & 1);
    if (q == 0) w.set = near(w).set;
    const ChainNow now = near(w).now[q];
    crew_sync();
    round++;
    if (now.residual) {  // of one round
      chain_add<CHUNKS>(C, P, q, now, w);
    } else {
      chain_write<CHUNKS>(C, P, now, w);
      if (round == P.rounds && q + 1 < C.count) come(now, w);
    }
    if (round == P.rounds) return;
    make_legs(C, q, round, 0, w);
    make_outs(C, P, round, 0, w);
    crew_sync();  // the sums are read
  }
}

template <int CHUNKS, WholeWeights WEIGHTS>
__global__ void __launch_bounds__(kChainThreads, 1) chain_products(const __grid_constant__ ChainArgs C) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  unsigned here = shared_address(dynamic);
  asm volatile("" : "+r"(here));  // one register instead of the same computation at every use
  uint8_t* const shared = static_cast<uint8_t*>(__cvta_shared_to_generic(here));
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0), block = blockIdx.x;
  uint64_t* const bars = reinterpret_cast<ChainShared*>(shared)->bars;
  pdl_launch_dependents();
  if (threadIdx.x < kChainBars) {
    const int i = threadIdx.x;
    barrier_init(bars + i, i == kMine ? kCrew * kWarpArrivals : i >= kMostPieces && i < 2 * kMostPieces ? kTeam * kWarpArrivals : 1);
    barrier_fence();
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
  prepare(C, w);
  barrier_wait(bars + kImages, 0);
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const ChainProduct& P = C.product[q];
    // By warps of which most have nothing to write of the product before, so that these are not waited for.
    static_assert(kLegs * kCrew <= kCrewThreads / 2, "a thread a leg");
    make_legs(C, q, 0, kCrewThreads / 2, w);
    if (P.a.epilogue != kResidual) make_outs(C, P, 0, kCrewThreads / 4, w);
    const ChainInput x(P, q, w);
    const WholeInput<CHUNKS> in(shared + C.room.xs, reinterpret_cast<const WholeBlock*>(shared + C.room.blocks), P.blocks, P.a.tokens,
                                lane);
    barrier_wait(bars + kReady, q & 1);
    if (q == 0 && P.a.epilogue == kResidual) chain_residual(C, w);
    chain_quantise<CHUNKS>(C, x, q, w);
    crew_sync();
    chain_multiply<CHUNKS, WEIGHTS>(C, q, in, w);
  }
  if (C.count == 1) return;
  // Of the products that this launch does not have, too. Nobody reads the number of launches any more, but the next ones.
  if (threadIdx.x >= C.count - 1 && threadIdx.x < kChain) meet_arrive(C.meet + threadIdx.x);
  if (block == 0 && threadIdx.x == kChain) meet_arrive(C.meet + kChain);
}

}  // namespace exl2nb
