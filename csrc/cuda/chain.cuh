// Several products in one launch, each with what the one before it wrote: attention's output, gate and up, down, the next QKV. Every CTA stays
// on its multiprocessor from the first to the last; its weights, of all products, come through one ring that does not stop between them.
//
// Sixteen warps in two teams multiply (whole.cuh), one fetches weights, one waits for the other CTAs. A piece is at most sixteen items that lie
// one after the other in a strip: item n of it is warp n's. It comes in two halves, a team's each, that follow one another in the ring. A warp keeps what it knows of its item, activations included, while the same piece of
// all strips passes by, then goes on to the next piece of the strips. Between products the CTAs meet at a counter: results are stored, one
// thread adds, one warp polls; nothing orders the two, but what is not written yet is seen (`written`). Activations go between products in fp16, in natural order where there is room to put them into the
// order of the rows here, otherwise in that order; every CTA makes whole numbers of them. All CTAs must be there together.
#pragma once
#include "gemv.cuh"
#include "whole.cuh"
#ifndef AHEAD
#define AHEAD 2
#endif
#ifndef BUDGET
#define BUDGET 220
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
namespace exl2nb { static __device__ long long chain_stamps[132][4][16]; }
#define STAMP(i) if (threadIdx.x == 0) exl2nb::chain_stamps[blockIdx.x][q][i] = clock64();
#define STAMPW(i) if (lane == 0) exl2nb::chain_stamps[blockIdx.x][q][i] = clock64();
namespace exl2nb { static __device__ long long chain_fine[132][4][4][8]; }
#define FINE(i, v) { if (threadIdx.x == 0 && number < 4) exl2nb::chain_fine[blockIdx.x][q][number][i] = clock64() + ((v) == 0x7fedcba9); }
#else
#define FINE(i, v) {}
#define STAMP(i)
#define STAMPW(i)
#endif
namespace exl2nb {

constexpr int kChain = 4, kTeam = 8, kCrew = 2 * kTeam, kCrewThreads = kCrew * 32, kChainThreads = kCrewThreads + 64;
constexpr int kMostPieces = 12, kAhead = AHEAD, kChainTokens = 4;
constexpr int kLegs = 16;   // pieces of all parts of a strip, at most
constexpr int kOwn = 4;     // strips of a residual's product that a CTA owns, at most
constexpr int kOrders = 3;  // octets of the order that a thread loads before the activations are there
enum ChainBar { kImages = 2 * kMostPieces, kReady, kScaled, kMine, kChainBars };

struct ChainProduct {
  GemvArgs a;             // next.inverse null and next_natural: in natural order
  const uint16_t* order;  // as blob.h says; null: x lies in the order of the rows
  int width, blocks;      // features; 64 stored rows
  int strips, rounds;     // of a part, whose partial sums there is room for; how often that is
  int writers;            // warps that store results
  bool next_natural;
  struct {
    int passes, items;  // pieces of a strip; items of a piece
  } piece[kMaxParts];
};
struct ChainRoom {  // where things lie in shared memory
  int pieces, piece;  // of the ring; bytes of one
  int image[kChain], ring, bars, legs, blocks, factors, partial, norms, xs, plain, bytes;
  int owned, plain_row;
};
struct ChainArgs {
  ChainProduct product[kChain];
  int count, grid;
  unsigned* meet;  // [kChain]: how often CTAs came, in all launches, to the end of a product; the last one: of a launch; then: launches
  uint8_t* set;    // what lies between products; behind it the same for the next launch
  int set_bytes;
  ChainRoom room;
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void crew_sync() { asm volatile("bar.sync 1,%0;" ::"n"(kCrewThreads) : "memory"); }
__device__ __forceinline__ void some_sync(int threads) { asm volatile("bar.sync 2,%0;" ::"r"(threads) : "memory"); }
__device__ __forceinline__ void barrier_arrive(uint64_t* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(shared_address(b)) : "memory"); }
__device__ __forceinline__ void meet_arrive(unsigned* c) { asm volatile("red.relaxed.gpu.global.add.u32 [%0],1;" ::"l"(c) : "memory"); }
__device__ __forceinline__ unsigned meet_now(const unsigned* c) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(c) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared_by_all(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_for_all(half* p, half v) {
  asm volatile("st.relaxed.gpu.global.u16 [%0],%1;" ::"l"(p), "h"(__half_as_ushort(v)) : "memory");
}
__device__ __forceinline__ void store_for_all(float* p, float v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(__float_as_uint(v)) : "memory");
}
__device__ __forceinline__ void copy_weights(void* to, const void* from, uint32_t bytes, uint64_t* b, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes), "r"(shared_address(b)), "l"(policy)
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
__device__ __forceinline__ uint4 load_shared_by_all(const void*) { return make_uint4(0, 0, 0, 0); }
__device__ __forceinline__ void store_for_all(half*, half) {}
__device__ __forceinline__ void store_for_all(float*, float) {}
__device__ __forceinline__ void copy_weights(void*, const void*, uint32_t, uint64_t*, uint64_t) {}
__device__ __forceinline__ uint64_t once() { return 0; }
#endif


// Between products +0 means: not written yet. What is zero is written as -0.
__device__ __forceinline__ half written(half v) { return __half_as_ushort(v) ? v : __ushort_as_half(0x8000); }
__device__ __forceinline__ float written(float v) { return __float_as_uint(v) ? v : -0.f; }
__device__ __forceinline__ bool is_written(uint4 v) {  // eight halves
  const auto missing = [](uint32_t w) { return (w - 0x00010001u) & ~w & 0x80008000u; };
  return (missing(v.x) | missing(v.y) | missing(v.z) | missing(v.w)) == 0;
}
__device__ __forceinline__ uint4 load_written(const half* p) {
  for (;;) {
    const uint4 v = load_shared_by_all(p);
    if (CNX || is_written(v)) return v;
  }
}
__device__ __forceinline__ float load_written(const float* p) {
  for (;;) {
    const unsigned v = meet_now(reinterpret_cast<const unsigned*>(p));
    if (CNX || v) return __uint_as_float(v);
  }
}

// A matrix's image in shared memory.
struct ChainImage {
  const Item* items;
  const half2* steps;
  const uint16_t* ends;
  __device__ __forceinline__ ChainImage(const ChainArgs& C, const uint8_t* shared, int q) {
    const GemvArgs& A = C.product[q].a;
    const uint8_t* const image = shared + C.room.image[q];
    items = reinterpret_cast<const Item*>(image), steps = reinterpret_cast<const half2*>(image + image_steps(A.items));
    ends = reinterpret_cast<const uint16_t*>(image + image_ends(A.items, A.units));
  }
};
// Strips of a part in a round that are a CTA's; strip0: the first of all of them.
__device__ __forceinline__ int chain_strips(const ChainProduct& P, int p, int strip0, int round) {
  return min(P.a.part[p].whole + (strip0 < P.a.part[p].rest ? 1 : 0) - round * P.strips, P.strips);
}
struct Piece {
  int first, last;  // items
  __device__ __forceinline__ Piece(const ChainProduct& P, const ChainImage& image, int p, int pass) {
    first = image.ends[p * kEnds] + pass * P.piece[p].items;
    last = min(first + P.piece[p].items, static_cast<int>(image.ends[p * kEnds + kWarps]));
  }
};

// What fetches weights: one thread.
__device__ __forceinline__ void fetch_pieces(const ChainArgs& C, uint8_t* shared, uint64_t* full, uint64_t* empty, int block) {
  const uint64_t policy = once();
  int slot = 0, old = 0, issued = 0;
  uint32_t phase = 1, old_phase = 0;
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const ChainProduct& P = C.product[q];
    const GemvArgs& A = P.a;
    const ChainImage image(C, shared, q);
#pragma unroll 1
    for (int round = 0; round < P.rounds; round++)
#pragma unroll 1
      for (int p = 0; p < A.num_parts; p++) {
        const int strip0 = first_strip(A, block, p), count = chain_strips(P, p, strip0, round);
        const int64_t hop = A.grid * A.part[p].strip_bytes;
        const uint8_t* const begin = A.part[p].data + strip0 * A.part[p].strip_bytes + round * P.strips * hop;
#pragma unroll 1
        for (int pass = 0; pass < P.piece[p].passes; pass++) {
          const Piece piece(P, image, p, pass);
          const uint8_t* from = begin;
#pragma unroll 1
          for (int s = 0; s < count; s++, from += hop)
#pragma unroll 1
            for (int n = piece.first; n < piece.first + kCrew; n += kTeam) {
              const bool any = n < piece.last;
              const Item& end = image.items[min(n + kTeam, piece.last) - 1];
              const uint32_t offset = image.items[any ? n : piece.first].offset, bytes = any ? end.offset + end.bytes - offset : 0;
              barrier_wait(empty + slot, phase);
              if (issued >= kAhead) {  // no more than so many under way
                barrier_wait(full + old, old_phase);
                if (++old == C.room.pieces) old = 0, old_phase ^= 1;
              }
              issued++;
              barrier_expect(full + slot, bytes);
              if (any) copy_weights(shared + C.room.ring + slot * C.room.piece, from + offset, bytes, full + slot, policy);
              if (++slot == C.room.pieces) slot = 0, phase ^= 1;
            }
        }
      }
  }
}

