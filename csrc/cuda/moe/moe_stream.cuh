// One token's row times several matrices at once: what both kernels of the experts do (moe_up.cuh, moe_down.cuh).
//
// A segment is one matrix (or part of one), of which the CTA has some strips of 16 columns. Its warps split the items of every segment, a
// range of each, and stream them strip by strip through rings in shared memory whose slots are as large as the largest item there is, so
// that small experts fill as much of the way to memory as large ones. SUMMED: the segments' results times their weights are added up, in
// their order; otherwise each has its own.
#pragma once
#include "cuda/gemm/skinny/gemv.cuh"
#include "cuda/moe/moe_choice.cuh"

namespace exl2nb {

struct alignas(16) Segment {
  const uint8_t* data;  // of the CTA's first strip
  const Item* items;
  const half2* steps;
  const half* x;
  int hop;  // bytes from one strip of the CTA to its next
  float weight;
};

// How a CTA's ring is laid out: `stages` slots of `slot` bytes for each warp.
struct RingShape {
  int slot, stages;
  EXL2NB_BOTH int bytes() const { return kWarps * stages * slot; }
};

struct Stream {
  const Segment* segments;
  const ushort2* ranges;  // [segment][warp]: items
  uint8_t* ring;
  uint64_t* bars;  // [warp][stage]
  RingShape shape;
  int count, strips;  // segments; of each
};

// A warp's ring being filled, strip by strip, in each segment by segment.
template <int PATH>
struct Fetcher {
  const Stream& s;
  const int warp, lane;
  int left, segment = -1, item = 0, end = 0, slot = 0, strip = 0;
  const uint8_t* data = nullptr;

