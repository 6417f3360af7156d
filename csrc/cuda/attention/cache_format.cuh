// How a KV cache page stores its numbers (cache/FORMAT.md), and how a lane gets them out of a tile in shared memory in the order of
// the tensor cores' A fragments.
//
// A page of one head is 256 rows of D codes, then fp16 scales (256, D / G) unless the numbers are plain. 8 and 4 bits hold Hadamard-rotated
// numbers: the dot product with q is taken in the rotated space (q is rotated once) and the output is rotated back once.
//
// The products contract over dims (K) or tokens (V), and the order of what is contracted or of a matrix's rows is free as long as the other
// side agrees. So a lane reads contiguous bytes of a row; q is gathered in that order (KeyFragment::place) and the output scattered by it.
//   K, 16 tokens = rows of A: lane (g, t), g = lane / 4, t = lane % 4, reads a quarter of each group of rows g and g + 8. Two steps of the
//      tensor cores lie within one group, so the codes go in as they are: a group's scale multiplies the sum, its zero point is where the
//      sum begins.
//   V, 16 dims = rows of A: lane (g, t) reads an eighth of the rows of tokens 2t, 2t + 1, 2t + 8, 2t + 9. Of 4 bits it is an eighth of each
//      group, as pairs of tokens from ldmatrix: then scales multiply probabilities, and the codes go in as they are, as numbers below the
//      smallest normal one (code * 2^-24, or 2^-20), their zero point in one product more.
// fp16 tiles need no order of their own: ldmatrix deals them.
#pragma once
#ifdef __CUDACC__
#include <cuda_fp8.h>
#endif

#include <type_traits>

#include "cuda/attention/attention.h"
#include "cuda/gemm/fragment.cuh"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

constexpr unsigned kAll = 0xffffffffu;  // all lanes of a warp
// Bytes of one page of one head.
__host__ __device__ constexpr int page_bytes(int format, int D) { return pool_row_bytes(format, kPage, D); }

// A tile of ROWS tokens in shared memory: rows, `kPad` apart so that the lanes that read together find different banks, then scales.
template <int FORMAT, int D, bool KEYS, int ROWS>
struct Tile {
  static constexpr int kRow = D * pool_bits(FORMAT) / 8, kPad = kRow % 16 ? 0 : KEYS && pool_bits(FORMAT) == 8 ? 32 : 16;
  static constexpr int kStride = kRow + kPad, kScaleRow = pool_is_coded(FORMAT) ? 2 * D / pool_group(D) : 0;
  static constexpr int kScalesAt = ROWS * kStride, kBytes = kScalesAt + ROWS * kScaleRow;
  static_assert(kBytes % 16 == 0, "copied 16 bytes at a time");
};

#ifdef __CUDACC__
template <int N, int I = 0, class F>
__host__ __device__ __forceinline__ void static_for(F&& f) {
  if constexpr (I < N) {
    f(std::integral_constant<int, I>{});
    static_for<N, I + 1>(f);
  }
}

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
__device__ __forceinline__ uint32_t bits_of_half2(half2 v) { return *reinterpret_cast<uint32_t*>(&v); }
__device__ __forceinline__ half2 as_half2(uint32_t v) { return *reinterpret_cast<half2*>(&v); }
// (1024 + code - 128) * scale + scale / 2: zero is between two codes. Both exact but for the last rounding.
__device__ __forceinline__ uint32_t from_q8(uint32_t v, half2 scale) {
  return bits_of_half2(__hfma2(__hsub2(as_half2(v), as_half2(0x64806480u)), scale, __hmul2(scale, as_half2(0x38003800u))));
}
// Nibbles 0 and 4, or 1 and 5, of v: 1024 + code or 64 + code, minus that and 7, times scale.
__device__ __forceinline__ uint32_t from_q4_low(uint32_t v, half2 scale) {
  return bits_of_half2(__hmul2(__hsub2(as_half2(lop_and_or(v, 0x000f000fu, 0x64006400u)), as_half2(0x64076407u)), scale));
}
__device__ __forceinline__ uint32_t from_q4_high(uint32_t v, half2 scale) {
  return bits_of_half2(__hmul2(__hsub2(as_half2(lop_and_or(v, 0x00f000f0u, 0x54005400u)), as_half2(0x54705470u)), scale));
}
// Two e4m3 bytes, each in the high byte of a half, times 2^-8: the distance of the exponents' zero points. Scaled by that and `scale`.
__device__ __forceinline__ uint32_t from_e4m3(uint32_t v) { return (v & 0x80008000u) | ((v & 0x7f007f00u) >> 1); }
__device__ __forceinline__ uint32_t from_e4m3(uint32_t v, half2 scale) {
  return bits_of_half2(__hmul2(as_half2(from_e4m3(v)), __hmul2(scale, as_half2(0x5c005c00u))));
}