// What waits for the other CTAs: a warp. Says when the activations are there, or on their way, and the factors. The counters only say when looking
// is worth while: what is written says so itself.
__device__ __forceinline__ void await_inputs(const ChainArgs& C, uint8_t* shared, uint64_t* bars, int block, int lane) {
  float* const factors = reinterpret_cast<float*>(shared + C.room.factors);
  unsigned before = 0;  // all counters, when this launch began
  int set = 0;          // bytes to what is this launch's
#pragma unroll 1
  for (int q = 0; q < C.count; q++) {
    const GemvArgs& A = C.product[q].a;
    if (q == 0) {
      pdl_wait();
    } else if (!CNX && lane == 0) {
      barrier_wait(bars + kMine, (q - 1) & 1);
      while (static_cast<int>(meet_now(C.meet + q - 1) - before - C.grid / 2) < 0) {}  // of the rest more is seen by looking at what they write
    }
    __syncwarp();
    STAMPW(10)
    if (lane == 0) barrier_arrive(bars + kReady);
    if (q == 0) {
      if (lane == 0) before = meet_now(C.meet + kChain - 1);  // the others' last cannot come before this CTA's first
      set = (meet_now(C.meet + kChain) & 1) * C.set_bytes;
      if (lane == 0) *reinterpret_cast<int*>(factors + kChainTokens) = set;
      uint4* const other = reinterpret_cast<uint4*>(C.set + C.set_bytes - set);  // of the next launch: nobody reads it now
      for (int i = block * 32 + lane; i < C.set_bytes / 16; i += C.grid * 32) other[i] = make_uint4(0, 0, 0, 0);
    }
#pragma unroll 1
    for (int m = 0; m < A.tokens; m++) {
      float sum = 0.f;
      if (A.squares) {
        constexpr int kSide = 5;  // loads side by side
        const float* const squares = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(A.squares) + set) + static_cast<size_t>(m) * A.squares_count;
        float some[kSide] = {};
#pragma unroll
        for (int k = 0; k < kSide; k++)
          if (const int i = lane + 32 * k; i < A.squares_count) some[k] = __uint_as_float(meet_now(reinterpret_cast<const unsigned*>(squares + i)));
#pragma unroll
        for (int k = 0; k < kSide; k++) {
          if (const int i = lane + 32 * k; i < A.squares_count && __float_as_uint(some[k]) == 0) some[k] = load_written(squares + i);
          sum += some[k];
        }
        for (int i = lane + 32 * kSide; i < A.squares_count; i += 32) sum += load_written(squares + i);
      }
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
  int block, warp, lane, slot, set;  // set: bytes to what is this launch's between products
  uint32_t phase;
  float residual[kOwn / 2];  // warp m's of token m

  __device__ __forceinline__ void wait() const {
    if (!CNW) barrier_wait(bars + slot, phase);
  }
  __device__ __forceinline__ void release(int pieces) {
    __syncwarp();
    if (!CNW && lane == 0) barrier_arrive(bars + kMostPieces + slot);
    if ((slot += 2) >= pieces) slot -= pieces, phase ^= 1;  // an even number
  }
};

// A token's activations: the first product's are another kernel's.
__device__ __forceinline__ const half* x_of(const ChainProduct& P, int q, int m, const ChainWarp& w) {
  return P.a.x + static_cast<size_t>(m) * P.a.x_stride + (q ? w.set / 2 : 0);
}

// The activations to whole numbers in the order of the rows. order: of this thread's first kOrders octets, loaded before the activations are there.
__device__ __forceinline__ void load_order(const ChainProduct& P, uint4 (&order)[kOrders]) {
  const int octs = P.blocks * 8;
#pragma unroll
  for (int k = 0; k < kOrders; k++)
    if (const int i = threadIdx.x + k * kCrewThreads; P.order && i < octs) order[k] = __ldg(reinterpret_cast<const uint4*>(P.order) + i);
}
__device__ __forceinline__ void chain_quantise(const ChainArgs& C, const ChainProduct& P, int q, const uint4 (&order)[kOrders], const ChainWarp& w) {
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
          if (const int i = first + k * kCrewThreads * 8; i < P.width) v[k] = load_shared_by_all(from + i);
#pragma unroll
        for (int k = 0; k < kSide; k++)
          if (const int i = first + k * kCrewThreads * 8; i < P.width) *reinterpret_cast<uint4*>(row + i) = CNX || is_written(v[k]) ? v[k] : load_written(from + i);
      }
    }
    STAMP(2)
    crew_sync();
    STAMP(3)
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
        v = q ? load_written(x + at * 8) : __ldcg(reinterpret_cast<const uint4*>(x) + at);
      to_whole(v, xs + (m * P.blocks + (at >> 3)) * 128, blocks + m * P.blocks + (at >> 3), w.lane, i + w.lane < octs);
    };
    int i = w.warp * 32;
