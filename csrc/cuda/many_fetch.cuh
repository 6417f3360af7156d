// What warps of their own fetch for the others of a CTA (many.cuh): items into stages, the activations that meet them into a ring of
// units.
// A lane's copy takes its warp about 70 cycles, so four warps share them.
#pragma once
#include "many_share.cuh"

namespace exl2nb {

// Where fetching warp and workers are: which stage, which turn of it, where the item's activations begin in the ring.
template <int NB>
struct ManyTurn {
  int stage = 0, slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int units) {
    slot += units;
    if (slot >= many_ring(NB)) slot -= many_ring(NB);
    if (++stage == many_stages(NB)) stage = 0, phase ^= 1;
  }
};

// Stages whose weights are asked for before the predecessor's end: with more of them the first activations come late.
constexpr int kManyAhead = 2;

// A warp that fetches: of every item the strips, then the activations.
template <int NB>
struct ManyFetch {
  const ManyArgs& A;
  const Item* items;
  const uint16_t* ends;
  uint8_t *weights, *tokens;
  uint64_t *full, *empty;
  int crew, lane;  // which of the four warps that fetch: each a quarter of the strips, the first one also the activations

  // Activations that meet an item: where they lie, how many units, where they go.
  struct Tokens {
    const uint8_t* from;
    int units, slot, stage;
  };

  // Calls f(part, tile, item, its units, stage and place) for every item of every tile.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    ManyTurn<NB> at;
    each_tile(A, [&](const ManyTile& tile, int from, int to) {
#pragma unroll 1
      for (int p = 0; p <= (A.paired ? 1 : 0); p++) {
        ManyShare share(A, items, ends, tile, p, from, to);
#pragma unroll 1
        while (share.more()) {
          int begin, end;
          const Item it = share.take(items, begin, end);
          f(A.part[tile.part + p], tile, it, begin, end, at);
          at.next(end - begin);
        }
      }
    });
  }
  __device__ __forceinline__ void fetch_weights(const ManyPart& p, const ManyTile& tile, const Item& it, int begin, int end,
                                                const ManyTurn<NB>& at) const {
    const bool whole = end - begin == it.units;
    const int unit = 128 * it.bits, rest = it.bytes - it.units * unit, words = whole ? it.bytes : (end - begin) * unit;
    uint64_t* const bar = full + at.stage;
    if (crew == 0 && lane == 0) barrier_expect(bar, tile.live * (words + (whole ? 0 : rest)) + (end - begin) * many_unit(NB));
    const int strip = crew * kManyEach + lane;
    if (lane >= kManyEach || strip >= tile.live) return;
    const uint8_t* const from = p.data + (tile.first_strip + strip) * p.strip_bytes + it.offset;
    uint8_t* const to = weights + at.stage * kManyWeights + strip * kSlot;
    copy_once(to + begin * unit, from + begin * unit, words, bar);
    if (!whole && rest) copy_once(to + it.units * unit, from + it.units * unit, rest, bar);
  }
  __device__ __forceinline__ Tokens tokens_of(const ManyPart& p, const Item& it, int begin, int end, const ManyTurn<NB>& at) const {
    const auto* const x = reinterpret_cast<const uint8_t*>(A.x + static_cast<size_t>(p.perm) * A.x_perm_stride);
    return {x + static_cast<size_t>(it.block) * (32 * 2 * NB * 8) + begin * many_unit(NB), end - begin, at.slot, at.stage};
  }
  __device__ __forceinline__ void fetch_tokens(const Tokens& t) const {
    const int first = min(t.units, many_ring(NB) - t.slot) * many_unit(NB), all = t.units * many_unit(NB);
    bulk_copy(tokens + t.slot * many_unit(NB), t.from, first, full + t.stage);
    if (first < all) bulk_copy(tokens, t.from + first, all - first, full + t.stage);
  }

  __device__ __forceinline__ void run() const {
    int count = 0, live = 0, used = 0;  // items seen; items and units in the ring
    uint32_t sizes = 0;                 // units of the last items, four bits each
    ManyTurn<NB> back;
    const auto make_room = [&](int units) {
      while (live == many_stages(NB) || used + units > many_ring(NB)) {
        barrier_wait(empty + back.stage, back.phase);
        used -= sizes >> (4 * (live - 1)) & 15, live--;
        back.next(0);
      }
      sizes = sizes << 4 | units, used += units, live++;
    };
    // The first stages' weights before the predecessor's end, each one's activations, which a lane keeps in mind, after it.
    Tokens mine{};
    const auto begin_tokens = [&] {
      pdl_wait();
      for (int i = 0; i < count; i++) {
        make_room(__shfl_sync(~0u, mine.units, i));
        if (crew == 0 && lane == i) fetch_tokens(mine);
      }
      if (crew == 0 && lane == 0) EXL2NB_CLOCK(A, 8);
      if (A.next_image && crew == 1 && lane == 0) prefetch(A.next_image, A.next_image_bytes);
    };
    if (crew == 0 && lane == 0) EXL2NB_CLOCK(A, 7);
    each([&](const ManyPart& p, const ManyTile& tile, const Item& it, int begin, int end, const ManyTurn<NB>& at) {
      if (count < kManyAhead) {
        fetch_weights(p, tile, it, begin, end, at);
        if (lane == count) mine = tokens_of(p, it, begin, end, at);
        if (++count == kManyAhead) begin_tokens();
        return;
      }
      make_room(end - begin);
      fetch_weights(p, tile, it, begin, end, at);
      if (crew == 0 && lane == 0) fetch_tokens(tokens_of(p, it, begin, end, at));
    });
    if (count < kManyAhead) begin_tokens();
  }
};

}  // namespace exl2nb