  // known: what there is to fetch; otherwise `next` is called when it is.
  __device__ __forceinline__ Fetcher(const Stream& stream, int w, int l, bool known) : s(stream), warp(w), lane(l), left(stream.strips) {
    if (known) next();
  }
  // The next segment of which this warp has something.
  __device__ __forceinline__ void next() {
#pragma unroll 1
    for (int tries = 0; left > 0; tries++) {
      if (++segment == s.count) {
        segment = 0, strip++, left--;
        if (tries > s.count) left = 0;
        if (left == 0) return;
      }
      const ushort2 r = s.ranges[segment * kWarps + warp];
      if (r.x == r.y) continue;
      item = r.x, end = r.y;
      data = s.segments[segment].data + static_cast<size_t>(strip) * s.segments[segment].hop;
      return;
    }
  }
  __device__ __forceinline__ void operator()() {
    if (left > 0) {
      const Item it = s.segments[segment].items[item];
      uint8_t* const to = s.ring + (warp * s.shape.stages + slot) * s.shape.slot;
      if constexpr (PATH == kBulk) {
        uint64_t* const bar = s.bars + warp * s.shape.stages + slot;
        barrier_expect(bar, it.bytes);
        bulk_copy(to, data + it.offset, it.bytes, bar);
      } else {
        for (int b = lane * 16; b < it.bytes; b += 512) copy16<PATH == kAsync>(to + b, data + it.offset + b);
      }
      slot = slot + 1 == s.shape.stages ? 0 : slot + 1;
      if (++item == end) next();
    }
    if constexpr (PATH == kAsync) async_commit();
  }
  __device__ __forceinline__ void fill() {
    if (PATH == kBulk && lane != 0) return;
    for (int i = 0; i < s.shape.stages; i++) (*this)();
  }
};

// All strips, `flush` at a time. sums: twice [flush][segment, or 1 where SUMMED][warp][16]. done(sums, first strip, strips): called by all
// threads when the sums of some strips stand there.
template <int PATH, bool STAGED, bool SUMMED, class Done>
__device__ __forceinline__ void run_stream(const Stream& s, Fetcher<PATH>& fetch, float* sums, int flush, int warp, int lane, Done done) {
  const int g = lane >> 2, t = lane & 3, outs = SUMMED ? 1 : s.count, size = flush * outs * kWarps * 16;
  const bool live = g == 0;
  int slot = 0, first = 0, last = s.count;
  uint32_t phase = 0;
  if constexpr (SUMMED) {
    const auto none = [&](int i) { return s.ranges[i * kWarps + warp].x == s.ranges[i * kWarps + warp].y; };
    while (first < last && none(first)) first++;
    while (last > first && none(last - 1)) last--;
  }
  float* to = sums;
  int before = 0;
#pragma unroll 1
  for (int strip = 0; strip < s.strips; strip++) {
    float y[4] = {0, 0, 0, 0};
    float* const p = to + (strip - before) * outs * kWarps * 16 + warp * 16;
#pragma unroll 1
    for (int i = first; i < last; i++) {
      const Segment& m = s.segments[i];
      const int end = s.ranges[i * kWarps + warp].y;
      const half* const x = m.x + t * 8;
      float part[4] = {0, 0, 0, 0};
#pragma unroll 1
      for (int n = s.ranges[i * kWarps + warp].x; n < end; n++) {
        const ItemWords it(m.items[n]);
        const int at = warp * s.shape.stages + slot;
        if constexpr (PATH == kBulk) barrier_wait(s.bars + at, phase);
        if constexpr (PATH == kAsync) async_wait<stages_of(PATH) - 1>();
        if constexpr (PATH != kBulk) __syncwarp();
        compute_item<PATH, STAGED>(it, s.ring + at * s.shape.slot, m.steps + it.unit0(), x + it.block() * 32, live, lane, part);
        __syncwarp();
        if (PATH != kBulk || lane == 0) fetch();
        if (++slot == s.shape.stages) slot = 0, phase ^= 1;
      }
      if constexpr (SUMMED) {
        const float weight = m.weight;
#pragma unroll
        for (int j = 0; j < 4; j++) y[j] = fmaf(weight, part[j], y[j]);
      } else if (t == 0) {
        p[i * kWarps * 16 + g] = part[0], p[i * kWarps * 16 + g + 8] = part[2];
      }
    }
    if constexpr (SUMMED)
      if (t == 0) p[g] = y[0], p[g + 8] = y[2];
    if (strip + 1 - before < flush && strip + 1 < s.strips) continue;
    __syncthreads();
    done(to, before, strip + 1 - before);
    before = strip + 1;
    to = to == sums ? sums + size : sums;
  }
}

// Sum of a column over the warps, in their order.
__device__ __forceinline__ float over_warps(const float* sums) {
  float v = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) v += sums[w * 16];
  return v;
}

// What arrives in shared memory before the ring is filled, under one barrier whose phases follow one another. Begin with the number of
// bytes, then copy, then wait; all threads call.
template <int PATH>
struct Arrivals {
  uint64_t* bar;
  uint32_t phase = 0;

  __device__ __forceinline__ void begin(int bytes) {
    if (PATH == kBulk && threadIdx.x == 0) barrier_expect(bar, bytes);
  }
  // A multiple of 16 bytes.
  __device__ __forceinline__ void copy(void* to, const void* from, int bytes) {
    if constexpr (PATH == kBulk) {
      if (threadIdx.x == 0) bulk_copy(to, from, bytes, bar);
    } else {
      for (int i = threadIdx.x; i < bytes / 16; i += kThreads) static_cast<uint4*>(to)[i] = __ldcg(static_cast<const uint4*>(from) + i);
    }
  }
  __device__ __forceinline__ void wait() {
    if constexpr (PATH == kBulk) {
      barrier_wait(bar, phase);
      phase ^= 1;
    } else {
      __syncthreads();
    }
  }
};

// All barriers of a CTA; a __syncthreads follows.
template <int PATH>
__device__ __forceinline__ void init_barriers(uint64_t* bars, int count) {
  if constexpr (PATH == kBulk) {
    if (const int i = threadIdx.x; i < count) {
      barrier_init(bars + i, 1);
      barrier_fence();
    }
  }
}

}  // namespace exl2nb
