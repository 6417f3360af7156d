// Names that arguments of kernels are written with, for host code too, which no CUDA compiler sees: there vectors and halves are plain
// structures of the same layout, and execution spaces mean nothing.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#else
#define __host__
#define __device__
#define __forceinline__ inline

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};
using half = __half;
using half2 = __half2;
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct ushort2 {
  uint16_t x, y;
};
#endif
