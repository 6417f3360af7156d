// Packs EXL2, GPTQ and dense tensors into strips (gpu_blob.h): one thread per (unit, lane) gathers 32 codes and places their bits.
#include "cuda/blob/blob.h"
#include "cuda/blob/dequant.cuh"
#include "format/gpu_blob.h"

namespace exl2nb {

// Inverse of dequant.cuh. bit_of: word and bit of bit t of field i at width b (i as in dequantize<b>: step i / 4, register i % 4), for the
// even row; the odd row is 16 bits higher.
struct Bit {
  int word, bit;
};
__device__ Bit bit_of(int b, int i, int t) {
  const int step = i >> 2, second = i & 1, byte = (i & 2) * 4;
  switch (b) {
    case 2:
      return {step / 2, byte + 4 * (step & 1) + 2 * second + t};
    case 3: {
      const int q = 3 * second + t;
      return step < 3 ? Bit{step, byte + q} : Bit{q / 2, byte + 6 + (q & 1)};
    }
    case 4:
      return {step, byte + 4 * second + t};
    case 5:
      if (!second) return {step, byte + t};
      return t >= 2 ? Bit{step, byte + 3 + t} : Bit{4, byte + 2 * step + t};
    case 6:
      if (!second) return {step, byte + t};
      return t >= 4 ? Bit{step, byte + 2 + t} : Bit{4 + step / 2, byte + 4 * (step & 1) + t};
    default:
      return {2 * step + second, byte + t};
  }
}
// Byte offset of word w of a lane in a unit: planes of 16, 8 and 4 bytes per lane, as load_unit reads them.
__device__ int plane(int b, int w, int lane) {
  const int full = b / 4 * 4, rest = b - full;
  if (w < full) return w / 4 * 512 + lane * 16 + w % 4 * 4;
  const int base = full / 4 * 512;
  w -= full;
  if (rest >= 2 && w < 2) return base + lane * 8 + w * 4;
  return base + (rest == 3 ? 256 : 0) + lane * 4;
}

// The b-bit code of a column at bit `shift` of row `word` of words.
__device__ uint32_t code_at(const uint32_t* words, int N, int64_t word, int column, int shift, int b) {
  const uint32_t* const at = words + word * N + column;
  return __funnelshift_r(at[0], shift + b > 32 ? at[N] : 0, shift) & ((1u << b) - 1);
}
// Gathers a lane's 32 codes of a unit and stores its words. code(row, column): row of the unit, column of the matrix.
template <class F>
__device__ void pack_unit(int b, int strip, int lane, uint8_t* unit, F code) {
  const int g = lane >> 2, t = lane & 3;
  uint32_t words[8] = {};
  for (int f = 0; f < 16; f++) {
    const int row = f / 4 * 16 + 2 * t + (f >> 1 & 1) * 8, column = strip * 16 + g + (f & 1) * 8;
    for (int odd = 0; odd < 2; odd++) {
      const uint32_t c = code(row + odd, column);
      for (int q = 0; q < b; q++) {
        const Bit to = bit_of(b, f, q);
        words[to.word] |= (c >> q & 1u) << ((to.bit + 16 * odd) % 32);
      }
    }
  }
  for (int w = 0; w < b; w++) *reinterpret_cast<uint32_t*>(unit + plane(b, w, lane)) = words[w];
}

__global__ void pack_units(PackSource s, PackTarget to) {
  const int strip = blockIdx.x, lane = threadIdx.x & 31;
  for (int u = threadIdx.x >> 5; u < to.units; u += blockDim.x >> 5) {
    const Item it = to.items[to.item_of_unit[u]];
    const int i = u - it.unit0, b = it.bits, block = it.block + 2 * i;
    const bool second = !it.lone && block + 1 < s.K / 32;
    uint8_t* const out = to.strip(strip) + it.offset;
    pack_unit(b, strip, lane, out + i * b * 128, [&](int k, int column) {
      if (column >= s.N || (k >= 32 && !second)) return 1u << (b - 1);
      const int bit = k % 32 * b;
      return code_at(s.q_weight, s.N, s.row_word[block + k / 32] + bit / 32, column, bit % 32, b);
    });
    const int column_low = strip * 16 + (lane & 7), part = lane >> 3;
    if (part > 1 || (it.one && part)) continue;
    uint32_t code = 0;
    for (int side = 0; side < 2; side++) {
      const int column = column_low + 8 * side;
      if (column >= s.N || (part && !second)) continue;
      const int64_t group = s.row_group[block + part];
      code |= (s.q_scale[group * (s.N / 8) + column / 8] >> (4 * (column % 8)) & 15u) << (4 * side);
    }
    out[it.units * b * 128 + (it.one ? i * 8 + (lane & 7) : i * 16 + (lane & 7) * 2 + part)] = static_cast<uint8_t>(code);
  }
}

struct Bf16 {
  uint16_t bits;
  __device__ explicit operator float() const { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
};

// Weights fp16, bf16 or fp32 (N, K) to fp16 units: lane's four registers of k-step s at s * 512 + lane * 16.
template <class T>
__global__ void pack_dense_units(const T* weight, int N, int K, PackTarget to) {
  const int strip = blockIdx.x, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (int u = threadIdx.x >> 5; u < to.units; u += blockDim.x >> 5)
    for (int ks = 0; ks < 4; ks++) {
      half h[8];
      for (int e = 0; e < 8; e++) {
        const int r = e >> 1, k = u * 64 + ks * 16 + 2 * t + (r >> 1) * 8 + (e & 1), n = strip * 16 + g + (r & 1) * 8;
        const float v = k < K && n < N ? static_cast<float>(weight[static_cast<int64_t>(n) * K + k]) : 0.f;
        h[e] = __float2half_rn(v);
      }
      uint8_t* out = to.strip(strip) + u * 2048 + ks * 512 + lane * 16;
      for (int e = 0; e < 8; e++) reinterpret_cast<half*>(out)[e] = h[e];
    }
}
// GPTQ.
// Zero point of a column in a group.
__device__ int zero_of(const GptqPacking& s, int group, int column) {
  return s.zeros ? s.zeros[static_cast<int64_t>(group) * s.N + column] : 1 << (s.bits - 1);
}

__device__ uint32_t gptq_code(const GptqPacking& s, int stored, int column) {
  if (column >= s.N || stored >= s.stored) return 0;
  const int row = s.perm ? s.perm[stored] : stored;
  if (row >= s.K) return static_cast<uint32_t>(zero_of(s, s.block_group[stored / 32], column));
  const int64_t bit = static_cast<int64_t>(row) * s.bits;
  return code_at(s.qweight, s.N, bit / 32, column, static_cast<int>(bit % 32), s.bits);
}

__global__ void pack_gptq_units(GptqPacking s, PackTarget target) {
  const int strip = blockIdx.x, lane = threadIdx.x & 31, b = s.bits;
  for (int u = threadIdx.x >> 5; u < target.units; u += blockDim.x >> 5) {
    const Item it = target.items[target.item_of_unit[u]];
    const int i = u - it.unit0, first = (it.block + 2 * i) * 32;
    uint8_t* const out = target.strip(strip) + it.offset;
    pack_unit(b, strip, lane, out + i * b * 128, [&](int row, int column) { return gptq_code(s, first + row, column); });
    // Scale sets: four numbers per g; lanes 0-7 write the set of the unit (or its first half), 8-15 of its second half.
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

}  // namespace exl2nb
