// What a chain (chain.cuh) is told, and where things lie in a CTA's shared memory.
#pragma once
#include "cuda/gemm/persistent/chain.h"
#include "cuda/gemm/skinny/gemv.cuh"

namespace exl2nb {

constexpr int kChain = 4, kTeam = 8, kCrew = 2 * kTeam, kCrewThreads = kCrew * 32, kChainThreads = kCrewThreads + 64;
constexpr int kMostPieces = 12;
constexpr int kLegs = 16;  // pieces of all parts of a strip, at most
constexpr int kOwn = 4;    // strips of a residual's product that a CTA owns, at most
enum ChainBar { kImages = 2 * kMostPieces, kReady, kScaled, kMine, kChainBars };

struct ChainProduct {
  GemvArgs a;
  int width, blocks;   // features; 64 stored rows
  int strips, rounds;  // of a part, whose partial sums there is room for; how often that is
  int outs;            // results of a token in a round
  int enough;          // CTAs that have stored theirs when it is worth while to look for all results
  int legs;            // of a warp: pieces of all parts of a strip
  struct {
    int passes, items;  // pieces of a strip; items of a piece
    bool pairs;         // teams take strips by turns, a warp two items of two units each (GpuPart::pairs); of one token
  } piece[kMaxParts];
};

// What is known of a column's result before its sums are there.
struct ChainOut {
  static constexpr uint16_t kNone = 0xffff;
  void* to;         // where token 0's goes, of this launch's first set: to the output, or into the next matrix's input; null: nowhere
  float* residual;  // where else; null: nowhere
  uint16_t sums, sums_up;  // kNone: there is no such column
  float bias, norm;
  float other;  // of gates: the bias of up; of residuals: the scale
};
// What is needed of a product when its sums are there: arguments would have to be fetched then.
struct ChainNow {
  unsigned* meet;
  float* squares;  // token 0's; null: none
  int outs;
  uint16_t activation;
  bool residual, store, gated, announces;
};
// Where a CTA's shared memory begins; partial sums follow.
struct ChainShared {
  uint64_t bars[kChainBars];
  float factors[kChainTokens];
  int set;
  ChainNow now[kChain];
  ChainOut owned[2][kOwn * 16];  // of residuals' products
};
constexpr int kPartials = (sizeof(ChainShared) + 127) / 128 * 128;

struct ChainRoom {    // where other things lie in shared memory
  int pieces, piece;  // of the ring; bytes of one
  int image[kChain], ring, legs, blocks, outs, xs, bytes;
};

struct ChainArgs {
  ChainProduct product[kChain];
  int count, grid;
  int ahead, busier, more;  // slots of the ring under way; the first so many CTAs, which have more to do than the others, have so many more
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

// The turns of both teams at a part's strips where they take them by turns: slots of the ring come by twos, so one may stay empty. Odd
// parts begin with the second team.
struct ChainTurns {
  int first, own, empty;  // a team's first strip, how many it has, slots without one
  __device__ __forceinline__ ChainTurns(int count, int part, int team)
      : first(team ^ (part & 1)), own((count - first + 1) / 2), empty((count + 1) / 2 - own) {}
};

struct Piece {
  int first, last;  // items
  __device__ __forceinline__ Piece(const ChainProduct& P, const ChainImage& image, int p, int pass) {
    first = image.ends[p * kEnds] + pass * P.piece[p].items;
    last = min(first + P.piece[p].items, static_cast<int>(image.ends[p * kEnds + kWarps]));
  }
};

}  // namespace exl2nb