// A row of D numbers dealt to LANES lanes: a lane's share is loaded in vectors of 16, 8, 4, 2 and 1 bytes, into words of 32 bits.
template <int FORMAT, int D, int LANES>
struct Lanes {
  static constexpr int kBits = pool_bits(FORMAT), kBytes = D * kBits / 8 / LANES, kGroup = pool_group(D);
  struct Vector {
    int bytes, start, word;  // its bytes; bytes and words of the lane before it
  };
  static __host__ __device__ constexpr Vector vector(int index) {
    Vector v{0, 0, 0};
    for (int left = kBytes;; index--) {
      v.bytes = left >= 16 ? 16 : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : left;
      if (index == 0) return v;
      v.start += v.bytes, v.word += (v.bytes + 3) / 4, left -= v.bytes;
    }
  }
  static __host__ __device__ constexpr int count_vectors() {
    int n = 0;
    while (vector(n).bytes > 0) n++;
    return n;
  }
  static constexpr int kVectors = count_vectors(), kWords = vector(kVectors).word, kScales = pool_is_coded(FORMAT) ? kVectors : 1;
  static __host__ __device__ constexpr int vector_of(int word) {
    int n = 0;
    while (n + 1 < kVectors && vector(n + 1).word <= word) n++;
    return n;
  }
  // First dim of a word, without the lane's share; the lane adds lane * lane_dims(word).
  static __host__ __device__ constexpr int word_dim(int w) {
    const Vector v = vector(vector_of(w));
    return v.start * LANES * 8 / kBits + (w - v.word) * 32 / kBits;
  }
  static __host__ __device__ constexpr int lane_dims(int w) { return vector(vector_of(w)).bytes * 8 / kBits; }
  static __host__ __device__ constexpr int word_dims(int w) { return lane_dims(w) < 32 / kBits ? lane_dims(w) : 32 / kBits; }
};

// One lane's share of one token's row, as stored.
template <int FORMAT, int D, int LANES>
struct Share {
  using L = Lanes<FORMAT, D, LANES>;
  uint32_t w[L::kWords];
  uint32_t s[L::kScales];  // fp16 scale of each vector, in the low half

  // row: the token's codes; scales: its D / G scales.
  __device__ __forceinline__ void load(const uint8_t* row, const uint8_t* scales, int lane) {
    static_for<L::kVectors>([&](auto i) {
      constexpr int p = decltype(i)::value, size = L::vector(p).bytes, start = L::vector(p).start * LANES;
      load_bytes<size>(row + start + lane * size, w + L::vector(p).word);
      if constexpr (pool_is_coded(FORMAT)) {
        constexpr int first = start * 8 / L::kBits, dims = size * 8 / L::kBits;
        static_assert(L::kGroup % dims == 0 && first % dims == 0, "a lane's vector has one scale");
        load_bytes<2>(scales + 2 * ((first + lane * dims) / L::kGroup), s + p);
      }
    });
  }
  template <int WORD>
  __device__ __forceinline__ half scale() const {
    constexpr int kVector = L::vector_of(WORD);
    return __ushort_as_half(static_cast<unsigned short>(s[kVector]));
  }
};

// K as A fragments: a lane's G / 4 dims of a group, in words, are G / 16 steps of the tensor cores.
template <int FORMAT, int D>
struct KeyFragment {
  static constexpr int kGroup = pool_group(D), kGroups = D / kGroup, kSteps = kGroup / 16;
  static constexpr int kGroupBytes = kGroup * pool_bits(FORMAT) / 8, kWords = kGroupBytes < 16 ? 1 : kGroupBytes / 16;

