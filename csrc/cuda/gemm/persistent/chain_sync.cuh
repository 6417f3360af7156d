// How CTAs of a chain (chain.cuh) wait for one another, and warps of a CTA.
#pragma once
#include "cuda/gemm/persistent/chain_args.cuh"
#include "cuda/runtime/announced.cuh"

namespace exl2nb {

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void crew_sync() { asm volatile("bar.sync 1,%0;" ::"n"(kCrewThreads) : "memory"); }
__device__ __forceinline__ void meet_arrive(unsigned* c) { asm volatile("red.relaxed.gpu.global.add.u32 [%0],1;" ::"l"(c) : "memory"); }
__device__ __forceinline__ void copy_weights(void* to, const void* from, uint32_t bytes, uint64_t* b, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ uint64_t once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  return policy;
}
#else
__device__ __forceinline__ void crew_sync() {}
__device__ __forceinline__ void meet_arrive(unsigned*) {}
__device__ __forceinline__ void copy_weights(void*, const void*, uint32_t, uint64_t*, uint64_t) {}
__device__ __forceinline__ uint64_t once() { return 0; }
#endif

}  // namespace exl2nb
