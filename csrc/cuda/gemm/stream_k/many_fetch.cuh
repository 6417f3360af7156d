// What warps of their own fetch for the others of a CTA (many.cuh): items into stages, the activations that meet them into a ring of
// units.
// A lane's copy takes its warp about 70 cycles, so three warps share the weights; a fourth one has nothing but activations, which are
// asked for as soon as the predecessor has ended.
#pragma once
#include "cuda/gemm/stream_k/many_share.cuh"

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

// Items whose weights are asked for before the predecessor's end: with more of them the first activations come late.
constexpr int kManyAhead = 2;

// Brings attention's first keys and values into the L2 cache: a lane a sixteenth of a head's keys or values.
__device__ __forceinline__ void prefetch_keys(const ManyKeys& k, int lane) {
#pragma unroll 1
  for (int item = blockIdx.x; item < k.sequences * k.heads; item += gridDim.x) {
    const int sequence = item / k.heads, head = item % k.heads, rows = min(k.rows, __ldg(k.context_lens + sequence) - 1);
    if (rows <= 0) continue;
    const int64_t page = static_cast<int64_t>(__ldg(k.block_table + static_cast<int64_t>(sequence) * k.max_pages)) * k.heads + head;
    const uint8_t* const from = lane < 16 ? k.k_pool + page * k.k_page : k.v_pool + page * k.v_page;
    const int all = rows * (lane < 16 ? k.k_row : k.v_row) & ~15, each = (all / 16 + 15) & ~15, at = (lane & 15) * each;
    if (at < all) prefetch(from + at, min(each, all - at));
  }
}

// A warp that fetches of every item the activations, or some of the strips.
template <int NB>
struct ManyFetch {
  const ManyArgs& A;
  const Item* items;
  const uint16_t* ends;
  uint8_t *weights, *tokens;
  uint64_t *full, *empty;
  int crew, lane;  // which of the four warps that fetch; the first one the activations

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
    const int unit = 128 * it.bits, rest = it.bytes - it.units * unit, strip = lane * kManyBearers + crew - 1;
    if (strip >= tile.live) return;
    uint64_t* const bar = full + at.stage;
    const uint8_t* const from = p.data + (tile.first_strip + strip) * p.strip_bytes + it.offset;
    uint8_t* const to = weights + at.stage * kManyWeights + strip * kSlot;
    copy_once(to + begin * unit, from + begin * unit, whole ? it.bytes : (end - begin) * unit, bar);
    if (!whole && rest) copy_once(to + it.units * unit, from + it.units * unit, rest, bar);
  }
  // The activations that meet an item; says what comes for it in all.
  __device__ __forceinline__ void fetch_tokens(const ManyPart& p, const ManyTile& tile, const Item& it, int begin, int end,
                                               const ManyTurn<NB>& at) const {
    if (lane) return;
    const int unit = 128 * it.bits, all = (end - begin) * many_unit(NB);
    const auto* const x = reinterpret_cast<const uint8_t*>(A.x + static_cast<size_t>(p.perm) * A.x_perm_stride);
    const uint8_t* const from = x + static_cast<size_t>(it.block) * (32 * 2 * NB * 8) + begin * many_unit(NB);
    uint64_t* const bar = full + at.stage;
    barrier_expect(bar, tile.live * (it.bytes - (it.units - (end - begin)) * unit) + all);
    const int first = min(all, (many_ring(NB) - at.slot) * many_unit(NB));
    bulk_copy(tokens + at.slot * many_unit(NB), from, first, bar);
    if (first < all) bulk_copy(tokens, from + first, all - first, bar);
  }

  __device__ __forceinline__ void run() const {
    const int ahead = crew ? kManyAhead : 0;  // items before the predecessor's end
    int count = 0, live = 0, used = 0;        // items seen; items and units in the ring
    uint32_t sizes = 0;                       // units of the last items, four bits each
    ManyTurn<NB> back;
    const auto wait = [&] {
      pdl_wait();
      if (NB > 2 && A.squares && crew == 0) wait_for_squares();
      if (A.next_image && crew == 1 && lane == 0) prefetch(A.next_image, A.next_image_bytes);
    };
    if (crew == 0 && lane == 0) EXL2NB_CLOCK(A, 7);
    each([&](const ManyPart& p, const ManyTile& tile, const Item& it, int begin, int end, const ManyTurn<NB>& at) {
      const int units = end - begin;
      if (count++ == ahead) wait();
      while (live == many_stages(NB) || used + units > many_ring(NB)) {
        barrier_wait(empty + back.stage, back.phase);
        used -= sizes >> (4 * (live - 1)) & 15, live--;
        back.next(0);
      }
      sizes = sizes << 4 | units, used += units, live++;
      if (crew)
        fetch_weights(p, tile, it, begin, end, at);
      else
        fetch_tokens(p, tile, it, begin, end, at);
      if (crew == 0 && lane == 0 && count == 1) EXL2NB_CLOCK(A, 8);
    });
    if (count <= ahead) wait();
    if (crew == kManyBearers && A.keys.rows) prefetch_keys(A.keys, lane);
  }
};

}  // namespace exl2nb
