// How CTAs of a chain (chain.cuh) wait for one another, and warps of a CTA.
#pragma once
#include "chain_args.cuh"

namespace exl2nb {

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void crew_sync() { asm volatile("bar.sync 1,%0;" ::"n"(kCrewThreads) : "memory"); }
__device__ __forceinline__ void some_sync(int threads) { asm volatile("bar.sync 2,%0;" ::"r"(threads) : "memory"); }
__device__ __forceinline__ void meet_arrive(unsigned* c) { asm volatile("red.relaxed.gpu.global.add.u32 [%0],1;" ::"l"(c) : "memory"); }
__device__ __forceinline__ unsigned meet_now(const unsigned* c) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(c) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared_by_all(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_for_all(half* p, half v) {
  asm volatile("st.relaxed.gpu.global.u16 [%0],%1;" ::"l"(p), "h"(__half_as_ushort(v)) : "memory");
}
__device__ __forceinline__ void store_for_all(float* p, float v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(__float_as_uint(v)) : "memory");
}
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
__device__ __forceinline__ void some_sync(int) {}
__device__ __forceinline__ void meet_arrive(unsigned*) {}
__device__ __forceinline__ unsigned meet_now(const unsigned*) { return 0; }
__device__ __forceinline__ uint4 load_shared_by_all(const void*) { return make_uint4(0, 0, 0, 0); }
__device__ __forceinline__ void store_for_all(half*, half) {}
__device__ __forceinline__ void store_for_all(float*, float) {}
__device__ __forceinline__ void copy_weights(void*, const void*, uint32_t, uint64_t*, uint64_t) {}
__device__ __forceinline__ uint64_t once() { return 0; }
#endif

// Between products +0 means: not written yet. What is zero is written as -0.
__device__ __forceinline__ half written(half v) { return __half_as_ushort(v) ? v : __ushort_as_half(0x8000); }

__device__ __forceinline__ float written(float v) { return __float_as_uint(v) ? v : -0.f; }

__device__ __forceinline__ bool is_written(uint4 v) {  // eight halves
  const auto missing = [](uint32_t w) { return (w - 0x00010001u) & ~w & 0x80008000u; };
  return (missing(v.x) | missing(v.y) | missing(v.z) | missing(v.w)) == 0;
}

__device__ __forceinline__ uint4 load_written(const half* p) {
  for (;;) {
    const uint4 v = load_shared_by_all(p);
    if (is_written(v)) return v;
  }
}

__device__ __forceinline__ float load_written(const float* p) {
  for (;;) {
    const unsigned v = meet_now(reinterpret_cast<const unsigned*>(p));
    if (v) return __uint_as_float(v);
  }
}

}  // namespace exl2nb
