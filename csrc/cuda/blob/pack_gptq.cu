// GPTQ matrices to the layout of blob.h, on the GPU: one thread per (unit, lane) gathers its 32 codes, wherever their rows lie.
#include <cuda_fp16.h>

#include "cuda/blob/blob.h"
#include "cuda/blob/place.cuh"
#include "cuda/runtime/launch.h"

namespace exl2nb {
namespace {

// Zero point of a column in a group.
__device__ int zero_of(const GptqPacking& s, int group, int column) {
  return s.zeros ? s.zeros[static_cast<int64_t>(group) * s.N + column] : 1 << (s.bits - 1);
}

__device__ uint32_t code_of(const GptqPacking& s, int stored, int column) {
  if (column >= s.N || stored >= s.stored) return 0;
  const int row = s.perm ? s.perm[stored] : stored;
  if (row >= s.K) return static_cast<uint32_t>(zero_of(s, s.block_group[stored / 32], column));
  const int64_t bit = static_cast<int64_t>(row) * s.bits;
  const int shift = static_cast<int>(bit % 32);
  const int64_t at = bit / 32 * s.N + column;
  const uint32_t low = s.qweight[at], high = shift + s.bits > 32 ? s.qweight[at + s.N] : 0;
  return __funnelshift_r(low, high, shift) & ((1u << s.bits) - 1);
}

__global__ void pack_gptq_units(GptqPacking s, const Item* items, uint8_t* strips, int64_t strip_bytes) {
  const int strip = blockIdx.x, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, b = s.bits;
  for (int u = threadIdx.x >> 5; u < s.units; u += blockDim.x >> 5) {
    const Item it = items[s.item_of_unit[u]];
    const int i = u - it.unit0, first = (it.block + 2 * i) * 32;
    uint32_t words[8] = {};
    for (int f = 0; f < 16; f++) {
      const int row = first + f / 4 * 16 + 2 * t + (f >> 1 & 1) * 8, column = strip * 16 + g + (f & 1) * 8;
      for (int half_word = 0; half_word < 2; half_word++) {
        const uint32_t code = code_of(s, row + half_word, column);
        for (int q = 0; q < b; q++) {
          const Bit to = bit_of(b, f, q);
          words[to.word] |= (code >> q & 1u) << ((to.bit + 16 * half_word) % 32);
        }
      }
    }
    uint8_t* out = strips + strip * strip_bytes + it.offset;
    for (int w = 0; w < b; w++) *reinterpret_cast<uint32_t*>(out + i * b * 128 + plane(b, w, lane)) = words[w];
    // Scale sets: four numbers for each g; lanes 0 to 7 write the first (or only) set of a unit, 8 to 15 that of its second 32 rows.
    const int side = lane >> 3;
    if (side > 1 || (it.one && (side || i % it.scales))) continue;
    const int block = it.block + 2 * i + side, set = it.one ? i / it.scales : 2 * i + side;
    auto* to = reinterpret_cast<half*>(out + it.units * b * 128 + set * kGptqSet + (lane & 7) * 8);
    for (int high = 0; high < 2; high++) {
      const int column = strip * 16 + (lane & 7) + 8 * high;
      const bool there = column < s.N && block * 32 < s.stored;
      const int group = there ? s.block_group[block] : 0;
      to[high] = there ? static_cast<const half*>(s.scales)[static_cast<int64_t>(group) * s.N + column] : __float2half_rn(0.f);
      to[2 + high] = there ? __int2half_rn(zero_of(s, group, column)) : __float2half_rn(0.f);
    }
  }
}

}  // namespace

const char* pack_gptq_launch(const GptqPacking& s, const void* items, int strips, void* data, int64_t strip_bytes, void* stream) {
  pack_gptq_units<<<strips, 256, 0, static_cast<cudaStream_t>(stream)>>>(s, static_cast<const Item*>(items), static_cast<uint8_t*>(data),
                                                                         strip_bytes);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace exl2nb
