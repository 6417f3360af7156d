// How the work of many.cuh is shared out: the units of all tiles form a line, of which every CTA has a piece that takes as long as the
// others (many_cost.h), so a tile may belong to several CTAs and a CTA to several tiles.
#pragma once
#include "cuda/gemm/stream_k/many_args.cuh"

namespace exl2nb {

// n / d for 0 <= n < 2^20 and 0 < d: short, for code that runs once.
__device__ __forceinline__ int many_divide(int n, int d) {
  return __float2int_rz(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(d)));
}
// A CTA's piece of the line: units many_begin() .. many_begin(the next one) - 1.
__device__ __forceinline__ int many_begin(const ManyArgs& A, int cta) { return A.begin[cta]; }
__device__ __forceinline__ int many_owner(const ManyArgs& A, int unit) {
  int cta = __float2int_rz(static_cast<float>(unit) * A.density);  // near it
  while (A.begin[cta] > unit) cta--;
  while (A.begin[cta + 1] <= unit) cta++;
  return cta;
}

// The tile of a part (of both, where paired) that has unit `at` of the line.
struct ManyTile {
  int part, first_strip, live, begin, units;  // begin: in the line
  __device__ __forceinline__ ManyTile(const ManyArgs& A, int at) {
    part = 0, begin = 0, units = A.part[0].units + (A.paired ? A.part[1].units : 0);
    while (!A.paired && part + 1 < A.num_parts && at - begin >= A.part[part].tiles * units)
      begin += A.part[part].tiles * units, units = A.part[++part].units;
    const int tile = many_divide(at - begin, units);
    begin += tile * units, first_strip = tile * kManyStrips, live = min(kManyStrips, A.part[part].strips - first_strip);
  }
  __device__ __forceinline__ int end() const { return begin + units; }
  // Where the p-th part's units begin and end in the line, p = 0 or, where paired, 1.
  __device__ __forceinline__ int part_begin(const ManyArgs& A, int p) const { return begin + (p ? A.part[0].units : 0); }
  __device__ __forceinline__ int part_end(const ManyArgs& A, int p) const { return A.paired && !p ? begin + A.part[0].units : end(); }
};
// Calls f(tile, from, to) for every tile of this CTA's piece, [from, to) what it has of it.
template <class F>
__device__ __forceinline__ void each_tile(const ManyArgs& A, F f) {
  const int end = many_begin(A, blockIdx.x + 1);
#pragma unroll 1
  for (int at = many_begin(A, blockIdx.x); at < end;) {
    const ManyTile tile(A, at);
    const int stop = min(end, tile.end());
    f(tile, at, stop);
    at = stop;
  }
}

// The items of units [from, to) of the line, of one part of a tile.
struct ManyShare {
  int item, from, to;  // units from .. to - 1, as unit0 counts
  // By whole warps.
  __device__ __forceinline__ ManyShare(const ManyArgs& A, const Item* items, const uint16_t* ends, const ManyTile& tile, int p, int begin,
                                       int stop) {
    const uint16_t* const own = ends + (tile.part + p) * kEnds;
    const int end = own[kWarps];
    item = own[0];
    const int first = items[item].unit0 - tile.part_begin(A, p);
    from = first + max(begin, tile.part_begin(A, p)), to = first + min(stop, tile.part_end(A, p));
    int before = -1;  // items that begin at `from` or earlier, but for the last of them
    for (int i = item + (threadIdx.x & 31); __any_sync(~0u, i < end); i += 32)
      before += __popc(__ballot_sync(~0u, i < end && items[i].unit0 <= from));
    item += before;
  }
  __device__ __forceinline__ bool more() const { return from < to; }
  // The next item's units [begin, end).
  __device__ __forceinline__ Item take(const Item* items, int& begin, int& end) {
    const Item it = items[item++];
    begin = from - it.unit0, end = min(static_cast<int>(it.units), to - it.unit0);
    from = it.unit0 + end;
    return it;
  }
};

}  // namespace exl2nb
