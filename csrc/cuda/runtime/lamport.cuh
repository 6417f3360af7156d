// Lamport flags: data that carry their own flag. +0 = not written yet; a true zero is stored as -0. The reader polls the data; no fence
// and no counter orders anything. The buffer must hold zeros before the write and again after the read. Of four floats stored at once, the
// first carries the flag. Source: the one-shot all-reduce of TensorRT-LLM.
#pragma once
#include "cuda/runtime/types.h"

#ifdef __CUDACC__
namespace exl2nb {

__device__ __forceinline__ unsigned ld_relaxed(const unsigned* p) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ unsigned long long ld_relaxed(const unsigned long long* p) {
  unsigned long long v;
  asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float ld_relaxed(const float* p) { return __uint_as_float(ld_relaxed(reinterpret_cast<const unsigned*>(p))); }
__device__ __forceinline__ uint4 ld_relaxed(const half* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_relaxed(half* p, half v) {
  asm volatile("st.relaxed.gpu.global.u16 [%0],%1;" ::"l"(p), "h"(__half_as_ushort(v)) : "memory");
}
__device__ __forceinline__ void st_relaxed(float* p, float v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(__float_as_uint(v)) : "memory");
}

#if __CUDA_ARCH__ >= 900
// 16 bytes in one access: a reader sees all four floats or none.
__device__ __forceinline__ float4 ld_relaxed4(const float* p) {
  float4 v;
  asm volatile(
      "{\n.reg .b128 v;\n.reg .b64 a,b;\nld.relaxed.gpu.global.b128 v,[%4];\nmov.b128 {a,b},v;\nmov.b64 {%0,%1},a;\nmov.b64 "
      "{%2,%3},b;\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "l"(p)
      : "memory");
  return v;
}
__device__ __forceinline__ void st_relaxed(float* p, float4 v) {
  asm volatile(
      "{\n.reg .b128 v;\n.reg .b64 a,b;\nmov.b64 a,{%1,%2};\nmov.b64 b,{%3,%4};\nmov.b128 v,{a,b};\nst.relaxed.gpu.global.b128 "
      "[%0],v;\n}" ::"l"(p),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}
#else
__device__ __forceinline__ float4 ld_relaxed4(const float*) { return {}; }
__device__ __forceinline__ void st_relaxed(float*, float4) {}
#endif

// What is stored for v: never +0.
__device__ __forceinline__ half lamport_value(half v) { return __half_as_ushort(v) ? v : __ushort_as_half(0x8000); }
__device__ __forceinline__ float lamport_value(float v) { return __float_as_uint(v) ? v : -0.f; }

__device__ __forceinline__ bool is_written(float v) { return __float_as_uint(v) != 0; }
__device__ __forceinline__ bool is_written(float4 v) { return __float_as_uint(v.x); }
__device__ __forceinline__ bool is_written(uint4 v) {  // eight halves, each with its own flag
  const auto missing = [](uint32_t w) { return (w - 0x00010001u) & ~w & 0x80008000u; };
  return (missing(v.x) | missing(v.y) | missing(v.z) | missing(v.w)) == 0;
}

template <class T>
__device__ __forceinline__ auto poll(const T* p) {
  for (;;)
    if (const auto v = ld_relaxed(p); is_written(v)) return v;
}

}  // namespace exl2nb
#endif  // __CUDACC__