  static constexpr bool kMatrices = kGroupBytes % 16 == 0;  // else two bytes at a time

  // Place of dim d of q, so that lane t reads its 8 numbers of steps 2 p and 2 p + 1 together, at (4 p + t) * 8, in register order.
  static __host__ __device__ __forceinline__ int place(int d) {
    if constexpr (FORMAT == kCacheF16) {
      return fragment_place(d);
    } else if constexpr (FORMAT == kCacheQ4 && kGroup == 32) {
      const int j = d & 7;
      return (d & ~7) + j % 4 / 2 * 4 + j % 2 * 2 + j / 4;
    } else {
      const int step = d / 16, j = d % 4;
      return (step / 2 * 4 + d % 16 / 4) * 8 + step % 2 * 4 + (FORMAT == kCacheQ4 ? j % 2 * 2 + j / 2 : j);
    }
  }
  // Codes above 1024 or 64 (4 bits: nibbles 0 and 4, then 1 and 5, of a word), or e4m3 numbers times 2^-8. w: word t of 16 bytes of a row.
  template <int STEP>
  static __device__ __forceinline__ void get(uint32_t w, uint32_t& low, uint32_t& high) {
    if constexpr (FORMAT == kCacheQ8) {
      low = permute(w, 0x64646464u, 0x4140), high = permute(w, 0x64646464u, 0x4342);
    } else if constexpr (FORMAT == kCacheFp8) {
      low = from_e4m3(permute(w, 0, 0x1404)), high = from_e4m3(permute(w, 0, 0x3424));
    } else {
      const uint32_t v = kGroup == 16 ? permute(w, 0, 0x4140) : STEP ? w >> 8 : w;
      low = lop_and_or(v, 0x000f000fu, 0x64006400u), high = lop_and_or(v, 0x00f000f0u, 0x54005400u);
    }
  }
  // What the codes are above, negative, in halves: -1031 and -71; -1152 and 0.5, to be added one after the other.
  static constexpr uint32_t kZeroLow = FORMAT == kCacheQ4 ? 0xe407e407u : 0xe480e480u;
  static constexpr uint32_t kZeroHigh = FORMAT == kCacheQ4 ? 0xd470d470u : 0xe480e480u;
  static constexpr float kUnit = FORMAT == kCacheFp8 ? 256.f : 1.f;  // of the scales
};

// 4-bit values in groups of 32 go their own way.
__host__ __device__ constexpr bool scales_in_probs(int format, int D) { return format == kCacheQ4 && pool_group(D) == 32; }

// V as A fragments: rows are dims. From the shares of two neighbouring tokens, dims 2i and 2i + 1 of the lane.
template <int FORMAT, int D>
struct ValueFragment {
  using L = Lanes<FORMAT, D, 8>;
  using S = Share<FORMAT, D, 8>;
  struct Place {
    int word, inside;
  };
  static __host__ __device__ constexpr Place place(int i) {  // word that holds the lane's dims 2i and 2i + 1, and where in it
    int left = 2 * i, w = 0;
    while (left >= L::word_dims(w)) left -= L::word_dims(w++);
    return {w, left};
  }
  // Dim of row g + 8 * half of tile I: also of the output. What is I's is computed here: left to the optimiser, it takes ten times as long
  // to compile all of them.
  template <int I>
  static __device__ __forceinline__ int dim(int g, int half) {
    if constexpr (FORMAT == kCacheF16) {
      return I * 16 + g + half * 8;
    } else if constexpr (scales_in_probs(FORMAT, D)) {
      return I / 2 * 32 + g * 4 + I % 2 * 2 + half;
    } else {
      constexpr Place at = place(I);
      constexpr int first = L::word_dim(at.word) + at.inside, each = L::lane_dims(at.word);
      return first + g * each + half;
    }
  }

