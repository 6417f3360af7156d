// Products of one item (gpu_blob.h) on the fp16 tensor cores: dequantise, m16n8k16, scale.
//
// c[column][token]: the item's 16 columns are the rows of the A fragments, tokens are the columns of B. EXL2: one scale per column and half
// unit, from a 4-bit code. GPTQ: the zero point is folded into the constant that removes a field's offset, at no cost, since (code - zero)
// is exact in fp16; the scale is applied to the sum of a unit.
#pragma once
#include "cuda/blob/dequant.cuh"
#include "cuda/runtime/pdl.cuh"

namespace exl2nb {

enum CopyPath { kBulk = 0, kAsync = 1, kPlain = 2 };

#ifdef __CUDACC__
// Starts to copy an item into a ring stage: lane 0 (kBulk, counted by `bar`) or the whole warp.
template <int PATH>
__device__ __forceinline__ void fetch_item(uint8_t* stage, const uint8_t* from, int bytes, int lane, uint64_t* bar) {
  if constexpr (PATH == kBulk) {
    barrier_expect(bar, bytes);
    bulk_copy(stage, from, bytes, bar);
  } else {
    for (int b = lane * 16; b < bytes; b += 512) copy16<PATH == kAsync>(stage + b, from + b);
  }
}
// c += A B for a k-step of 16; START: c = A B.
template <int PATH, bool START>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
  const float z0 = START ? 0.f : c[0], z1 = START ? 0.f : c[1], z2 = START ? 0.f : c[2], z3 = START ? 0.f : c[3];
#if __CUDA_ARCH__ >= 800
  if constexpr (PATH != kPlain) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(z0), "f"(z1), "f"(z2), "f"(z3));
    return;
  }
#endif
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(z0), "f"(z1), "f"(z2), "f"(z3));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
}

// This lane's activations of 32 stored rows; zero for a missing token.
template <bool STAGED>
__device__ __forceinline__ uint4 load_x(const half* x, bool live) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (live) {
    if constexpr (STAGED)
      v = *reinterpret_cast<const uint4*>(x);
    else
      v = __ldcg(reinterpret_cast<const uint4*>(x));
  }
  return v;
}

__device__ __forceinline__ void add_scaled(float (&y)[4], const float (&acc)[4], half2 step) {
  const float2 f = __half22float2(step);
  y[0] = fmaf(acc[0], f.x, y[0]);
  y[1] = fmaf(acc[1], f.x, y[1]);
  y[2] = fmaf(acc[2], f.y, y[2]);
  y[3] = fmaf(acc[3], f.y, y[3]);
}

// An item: y[0..1] column g, tokens 2t, 2t + 1; y[2..3] column g + 8. steps: scale units (EXL2); shift: units per scale set (GPTQ).
template <int PATH, int B, bool GPTQ, bool STAGED, bool ONE>
__device__ __forceinline__ void compute(const uint8_t* st, int units, [[maybe_unused]] const half2* steps, [[maybe_unused]] int shift,
                                        const half* x, bool live, int lane, float (&y)[4]) {
  if constexpr (B == 16) {
    for (int i = 0; i < units; i++, st += 2048, x += 64) {
      const uint4 xa = load_x<STAGED>(x, live), xb = load_x<STAGED>(x + 32, live);
      uint32_t h[16];
      load_unit<16>(st, lane, h);
      mma<PATH, false>(y, h, xa.x, xa.y);
      mma<PATH, false>(y, h + 4, xa.z, xa.w);
      mma<PATH, false>(y, h + 8, xb.x, xb.y);
      mma<PATH, false>(y, h + 12, xb.z, xb.w);
    }
  } else {
    const uint8_t* const scales = st + units * (128 * B) + (GPTQ ? 0 : (lane >> 2) * (ONE ? 1 : 2));
#pragma unroll 1
    for (int i = 0; i < units; i++) {
      uint32_t w[B], h[16];
      const uint4 xa = load_x<STAGED>(x + i * 64, live), xb = load_x<STAGED>(x + i * 64 + 32, live);
      load_unit<B>(st + i * (128 * B), lane, w);
      half2 unit;
      GptqSet first, second;
      if constexpr (GPTQ) {
        first = load_set(scales, ONE ? i >> shift : 2 * i, lane);
        second = ONE ? first : load_set(scales, 2 * i + 1, lane);
      } else {
        unit = steps[i];
      }
      dequantize<B>(w, h);
      if constexpr (GPTQ)
        subtract_zeros<B>(h, first.zero, second.zero);
      else
        subtract_offsets<B>(h);
      float a[4], b[4];
      mma<PATH, true>(a, h, xa.x, xa.y);
      mma<PATH, true>(b, h + 8, xb.x, xb.y);
      mma<PATH, false>(a, h + 4, xa.z, xa.w);
      mma<PATH, false>(b, h + 12, xb.z, xb.w);
      if constexpr (!GPTQ) {
        const uint32_t codes = ONE ? scales[i * 8] : *reinterpret_cast<const uint16_t*>(scales + i * 16);
        first.scale = steps_of(ONE ? codes : codes & 0xff, __low2half(unit));
        if constexpr (!ONE) second.scale = steps_of(codes >> 8, __high2half(unit));
      }
      if constexpr (ONE) {
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] += b[j];
      }
      add_scaled(y, a, first.scale);
      if constexpr (!ONE) add_scaled(y, b, second.scale);
    }
  }
}

// Item descriptor in four registers: unpacking fields where they are used is cheaper than keeping them apart.
struct ItemDesc {
  uint4 words;
  __device__ __forceinline__ explicit ItemDesc(const Item& item) : words(*reinterpret_cast<const uint4*>(&item)) {}
  __device__ __forceinline__ ItemDesc(uint32_t kind, uint32_t rest) : words{0, kind, 0, rest} {}  // without offset, bytes and unit0
  __device__ __forceinline__ int block() const { return words.y & 0xffff; }
  __device__ __forceinline__ int bits() const { return words.y >> 16 & 0xff; }
  __device__ __forceinline__ int units() const { return words.y >> 24; }
  __device__ __forceinline__ int unit0() const { return words.z >> 16; }
  __device__ __forceinline__ bool one() const { return words.w & 0xff; }
  __device__ __forceinline__ bool lone() const { return words.w >> 8 & 0xff; }
  __device__ __forceinline__ int scales() const { return words.w >> 16 & 0xff; }
};

// Any item. st: its bytes; steps: scale units; x: this lane's activations of the first row.
template <int PATH, bool STAGED>
__device__ __forceinline__ void compute_item(const ItemDesc& it, const uint8_t* st, const half2* steps, const half* x, bool live, int lane,
                                             float (&y)[4]) {
  const int bits = it.bits(), units = it.units();
  const auto with = [&](auto gptq, auto one, auto b) {
    constexpr bool kGptq = decltype(gptq)::value, kOne = decltype(one)::value;
    compute<PATH, decltype(b)::value, kGptq, STAGED, kOne>(st, units, steps, it.scales() - 1, x, live, lane, y);
  };
  const auto any_width = [&](auto one) {  // the most common width first
    if (it.scales())
      dispatch_bits<4, 3, 2, 8>(bits, [&](auto b) { with(std::true_type{}, one, b); });
    else
      dispatch_bits<4, 3, 5, 2, 6, 8, 16>(bits, [&](auto b) { with(std::false_type{}, one, b); });
  };
  it.one() ? any_width(std::true_type{}) : any_width(std::false_type{});
}

#endif  // __CUDACC__

}  // namespace exl2nb
