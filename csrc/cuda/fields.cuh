// Codes to fp16 without a conversion: a b-bit field whose lowest bit sits at mantissa bit p, OR'ed with the exponent (25 - p), *is* the
// number 2^(10 - p) + code. One LOP3 per pair of weights, and one exact HADD2 that takes the offset and the zero point off.
//
// A unit is 16 columns x 64 stored rows x b bits = b words per lane: 32 weights, the A fragments of four m16n8k16 products. h[4 s + r] is
// register r of k-step s: r bit 0 = column g or g + 8, r bit 1 = rows 2t or 2t + 8 (g = lane / 4, t = lane % 4).
#pragma once
#include <cuda_fp16.h>
#include <cstdint>
namespace exl2nb {
__device__ __forceinline__ uint32_t lop_and_or(uint32_t a, uint32_t m, uint32_t e) {
  uint32_t r;
  asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(r) : "r"(a), "r"(m), "r"(e));
  return r;
}
template <int S>
__device__ __forceinline__ uint32_t rot(uint32_t a) {
  return __funnelshift_r(a, a, S);
}
__host__ __device__ constexpr uint32_t EXPO(int p) { return (uint32_t)((25 - p) << 10) * 0x00010001u; }
__host__ __device__ constexpr uint32_t MASK(int b, int p) { return (uint32_t)(((1u << b) - 1) << p) * 0x00010001u; }
template <int b, int p>
__device__ __forceinline__ uint32_t fld(uint32_t w) {
  return lop_and_or(w, MASK(b, p), EXPO(p));
}
// mantissa position of field i of width b; the field reads as 2^(10-p) + code
__host__ __device__ constexpr int pos(int b, int i) {
  return b == 4   ? (i & 1 ? 6 : 2)
         : b == 2 ? 2 + 2 * (i & 3)
         : b == 8 ? 2
         : b == 3 ? (i == 15     ? 7
                     : i % 5 < 3 ? 1 + 3 * (i % 5)
                                 : 1 + i / 5 + 3 * (i % 5 - 3))
         : b == 5 ? (i == 15     ? 5
                     : i % 3 < 2 ? 5 * (i % 3)
                                 : i / 3)
                  : 4;
}
template <int B>
__device__ __forceinline__ void dq(const uint32_t* w, uint32_t* h);
template <>
__device__ __forceinline__ void dq<4>(const uint32_t* w, uint32_t* h) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t r = rot<8>(w[i]);
    h[4 * i] = fld<4, 2>(w[i]);
    h[4 * i + 1] = fld<4, 6>(w[i]);
    h[4 * i + 2] = fld<4, 2>(r);
    h[4 * i + 3] = fld<4, 6>(r);
  }
}
template <>
__device__ __forceinline__ void dq<2>(const uint32_t* w, uint32_t* h) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t r = rot<8>(w[i]);
    h[8 * i] = fld<2, 2>(w[i]);
    h[8 * i + 1] = fld<2, 4>(w[i]);
    h[8 * i + 2] = fld<2, 6>(w[i]);
    h[8 * i + 3] = fld<2, 8>(w[i]);
    h[8 * i + 4] = fld<2, 2>(r);
    h[8 * i + 5] = fld<2, 4>(r);
    h[8 * i + 6] = fld<2, 6>(r);
    h[8 * i + 7] = fld<2, 8>(r);
  }
}
template <>
__device__ __forceinline__ void dq<8>(const uint32_t* w, uint32_t* h) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t r = rot<8>(w[i]);
    h[2 * i] = fld<8, 2>(w[i]);
    h[2 * i + 1] = fld<8, 2>(r);
  }
}
template <>
__device__ __forceinline__ void dq<3>(const uint32_t* w, uint32_t* h) {
  uint32_t a = rot<9>(w[0]), b = rot<8>(w[1]), c = rot<7>(w[2]);
#pragma unroll
  for (int i = 0; i < 3; i++) {
    h[5 * i] = fld<3, 1>(w[i]);
    h[5 * i + 1] = fld<3, 4>(w[i]);
    h[5 * i + 2] = fld<3, 7>(w[i]);
  }
  h[3] = fld<3, 1>(a);
  h[4] = fld<3, 4>(a);
  h[8] = fld<3, 2>(b);
  h[9] = fld<3, 5>(b);
  h[13] = fld<3, 3>(c);
  h[14] = fld<3, 6>(c);
  uint32_t x = lop_and_or(a, MASK(1, 7), EXPO(7));
  x = lop_and_or(b, MASK(1, 8), x);
  x = lop_and_or(c, MASK(1, 9), x);
  h[15] = x;
}
template <>
__device__ __forceinline__ void dq<5>(const uint32_t* w, uint32_t* h) {
  uint32_t a = rot<10>(w[0]), b = rot<9>(w[1]), c = rot<8>(w[2]), d = rot<7>(w[3]), e = rot<6>(w[4]);
#pragma unroll
  for (int i = 0; i < 5; i++) {
    h[3 * i] = fld<5, 0>(w[i]);
    h[3 * i + 1] = fld<5, 5>(w[i]);
  }
  h[2] = fld<5, 0>(a);
  h[5] = fld<5, 1>(b);
  h[8] = fld<5, 2>(c);
  h[11] = fld<5, 3>(d);
  h[14] = fld<5, 4>(e);
  uint32_t x = lop_and_or(a, MASK(1, 5), EXPO(5));
  x = lop_and_or(b, MASK(1, 6), x);
  x = lop_and_or(c, MASK(1, 7), x);
  x = lop_and_or(d, MASK(1, 8), x);
  x = lop_and_or(e, MASK(1, 9), x);
  h[15] = x;
}
template <>
__device__ __forceinline__ void dq<6>(const uint32_t* w, uint32_t* h) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t* v = w + 3 * i;
    uint32_t* q = h + 8 * i;
