// What many.cuh works on, and the instructions that only it needs.
#pragma once
#include "blob.h"
#include "many.h"
#include "norm.cuh"
#include "pdl.cuh"

namespace exl2nb {

constexpr int kManyStrips = 16, kManyWarps = 8, kManyStages = 2, kManyUnits = kSlot / 256, kManySplits = 8;
constexpr int kManyThreads = kManyWarps * 32, kManyColumns = kManyStrips * kStripColumns;
constexpr int kManyWeights = kManyStrips * kSlot;  // of a stage
// Bytes of the activations of a stage for 8 * NB tokens; up to 16 tokens two CTAs share a multiprocessor.
EXL2NB_BOTH constexpr int many_tokens(int NB) { return kManyUnits * kUnitRows * NB * 8 * 2; }
constexpr int kManySums = kManyColumns + 4;  // floats of a token in the tile that a cluster adds up
static_assert(2 * 16 * kManySums * 4 <= kManyStages * (kManyWeights + many_tokens(2)) &&
                  2 * kManyTokens * kManySums * 4 <= kManyStages * (kManyWeights + many_tokens(kManyTokens / 8)),
              "two tiles replace the stages");

struct ManyPart {
  const uint8_t* data;
  int strips, first_column, outputs, perm, tiles;
  int64_t strip_bytes;
};
struct ManyArgs {
  ManyPart part[kMaxParts];
  const uint8_t* image;
  int num_parts, items, units, splits, tokens;
  const half* x;  // in groups of 8 * NB tokens
  int x_stride, x_perm_stride;
  const float* bias;
  float* out;  // [token][column], null: the residual takes the sums, or `paired`
  int64_t out_stride;
  // As in GemvArgs: what the outputs are multiplied by; the residual, then the next product's input and partial squares, two of a tile.
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
// The stages' barriers, the counts of warps that are through, the factors.
constexpr int kManyBars = kManyStages * (kManyWarps + 1) * 8, kManyFixed = kManyBars + 16 + kManyTokens * 4;
EXL2NB_BOTH inline int many_shared(const ManyArgs& a, int NB) {
  return kManyStages * (kManyWeights + many_tokens(NB)) + kManyFixed + many_image(a);
}

// many_wide.cu: whether this build and this GPU have it; the launch, of any number of tokens up to 64.
bool many_wide_ready();
const char* many_wide_launch(const ManyArgs& a, int tiles, int most_shared, void* stream, bool pdl);

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
// One more at a counter in shared memory; what this warp has read is read, and seen by who comes after.
__device__ __forceinline__ int count_up(int* counter) {
  int before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.s32 %0,[%1],1;" : "=r"(before) : "r"(shared_address(counter)) : "memory");
  return before;
}
// The readers of a stage: whoever is not the last goes on, the last waits for nobody, but what the others have read is read.
__device__ __forceinline__ void one_through(int stage) {
  if (stage) {
    asm volatile("bar.arrive 2,%0;" ::"n"(kManyThreads) : "memory");
  } else {
    asm volatile("bar.arrive 1,%0;" ::"n"(kManyThreads) : "memory");
  }
}
__device__ __forceinline__ void all_through(int stage) {
  if (stage) {
    asm volatile("bar.sync 2,%0;" ::"n"(kManyThreads) : "memory");
  } else {
    asm volatile("bar.sync 1,%0;" ::"n"(kManyThreads) : "memory");
  }
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
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
__device__ __forceinline__ int count_up(int*) { return 0; }
__device__ __forceinline__ void one_through(int) {}
__device__ __forceinline__ void all_through(int) {}
__device__ __forceinline__ void cluster_barrier() {}
__device__ __forceinline__ float4 read_peer(const float*, int) { return {}; }
#endif

// What a CTA works on: a tile of a part, and the items of its share.
struct ManyTile {
  int part, first_strip, live, first_item, end_item, second_item, count;  // second_item: the first one of part 1; count: of both parts
  __device__ __forceinline__ ManyTile(const ManyArgs& A, const uint16_t* ends, int tile, int split) {
    part = 0;
    while (part + 1 < A.num_parts && tile >= A.part[part].tiles) tile -= A.part[part++].tiles;
    first_strip = tile * kManyStrips, live = min(kManyStrips, A.part[part].strips - first_strip);
    const int warps = kWarps / A.splits;
    first_item = ends[part * kEnds + split * warps], end_item = ends[part * kEnds + (split + 1) * warps];
    second_item = A.paired ? ends[kEnds + split * warps] : 0;
    count = end_item - first_item + (A.paired ? ends[kEnds + (split + 1) * warps] - second_item : 0);
  }
  __device__ __forceinline__ bool second(int n) const { return n >= end_item - first_item; }
  __device__ __forceinline__ int item(int n) const { return second(n) ? second_item + n - (end_item - first_item) : first_item + n; }
};

}  // namespace exl2nb