#pragma unroll
    for (int k = 0; k < kOrders; k++, i += kCrewThreads)
      if (i < octs) put(i, order[k]);
#pragma unroll 1
    for (; i < octs; i += kCrewThreads) put(i, P.order ? __ldg(reinterpret_cast<const uint4*>(P.order) + min(i + w.lane, octs - 1)) : order[0]);
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
__device__ __forceinline__ void run_leg(const ChainArgs& C, const ChainProduct& P, const Leg& leg, const half2* steps, const WholeInput<CHUNKS>& in,
                                        ChainWarp& w, [[maybe_unused]] int q, [[maybe_unused]] int number) {
  const int lane = w.lane, step = kCrew * 16 * P.a.tokens, count = abs(leg.strips);
  const bool add = leg.sums & 1;
  const uint8_t* const ring = w.shared + C.room.ring;
  float* to = reinterpret_cast<float*>(w.shared + C.room.partial) + (leg.sums & ~1);
  FINE(0, 0)
  if (leg.strips < 0 || CNC) {
#pragma unroll 1
    for (int s = 0; s < count; s++, to += step) {
      WholeSums<CHUNKS> y;
      w.wait();
      if (CNC) y.y[0][0] += ring[w.slot * C.room.piece + lane];
      w.release(C.room.pieces);
      y.put(to, in, lane, add);
    }
    return;
  }
  const Brief brief{leg.kind, leg.rest};
  kind_of<CHUNKS>(brief, [&](auto* kind) {
    using Kind = std::remove_pointer_t<decltype(kind)>;
    const Kind item(brief, steps + leg.steps, in);
    FINE(1, item.spy())
    const auto here = [&] { return ring + w.slot * C.room.piece + leg.offset; };
    if constexpr (Kind::kAhead) {
      typename Kind::Words words;
      w.wait();
      FINE(2, 0)
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
        if (left + 1 == count) FINE(3, __float_as_int(y.y[0][0]))
        y.put(to, in, lane, add);
        if (left + 1 == count) FINE(4, 0)
        if (left + 2 == count) FINE(6, 0)
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
    FINE(7, 0)
  });
}

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
    store_for_all(row + column, written(saturated(v)));
  } else {
#pragma unroll 1
    for (int p = 0; p < to.num_perms; p++)
      store_for_all(row + static_cast<size_t>(p) * to.perm_stride + fragment_place(to.inverse[p] ? to.inverse[p][column] : column), written(saturated(v)));
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
      const float y = crew_total(partial + (r >> 4) * kCrew * 16 * M + (r & 15), M) * factor, v = w.residual[k] + A.scale * (y + (A.bias ? A.bias[column] : 0.f));
      w.residual[k] = v;
      if (q) A.residual[static_cast<size_t>(m) * A.residual_stride + column] = v;
      squares = fmaf(v, v, squares);
      if (A.next_norm) chain_put(P, last, m, column, v * norms[r], w);
    }
  }
  if (A.next_norm) {
    squares = warp_sum(squares);
    if (w.lane == 0) store_for_all(A.next_squares + m * A.grid + w.block + (last ? 0 : w.set / 4), written(squares));
  }
}
// What a thread writes of the other epilogues; e: which of a round's values, [part][token][column], of gates those of the first part.
struct ChainOut {
  int sums;    // of the strip, token and column; negative: nothing
  int token, column;
  float bias, bias_up;
};
__device__ __forceinline__ int num_outs(const ChainProduct& P) { return (P.a.epilogue == kStore ? P.a.num_parts : 1) * P.a.tokens * P.strips * 16; }
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
  return {((part * P.strips + (r >> 4)) * kCrew * A.tokens + m) * 16 + (r & 15), m, A.epilogue == kStore ? out : column, A.bias ? A.bias[out] : 0.f,
          A.bias && A.gated ? A.bias[A.part[0].outputs + column] : 0.f};
}
__device__ __forceinline__ void chain_write(const ChainArgs& C, const ChainProduct& P, const ChainOut& o, const ChainWarp& w) {
  const GemvArgs& A = P.a;
  if (o.sums < 0) return;
  const float* const partial = reinterpret_cast<const float*>(w.shared + C.room.partial) + o.sums;
  const float factor = reinterpret_cast<const float*>(w.shared + C.room.factors)[o.token], v = crew_total(partial, A.tokens) * factor + o.bias;
  if (A.epilogue == kStore)
    A.out[o.token * A.out_stride + o.column] = v;
  else if (A.gated)
    chain_put(P, false, o.token, o.column, activation(v, A.activation) * (crew_total(partial + P.strips * kCrew * 16 * A.tokens, A.tokens) * factor + o.bias_up), w);
  else
    chain_put(P, false, o.token, o.column, activation(v, A.activation), w);
}