#pragma unroll
    for (int j = 0; j < 3; j++) {
      q[2 * j] = fld<6, 4>(v[j]);
      q[2 * j + 1] = fld<6, 4>(rot<6>(v[j]));
    }
    uint32_t x = lop_and_or(v[0] << 4, MASK(4, 4), EXPO(4));
    x = lop_and_or(v[1] << 8, MASK(2, 8), x);
    q[6] = x;
    uint32_t y = lop_and_or(v[2] << 4, MASK(4, 4), EXPO(4));
    y = lop_and_or(v[1] << 6, MASK(2, 8), y);
    q[7] = y;
  }
}

// The field's offset and the zero code, as a half2: exact in fp16 for every width and position.
template <int B, int P>
__device__ __forceinline__ half2 offset_of() {
  constexpr float v = static_cast<float>(1 << (10 - P)) + static_cast<float>(1 << (B - 1));
  return __float2half2_rn(-v);
}
template <int B, int I = 0>
__device__ __forceinline__ void take_offsets(uint32_t* h) {
  if constexpr (I < 16) {
    half2 v = __hadd2(*reinterpret_cast<half2*>(h + I), offset_of<B, pos(B, I)>());
    h[I] = *reinterpret_cast<uint32_t*>(&v);
    take_offsets<B, I + 1>(h);
  }
}
// The same with a zero point per column: of columns g (low) and g + 8, of the first and second 32 rows.
template <int B, int I = 0>
__device__ __forceinline__ void take_zeros(uint32_t* h, half2 first, half2 second) {
  if constexpr (I < 16) {
    const half2 zero = I < 8 ? first : second;
    constexpr float offset = static_cast<float>(1 << (10 - pos(B, I)));
    const half2 v =
        __hsub2(*reinterpret_cast<half2*>(h + I), __hadd2(I & 1 ? __high2half2(zero) : __low2half2(zero), __float2half2_rn(offset)));
    h[I] = *reinterpret_cast<const uint32_t*>(&v);
    take_zeros<B, I + 1>(h, first, second);
  }
}

}  // namespace exl2nb