  template <int I>
  static __device__ __forceinline__ void get(const S& a, const S& b, uint32_t& first, uint32_t& second) {
    constexpr int W = place(I).word, at = place(I).inside;
    const half2 scale = __halves2half2(a.template scale<W>(), b.template scale<W>());
    uint32_t v = permute(a.w[W], b.w[W], FORMAT == kCacheQ4 ? at >= 4 ? 0x7632 : 0x5410 : at ? 0x7362 : 0x5140);
    if constexpr (FORMAT == kCacheQ8) {
      first = from_q8(permute(v, 0x64646464u, 0x4140), scale), second = from_q8(permute(v, 0x64646464u, 0x4342), scale);
    } else if constexpr (FORMAT == kCacheFp8) {
      first = from_e4m3(permute(v, 0, 0x1404), scale), second = from_e4m3(permute(v, 0, 0x3424), scale);
    } else {
      if constexpr (at % 4 == 2) v >>= 8;
      first = from_q4_low(v, scale), second = from_q4_high(v, scale);
    }
  }
};

// ---------------------------------------------------------------- encoding
// Walsh-Hadamard transform over sqrt(G) of G neighbouring lanes; its own inverse. Rounded like the format's: no fused multiply-add.
template <int G>
__device__ __forceinline__ float hadamard(float v) {
  static_assert(G == 8 || G == 16 || G == 32, "a group of the cache");
#pragma unroll
  for (int i = 1; i < G; i *= 2) {
    const float other = __shfl_xor_sync(kAll, v, i);
    v = threadIdx.x & i ? __fsub_rn(other, v) : __fadd_rn(v, other);
  }
  return __fmul_rn(v, G == 32 ? 0.17677669529663687f : G == 16 ? 0.25f : 0.35355339059327373f);
}
// Sum over G neighbouring lanes in the format's order; the largest.
template <int G>
__device__ __forceinline__ float group_sum(float v) {
#pragma unroll
  for (int i = 1; i < G; i *= 2) v = __fadd_rn(v, __shfl_xor_sync(kAll, v, i));
  return v;
}
template <int G>
__device__ __forceinline__ float group_max(float v) {
#pragma unroll
  for (int i = 1; i < G; i *= 2) v = fmaxf(v, __shfl_xor_sync(kAll, v, i));
  return v;
}

