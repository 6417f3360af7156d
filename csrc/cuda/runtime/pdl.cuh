// The few instructions that differ between architectures: dependent launch, barriers of bulk copies, asynchronous copies; and warp sums.
#pragma once
#include "cuda/runtime/types.h"

#ifdef __CUDACC__
namespace exl2nb {

// (a & b) | c.
__device__ __forceinline__ uint32_t lop_and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
template <int BYTES>
__device__ __forceinline__ void load_bytes(const uint8_t* p, uint32_t* v) {
  if constexpr (BYTES == 16) {
    const uint4 u = *reinterpret_cast<const uint4*>(p);
    v[0] = u.x, v[1] = u.y, v[2] = u.z, v[3] = u.w;
  } else if constexpr (BYTES == 8) {
    const uint2 u = *reinterpret_cast<const uint2*>(p);
    v[0] = u.x, v[1] = u.y;
  } else if constexpr (BYTES == 4) {
    v[0] = *reinterpret_cast<const uint32_t*>(p);
  } else if constexpr (BYTES == 2) {
    v[0] = *reinterpret_cast<const uint16_t*>(p);
  } else {
    v[0] = *p;
  }
}

// Programmatic dependent launch: let the next kernel start; wait until the previous one is complete and its writes are visible.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Arrivals by which a warp arrives at a barrier. One lane's, behind __syncwarp, orders what all lanes did; compute-sanitizer's racecheck
// follows only lanes that arrive themselves (benchmarks/cuda/racecheck_patterns.cu), so `make sanitize` builds with that, where a missing
// __syncwarp would not be noticed.
#ifdef EXL2NB_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barrier_init(uint64_t* b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(shared_address(b)), "r"(n));
}
__device__ __forceinline__ void barrier_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void warp_arrive(uint64_t* b, int lane) {
  if (kWarpArrivals > 1 || lane == 0) barrier_arrive(b);
}
__device__ __forceinline__ void barrier_wait(uint64_t* b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes), "r"(shared_address(b))
               : "memory");
}
// With an L2 cache policy.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* b, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  return policy;
}
#else
__device__ __forceinline__ void barrier_init(uint64_t*, int) {}
__device__ __forceinline__ void barrier_fence() {}
__device__ __forceinline__ void barrier_expect(uint64_t*, uint32_t) {}
__device__ __forceinline__ void barrier_arrive(uint64_t*) {}
__device__ __forceinline__ void warp_arrive(uint64_t*, int) {}
__device__ __forceinline__ void barrier_wait(uint64_t*, uint32_t) {}
__device__ __forceinline__ void bulk_copy(void*, const void*, uint32_t, uint64_t*) {}
#endif

// Brings the line of an address near: what no kernel writes need not wait for the predecessor.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// The same for what every layer reads: it stays in the L2 cache while weights pass through.
__device__ __forceinline__ void keep_line(const void* p) {
#if __CUDA_ARCH__ >= 800
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(p));
#endif
}

// Into the L1 cache, too.
__device__ __forceinline__ void prefetch_word(const void* p) {
  [[maybe_unused]] uint32_t none;
  asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(none) : "l"(p));
}

// 16 bytes from global to shared memory; ASYNC: in the background, until async_wait.
template <bool ASYNC>
__device__ __forceinline__ void copy16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (ASYNC) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address(to)), "l"(from) : "memory");
    return;
  }
#endif
  *static_cast<uint4*>(to) = __ldg(static_cast<const uint4*>(from));
}
// The first `bytes` of 16 and zeros.
__device__ __forceinline__ void copy16_part(void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
#else
  uint16_t x[8];
  for (int i = 0; i < 8; i++) x[i] = 2 * i < bytes ? static_cast<const uint16_t*>(from)[i] : uint16_t(0);
  for (int i = 0; i < 8; i++) static_cast<uint16_t*>(to)[i] = x[i];
#endif
}
__device__ __forceinline__ void async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N>
__device__ __forceinline__ void async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

template <class T>
__device__ __forceinline__ T warp_sum(T v) {  // the same in every lane, in a fixed order
#pragma unroll
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}
// The sum over a CTA of so many threads, the same in every thread, in a fixed order.
template <int THREADS>
__device__ __forceinline__ float cta_sum(float v) {
  __shared__ float partial[THREADS / 32];
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  float all = 0.f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) all += partial[i];
  return all;
}
// Sum of the lanes up to this one.
template <class T>
__device__ __forceinline__ T warp_prefix_sum(T v) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, v, d);
    if ((threadIdx.x & 31) >= d) v += other;
  }
  return v;
}

// index as in ops.reference.ACTIVATIONS: silu, gelu, gelu_tanh
__device__ __forceinline__ float activation(float v, int kind) {
  if (kind == 0) return __fdividef(v, 1.f + __expf(-v));
  if (kind == 1) return 0.5f * v * (1.f + erff(v * 0.70710678118f));
  const float u = 0.7978845608f * (v + 0.044715f * v * v * v);
  return 0.5f * v * (1.f + tanhf(u));
}

}  // namespace exl2nb
#endif  // __CUDACC__
