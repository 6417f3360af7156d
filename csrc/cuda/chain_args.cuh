// What a chain (chain.cuh) is told, and where things lie in a CTA's shared memory.
#pragma once
#include "chain.h"
#include "gemv.cuh"

namespace exl2nb {

constexpr int kChain = 4, kTeam = 8, kCrew = 2 * kTeam, kCrewThreads = kCrew * 32, kChainThreads = kCrewThreads + 64;
constexpr int kMostPieces = 12, kAhead = 2;
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

struct ChainRoom {    // where things lie in shared memory
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
  uint4* spent;  // as in ChainLink
  int spent_count;
  bool announces;
  ChainRoom room;
};

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

}  // namespace exl2nb
