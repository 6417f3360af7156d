// What many.cuh works on, and the instructions that only it needs.
#pragma once
#include <algorithm>

#include "blob.h"
#include "device.cuh"
#include "many.h"
#include "norm.cuh"
#include "pdl.cuh"

namespace exl2nb {

constexpr int kManyStrips = 16, kManyWarps = kManyStrips, kManySplits = 8;
constexpr int kManyWorkers = kManyWarps * 32, kManyThreads = kManyWorkers + 128, kManyColumns = kManyStrips * kStripColumns;
constexpr int kManyWeights = kManyStrips * kSlot;  // of a stage
constexpr int kManyEach = kManyStrips / 4;         // strips of a warp that fetches
constexpr int kManyBars = 8;                       // at least as many as there are stages
EXL2NB_BOTH constexpr int many_stages(int NB) { return NB == 2 ? 4 : 3; }
EXL2NB_BOTH constexpr int many_unit(int NB) { return kUnitRows * NB * 8 * 2; }  // bytes of a unit's activations, for 8 * NB tokens
EXL2NB_BOTH constexpr int many_ring(int NB) { return NB == 8 ? 12 : 24; }       // units of activations
EXL2NB_BOTH constexpr int many_sums(int NB) { return kManyColumns * NB * 8; }   // floats of a tile that a cluster adds up

struct ManyPart {
  const uint8_t* data;
  int strips, first_column, outputs, perm, tiles;
  int64_t strip_bytes;
};
struct ManyArgs {
  ManyPart part[kMaxParts];
  const uint8_t* image;
  int num_parts, items, units, splits, tiles, tokens;  // tiles: of the whole product; splits: CTAs that share one, a cluster
  const half* x;                                       // in groups of 8 * NB tokens
  int x_stride, x_perm_stride;
  const float* bias;
  float* out;  // [token][column], null: the residual takes the sums, or `paired`
  int64_t out_stride;
  // As in GemvArgs: what the outputs are multiplied by; the residual, then the next product's input and partial squares, one of 32 columns.
  const float* squares;
  int squares_count;
  float inverse_width, eps;
  float* residual;
  int residual_stride;
  float scale;
  MatrixInput next;
  const float* next_norm;
  float* next_squares;
  // Gate and up in one: the second part's outputs times the activation of the first's, alike in number, into the next product's input.
  bool paired;
  int activation;
  const uint8_t* next_image;  // of the next product, null: unknown
  int next_image_bytes;
};
EXL2NB_BOTH inline int many_image(const ManyArgs& a) { return (image_bytes(a.items, a.units, a.num_parts) + 15) / 16 * 16; }
// Bytes of the stages and the ring, or of the tiles that a cluster adds up.
EXL2NB_BOTH constexpr int many_pool(bool paired, int NB) {
  const int ring = many_stages(NB) * kManyWeights + many_ring(NB) * many_unit(NB), sums = (paired ? 2 : 1) * many_sums(NB) * 4;
  return ring > sums ? ring : sums;
}
EXL2NB_BOTH inline int many_shared(const ManyArgs& a, int NB) {
  return many_pool(a.paired, NB) + 2 * kManyBars * 8 + kManyTokens * 4 + many_image(a);
}

// A tile that its CTAs do not share is followed by another one.
inline dim3 many_grid(const ManyArgs& a) {
  const int across = a.splits == 1 && a.out ? std::min(a.tiles, multiprocessors()) : a.tiles;
  return dim3(static_cast<unsigned>(a.splits), static_cast<unsigned>(across));
}
// many_wide.cu: whether this build and this GPU have it; the launch of a group of tokens.
bool many_wide_ready();
const char* many_wide_launch(const ManyArgs& a, int group, int most_shared, void* stream, bool pdl);

#if __CUDA_ARCH__ >= 900
// Weights pass through the L2 cache once; what every CTA reads first, of this product and the next one, ought to stay there.
__device__ __forceinline__ void copy_once(void* to, const void* from, uint32_t bytes, uint64_t* b) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ uint4 load_kept(const void* from) {
  uint64_t policy;
  uint4 v;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0,1.0;" : "=l"(policy));
  asm volatile("ld.global.nc.L2::cache_hint.v4.u32 {%0,%1,%2,%3},[%4],%5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
}
__device__ __forceinline__ void prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(shared_address(b)) : "memory");
}
// The warps that multiply wait for one another.
__device__ __forceinline__ void workers_sync() { asm volatile("bar.sync 1,%0;" ::"n"(kManyWorkers) : "memory"); }
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Nothing is handed over, but nobody goes on before all have come.
__device__ __forceinline__ void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ float4 read_peer(const float* mine, int rank) {
  uint32_t there;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there) : "memory");
  return v;
}
#else
__device__ __forceinline__ void copy_once(void*, const void*, uint32_t, uint64_t*) {}
__device__ __forceinline__ uint4 load_kept(const void*) { return {}; }
__device__ __forceinline__ void prefetch(const void*, uint32_t) {}
__device__ __forceinline__ void barrier_arrive(uint64_t*) {}
__device__ __forceinline__ void workers_sync() {}
__device__ __forceinline__ void cluster_barrier() {}
__device__ __forceinline__ void cluster_leave() {}
__device__ __forceinline__ float4 read_peer(const float*, int) { return {}; }
#endif

// Registers go from the warps that fetch to those that multiply: of kManyThreads times 96, where the GPU can do that. MOST: with as many
// sums as there are.
template <bool MOST>
__device__ __forceinline__ void fewer_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MOST ? 32 : 64));
#endif
}
template <bool MOST>
__device__ __forceinline__ void more_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOST ? 112 : 104));
#endif
}

// What a CTA works on: a tile of a part (of both, where paired), and the units of its share.
struct ManyTile {
  int part, first_strip, live;
  __device__ __forceinline__ ManyTile(const ManyArgs& A, int tile) {
    part = 0;
    while (part + 1 < A.num_parts && tile >= A.part[part].tiles) tile -= A.part[part++].tiles;
    first_strip = tile * kManyStrips, live = min(kManyStrips, A.part[part].strips - first_strip);
  }
};
// The items of a CTA's share of a part.
struct ManyShare {
  int item, from, to;  // units from .. to - 1, as unit0 counts
  // By whole warps.
  __device__ __forceinline__ ManyShare(const ManyArgs& A, const Item* items, const uint16_t* ends, int part, int split) {
    item = ends[part * kEnds];
    const int end = ends[part * kEnds + kWarps];
    from = to = 0;
    if (item == end) return;
    const int first = items[item].unit0, count = items[end - 1].unit0 + items[end - 1].units - first;
    from = first + count * split / A.splits, to = first + count * (split + 1) / A.splits;
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
