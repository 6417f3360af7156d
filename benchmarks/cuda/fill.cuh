// Numbers for benchmarks, made on the GPU: the same ones for the same seed.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

__global__ void fill(uint32_t* p, size_t n, uint32_t seed, uint32_t mask) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull, z = (z ^ z >> 27) * 0x94D049BB133111EBull, z ^= z >> 31;
    p[i] = uint32_t(z) & mask;
  }
}
__global__ void fill_half(half* p, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint32_t z = uint32_t(i) * 2654435761u + seed * 40503u;
    z ^= z >> 15, z *= 0x2c1b3c6du, z ^= z >> 12, z *= 0x297a2d39u, z ^= z >> 15;
    p[i] = __float2half((float(z & 0xffff) / 32768.f - 1.f));
  }
}
__global__ void fill_float(float* p, size_t n, float v) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    p[i] = v + float(i % 7) * 0.01f;
}