// The product of q and what it writes. out: of the first round, this thread's.
template <int CHUNKS>
__device__ __forceinline__ void chain_multiply(const ChainArgs& C, int q, int legs, ChainOut out, const WholeInput<CHUNKS>& in, ChainWarp& w) {
  const ChainProduct& P = C.product[q];
  const half2* const steps = ChainImage(C, w.shared, q).steps;
#pragma unroll 1
  for (int round = 0;;) {
#pragma unroll 1
    for (int i = 0; i < legs; i++) {
      Leg now = legs_of(C, w)[i];
      now.kind = __shfl_sync(0xffffffffu, now.kind, 0), now.rest = __shfl_sync(0xffffffffu, now.rest, 0);  // the same, so that the compiler knows
      if (now.strips) run_leg<CHUNKS>(C, P, now, steps, in, w, q, i);
    }
    STAMP(6)
    barrier_wait(w.bars + kScaled, q & 1);
    if (q == 0) w.set = *reinterpret_cast<const int*>(w.shared + C.room.factors + kChainTokens * sizeof(float));
    crew_sync();
    STAMP(7)
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
      for (int q = 0; q < C.count; q++) bulk_copy(shared + C.room.image[q], C.product[q].a.image, padded_image(C.product[q].a), bars + kImages);
      barrier_wait(bars + kImages, 0);
      if (!CNW) fetch_pieces(C, shared, bars, bars + kMostPieces, block);
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
    const WholeInput<CHUNKS> in(shared + C.room.xs, reinterpret_cast<const WholeBlock*>(shared + C.room.blocks), P.blocks, P.a.tokens, lane);
    STAMP(0)
    barrier_wait(bars + kReady, q & 1);
    STAMP(1)
    if (q == 0) chain_residual(C, w);
    chain_quantise(C, P, q, order, w);
    STAMP(4)
    crew_sync();
    STAMP(5)
    chain_multiply<CHUNKS>(C, q, legs, out, in, w);
    STAMP(8)
    if (q + 1 < C.count) {
      if (P.writers > 1) {
        if (w.warp < P.writers) some_sync(P.writers * 32);
      } else {
        __syncwarp();
      }
      if (threadIdx.x == 0) meet_arrive(C.meet + q), barrier_arrive(bars + kMine);
      STAMP(9)
    }
  }
  // Of the products that this launch does not have, too. Nobody reads the number of launches any more, but the next ones.
  if (threadIdx.x >= C.count - 1 && threadIdx.x < kChain) meet_arrive(C.meet + threadIdx.x);
  if (block == 0 && threadIdx.x == kChain) meet_arrive(C.meet + kChain);
}

}  // namespace exl2nb