// A group's scale and this lane's code, by cache/FORMAT.md, "Encoding", step for step.
struct Coded {
  half scale;
  int code;
};
__device__ __forceinline__ float as_half(float v) { return __half2float(__float2half_rn(v)); }
// 1 / scale to nearest, without a branch: a scale is an fp16 number, so neither it nor its inverse is subnormal.
__device__ __forceinline__ float inverse_of(float scale) {
  float r;
  asm("rcp.approx.f32 %0,%1;" : "=f"(r) : "f"(scale));
  return scale == 0.f ? 0.f : fmaf(r, fmaf(-scale, r, 1.f), r);
}
template <int BITS>
__device__ __forceinline__ float level(float g, float scale) {  // code - z
  constexpr float z = BITS == 8 ? 127.5f : 7.f;
  return fminf(fmaxf(rintf(__fadd_rn(__fmul_rn(g, inverse_of(scale)), z)), 0.f), (1 << BITS) - 1.f) - z;
}
__device__ __forceinline__ float squared_error(float g, float scale) {
  const float d = __fsub_rn(g, __fmul_rn(level<4>(g, scale), scale));
  return __fmul_rn(d, d);
}
__device__ __forceinline__ float candidate(float largest, int k) {
  constexpr float parts[8] = {float(21 / 160.0), float(20 / 160.0), float(19 / 160.0), float(18 / 160.0),
                              float(17 / 160.0), float(16 / 160.0), float(15 / 160.0), float(14 / 160.0)};
  const float low = k & 1 ? (k & 2 ? parts[3] : parts[1]) : (k & 2 ? parts[2] : parts[0]);
  const float high = k & 1 ? (k & 2 ? parts[7] : parts[5]) : (k & 2 ? parts[6] : parts[4]);
  return as_half(__fmul_rn(largest, k & 4 ? high : low));
}
// Eight sums over G lanes in the order of `group_sum`, together: at 1, 2 and 4 a lane keeps half of its sums and gives the other half away.
// Then the lanes whose lowest bits are b hold the sum of candidate 4 * (b & 1) + (b & 2) + (b >> 2).
template <int G>
__device__ __forceinline__ float search_scale(float g, float largest) {
  const int lane = threadIdx.x % 32;
  float e[8];
#pragma unroll
  for (int k = 0; k < 8; k++) e[k] = squared_error(g, candidate(largest, k));
#pragma unroll
  for (int h = 1, half_of = 4; h < 8; h *= 2, half_of /= 2) {
    const bool upper = lane & h;
#pragma unroll
    for (int k = 0; k < half_of; k++) {
      const float given = __shfl_xor_sync(kAll, upper ? e[k] : e[k + half_of], h);
      e[k] = __fadd_rn(upper ? e[k + half_of] : e[k], given);
    }
  }
  float least = e[0];
  int first = 4 * (lane & 1) + (lane & 2) + (lane >> 2 & 1);
#pragma unroll
  for (int h = 8; h < G; h *= 2) least = __fadd_rn(least, __shfl_xor_sync(kAll, least, h));
#pragma unroll
  for (int h = 1; h < 8; h *= 2) {
    const float other = __shfl_xor_sync(kAll, least, h);
    const int k = __shfl_xor_sync(kAll, first, h);
    if (other < least || (other == least && k < first)) least = other, first = k;
  }
  const float scale = candidate(largest, first), c = level<4>(g, scale);
  const float over = group_sum<G>(__fmul_rn(g, c)), under = group_sum<G>(__fmul_rn(c, c));
  const float fitted = under == 0.f ? 0.f : as_half(__fdiv_rn(over, under));
  return group_sum<G>(squared_error(g, fitted)) < least ? fitted : scale;
}
// x rounded to fp16 first, unless the cache is f32. Plain formats: the number's own bits as code. 4 bits: an even lane has its neighbour's
// code too, as it is stored.
template <int FORMAT, int G>
__device__ __forceinline__ Coded encode(float x) {
  if constexpr (FORMAT == kCacheF32) return {__ushort_as_half(0), __float_as_int(x)};
  if constexpr (FORMAT == kCacheF16) return {__ushort_as_half(0), __half_as_ushort(__float2half_rn(x))};
  float g = as_half(x), scale;
  if constexpr (pool_is_rotated(FORMAT)) g = hadamard<G>(g);
  const float high = group_max<G>(g), low = group_max<G>(-g), broken = group_max<G>(isfinite(g) ? 0.f : 1.f);
  if constexpr (FORMAT == kCacheQ4)
    scale = search_scale<G>(g, high >= low ? high : -low);
  else
    scale = as_half(__fmul_rn(fmaxf(high, low), FORMAT == kCacheFp8 ? float(1 / 448.0) : float(1 / 127.5)));
  Coded out{__float2half_rn(scale == 0.f ? 0.f : scale), 0};  // never -0: bytes are compared
  if constexpr (FORMAT == kCacheFp8)
    out.code = __nv_cvt_float_to_fp8(fminf(fmaxf(__fmul_rn(g, inverse_of(scale)), -448.f), 448.f), __NV_SATFINITE, __NV_E4M3);
  else if constexpr (FORMAT == kCacheQ8)
    out.code = static_cast<int>(level<8>(g, scale) + 127.5f);
  else
    out.code = static_cast<int>(level<4>(g, scale) + 7.f);
  if (broken != 0.f) out = {__ushort_as_half(0x7e00), 0};
  if constexpr (FORMAT == kCacheQ4) out.code |= __shfl_down_sync(kAll, out.code, 1) << 4;
  return out;
}
// Dim d of a row into the row's codes and scales.
template <int FORMAT, int G>
__device__ __forceinline__ void put(const Coded& made, int d, uint8_t* codes, uint8_t* scales) {
  if constexpr (FORMAT == kCacheF32) {
    reinterpret_cast<int*>(codes)[d] = made.code;
  } else if constexpr (FORMAT == kCacheF16) {
    reinterpret_cast<uint16_t*>(codes)[d] = static_cast<uint16_t>(made.code);
  } else {
    if (d % G == 0) reinterpret_cast<half*>(scales)[d / G] = made.scale;
    if (FORMAT != kCacheQ4) codes[d] = static_cast<uint8_t>(made.code);
    if (FORMAT == kCacheQ4 && d % 2 == 0) codes[d / 2] = static_cast<uint8_t>(made.code);
  }
}

#endif  // __CUDACC__

}  // namespace exl2nb
