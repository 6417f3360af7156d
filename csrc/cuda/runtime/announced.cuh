// Data that announce themselves: +0 means "not written yet", what is zero is written as -0. Who reads looks until it is there; nothing else
// orders the two. Somebody must have put zeros there before, and again after it was read. Of four floats that are written together the
// first speaks for all.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

namespace exl2nb {

__device__ __forceinline__ unsigned load_now(const unsigned* p) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_now(const float* p) { return __uint_as_float(load_now(reinterpret_cast<const unsigned*>(p))); }
__device__ __forceinline__ uint4 load_now(const half* p) {
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

#if __CUDA_ARCH__ >= 900
// Four numbers at once, seen whole or not at all.
__device__ __forceinline__ float4 load_together(const float* p) {
  float4 v;
  asm volatile(
      "{\n.reg .b128 v;\n.reg .b64 a,b;\nld.relaxed.gpu.global.b128 v,[%4];\nmov.b128 {a,b},v;\nmov.b64 {%0,%1},a;\nmov.b64 "
      "{%2,%3},b;\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "l"(p)
      : "memory");
  return v;
}
__device__ __forceinline__ void store_for_all(float* p, float4 v) {
  asm volatile(
      "{\n.reg .b128 v;\n.reg .b64 a,b;\nmov.b64 a,{%1,%2};\nmov.b64 b,{%3,%4};\nmov.b128 v,{a,b};\nst.relaxed.gpu.global.b128 "
      "[%0],v;\n}" ::"l"(p),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}
#else
__device__ __forceinline__ float4 load_together(const float*) { return {}; }
__device__ __forceinline__ void store_for_all(float*, float4) {}
#endif

__device__ __forceinline__ half announced(half v) { return __half_as_ushort(v) ? v : __ushort_as_half(0x8000); }
__device__ __forceinline__ float announced(float v) { return __float_as_uint(v) ? v : -0.f; }

__device__ __forceinline__ bool is_there(float v) { return __float_as_uint(v) != 0; }
__device__ __forceinline__ bool is_there(float4 v) { return __float_as_uint(v.x); }  // written together
__device__ __forceinline__ bool is_there(uint4 v) {                                  // eight halves
  const auto missing = [](uint32_t w) { return (w - 0x00010001u) & ~w & 0x80008000u; };
  return (missing(v.x) | missing(v.y) | missing(v.z) | missing(v.w)) == 0;
}

template <class T>
__device__ __forceinline__ auto await(const T* p) {
  for (;;)
    if (const auto v = load_now(p); is_there(v)) return v;
}

}  // namespace exl2nb
