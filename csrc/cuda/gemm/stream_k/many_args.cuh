// What many.cuh works on, and the instructions that only it needs.
#pragma once
#include <algorithm>

#include "cuda/blob/blob.h"
#include "cuda/gemm/norm.cuh"
#include "cuda/gemm/stream_k/many.h"
#include "cuda/runtime/announced.cuh"
#include "cuda/runtime/device.cuh"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

constexpr int kManyStrips = 16, kManyWarps = kManyStrips;
constexpr int kManyWorkers = kManyWarps * 32, kManyThreads = kManyWorkers + 128, kManyColumns = kManyStrips * kStripColumns;
constexpr int kManyWeights = kManyStrips * kSlot;  // of a stage
constexpr int kManyCrews = 4;                      // warps that fetch
constexpr int kManyBearers = kManyCrews - 1;       // of these, weights
constexpr int kManyBars = 8;                       // more than there are stages
constexpr int kManyNarrow = 16;                    // tokens for which warp groups do not pay
constexpr int kManyMeet = 40;                      // CTAs that share a tile, about, at most
constexpr int kManyMost = 192;                     // CTAs
EXL2NB_BOTH constexpr int many_stages(int NB) { return NB == 2 ? 4 : 3; }
EXL2NB_BOTH constexpr int many_unit(int NB) { return kUnitRows * NB * 8 * 2; }  // bytes of a unit's activations, for 8 * NB tokens
EXL2NB_BOTH constexpr int many_ring(int NB) { return NB == 8 ? 12 : 24; }       // units of activations
static_assert(kItemUnits < 16 && kItemUnits <= many_ring(8), "an item's units find room");
EXL2NB_BOTH constexpr int many_sums(int NB) { return kManyColumns * NB * 8; }  // floats of a tile

constexpr int kManySources = 48;  // bytes of a ManySources

struct ManyPart {
  const uint8_t* data;
  int strips, first_column, outputs, perm, tiles, units;
  int64_t strip_bytes;
};
struct ManyArgs {
  ManyPart part[kMaxParts];
  const uint8_t* image;
  int num_parts, items, units, tiles, tokens;  // tiles: of the whole product
  float density;                               // CTAs a unit of the line of all tiles' units, about
  int begin[kManyMost + 1];                    // where in the line each CTA's share begins, and where the last one's ends
  float* partial;                              // [CTA][began in its share][part]: sums of a tile that is shared, or written in order
  const half* x;                               // in groups of 8 * NB tokens
  int x_stride, x_perm_stride;
  const float* bias;
  float* out;  // [token][column], null: the residual takes the sums, or `paired`
  int64_t out_stride;
  // As in GemvArgs: what the outputs are multiplied by; the residual, then the next product's input and partial squares, one of 16 columns.
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
  ManyKeys keys;  // of attention behind this product
#ifdef EXL2NB_CLOCKS
  long long* clocks;  // 16 of every CTA
#endif
};
// Clocks of a CTA's stages, for benchmarks/cuda/many_products.cu.
#ifdef EXL2NB_CLOCKS
#define EXL2NB_CLOCK(A, i) ((A).clocks ? void((A).clocks[blockIdx.x * 16 + (i)] = clock64()) : void())
#else
#define EXL2NB_CLOCK(A, i) static_cast<void>(0)
#endif
EXL2NB_BOTH inline int many_image(const ManyArgs& a) { return (image_bytes(a.items, a.units, a.num_parts) + 15) / 16 * 16; }
// Bytes of the stages and the ring.
EXL2NB_BOTH constexpr int many_pool(int NB) { return many_stages(NB) * kManyWeights + many_ring(NB) * many_unit(NB); }
EXL2NB_BOTH inline int many_shared(const ManyArgs& a, int NB) {
  return many_pool(NB) + 2 * kManyBars * 8 + kManySources + kManyTokens * 4 + many_image(a);
}

// many_wide.cu: whether this build and this GPU have it; the launch of a group of tokens.
bool many_wide_ready();
const char* many_wide_launch(const ManyArgs& a, int grid, int group, int most_shared, void* stream, bool pdl);

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
// The warps that multiply wait for one another.
__device__ __forceinline__ void workers_sync() { asm volatile("bar.sync 1,%0;" ::"n"(kManyWorkers) : "memory"); }
// The warp that fetches activations waits until those that multiply have asked for the squares.
__device__ __forceinline__ void squares_asked() { asm volatile("bar.arrive 2,%0;" ::"n"(kManyWorkers + 32) : "memory"); }
__device__ __forceinline__ void wait_for_squares() { asm volatile("bar.sync 2,%0;" ::"n"(kManyWorkers + 32) : "memory"); }
__device__ __forceinline__ float4 load_four(const float* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
#else
__device__ __forceinline__ void copy_once(void*, const void*, uint32_t, uint64_t*) {}
__device__ __forceinline__ uint4 load_kept(const void*) { return {}; }
__device__ __forceinline__ void prefetch(const void*, uint32_t) {}
__device__ __forceinline__ void workers_sync() {}
__device__ __forceinline__ void squares_asked() {}
__device__ __forceinline__ void wait_for_squares() {}
__device__ __forceinline__ float4 load_four(const float*) { return {}; }
#endif

// Registers go from the warps that fetch to those that multiply: of kManyThreads times 96, where the GPU can do that.
__device__ __forceinline__ void fewer_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
#endif
}
__device__ __forceinline__ void more_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
#endif
}

}  // namespace exl2nb
