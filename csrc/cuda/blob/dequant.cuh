// Dequantisation without integer-to-float conversion: codes to bytes for the integer tensor cores, to fp16 for the others.
//
// A unit is 16 columns x 64 stored rows x b bits = b words per lane (g = lane / 4, t = lane % 4): 32 weights in four steps of 16 rows. Of a
// step a lane has rows 2t, 2t + 8, 2t + 1, 2t + 9 of columns g and g + 8; the four bytes of a word belong to these rows. So a word's fields
// of one column, masked, are the four bytes of m16n8k32; its even or odd bytes, OR'ed with an exponent, are the two neighbouring rows of
// m16n8k16: a b-bit field whose lowest bit is at mantissa bit p, with exponent (25 - p), *is* the fp16 number 2^(10 - p) + code.
//
// Fields of step s in each byte:
//   8 bits  words 2s (column g) and 2s + 1 (g + 8)
//   4       word s: g in bits 0-3, g + 8 in 4-7
//   2       word s / 2, from bit 4 (s & 1): g, then g + 8
//   3       words 0-2: g in bits 0-2, g + 8 in 3-5; step 3: six bits, two each in bits 6-7 of words 0-2
//   5, 6    words 0-3: g in the low bits, above it the high bits of g + 8, whose low bits (2 or 4) are in the following word(s)
#pragma once
#include <type_traits>

#include "cuda/runtime/pdl.cuh"
#include "format/gpu_blob.h"

#ifdef __CUDACC__
namespace exl2nb {

// Calls f(std::integral_constant<int, B>{}) for the width `bits`, one of those listed.
template <int B, int... REST, class F>
__device__ __forceinline__ void dispatch_bits(int bits, const F& f) {
  if constexpr (sizeof...(REST) == 0) {
    f(std::integral_constant<int, B>{});
  } else if (bits == B) {
    f(std::integral_constant<int, B>{});
  } else {
    dispatch_bits<REST...>(bits, f);
  }
}

__host__ __device__ constexpr uint32_t each_byte(uint32_t v) { return v * 0x01010101u; }
__host__ __device__ constexpr uint32_t each_half(uint32_t v) { return v * 0x00010001u; }

// Shift left by S; right if S is negative.
template <int S>
__device__ __forceinline__ uint32_t shifted(uint32_t v) {
  return S >= 0 ? v << (S >= 0 ? S : 0) : v >> (S < 0 ? -S : 0);
}

// Step S: words with column g at bit `low` of every byte, column g + 8 at bit `high`; other bits are undefined.
template <int B, int S>
struct Step {
  static constexpr int low = B == 2 ? 4 * (S & 1) : 0;
  static constexpr int high = B == 2 ? low + 2 : B == 3 || B == 4 ? B : B == 5 || B == 6 ? 8 - B : 0;
  uint32_t g, g8;
  __device__ __forceinline__ explicit Step(const uint32_t* w) {
    if constexpr (B == 8) {
      g = w[2 * S], g8 = w[2 * S + 1];
    } else if constexpr (B == 2) {
      g = g8 = w[S / 2];
    } else if constexpr (B == 3 && S == 3) {
      const uint32_t v = lop_and_or(w[1] >> 4, each_byte(0x0c), w[0] >> 6 & each_byte(3));
      g = g8 = lop_and_or(w[2] >> 2, each_byte(0x30), v);
    } else if constexpr (B == 5 || B == 6) {                // other bits of g8 are zero
      constexpr int kBehind = B == 5 ? 2 : 4, kAt = 8 - B;  // bits in the following word; their target
      const uint32_t behind = shifted<B == 5 ? kAt - 2 * S : kAt - 4 * (S & 1)>(w[B == 5 ? 4 : 4 + S / 2]);
      g = w[S];
      g8 = lop_and_or(behind, each_byte(((1u << kBehind) - 1) << kAt), g & each_byte(0xff << B & 0xff));
    } else {
      g = g8 = w[S];
    }
  }
};

// A-fragment bytes: codes of column g; of column g + 8 as scale * code + (mixed ? code of g : 0).
template <int B>
struct ByteForm {
  static constexpr bool mixed = B <= 4;
  static constexpr int shift = B <= 4 ? B : B == 8 ? 0 : 8 - B;  // log2 of the scale
};
template <int B, int S>
__device__ __forceinline__ void byte_fragments(const uint32_t* w, uint32_t& g, uint32_t& g8) {
  const Step<B, S> step(w);
  if constexpr (B == 8) {
    g = step.g, g8 = step.g8;
  } else if constexpr (B <= 4) {
    const uint32_t v = step.g >> Step<B, S>::low;
    g = v & each_byte((1u << B) - 1);
    g8 = B == 4 ? v : v & each_byte((1u << 2 * B) - 1);
  } else {
    g = step.g & each_byte((1u << B) - 1), g8 = step.g8;
  }
}

__host__ __device__ constexpr uint32_t exponent_at(int p) { return each_half(static_cast<uint32_t>(25 - p) << 10); }
template <int B, int P>
__device__ __forceinline__ uint32_t field(uint32_t w) {
  return lop_and_or(w, each_half(((1u << B) - 1) << P), exponent_at(P));
}
// Mantissa position of h[I] below: the value is 2^(10 - p) + code.
template <int B, int I>
__host__ __device__ constexpr int pos() {
  return I & 1 ? Step<B, I / 4>::high : Step<B, I / 4>::low;
}
// A fragments in fp16 including offsets: h[4 s + r] is register r of step s; r bit 0: column g or g + 8; r bit 1: rows 2t or 2t + 8.
template <int B, int S = 0>
__device__ __forceinline__ void dequantize(const uint32_t* w, uint32_t* h) {
  if constexpr (S < 4) {
    const Step<B, S> step(w);
    h[4 * S] = field<B, Step<B, S>::low>(step.g);
    h[4 * S + 1] = field<B, Step<B, S>::high>(step.g8);
    h[4 * S + 2] = field<B, Step<B, S>::low>(step.g >> 8);
    h[4 * S + 3] = field<B, Step<B, S>::high>(step.g8 >> 8);
    dequantize<B, S + 1>(w, h);
  }
}

// Offset plus zero code as half2: exact in fp16 for every width and position.
template <int B, int P>
__device__ __forceinline__ half2 offset_of() {
  constexpr float v = static_cast<float>(1 << (10 - P)) + static_cast<float>(1 << (B - 1));
  return __float2half2_rn(-v);
}
template <int B, int I = 0>
__device__ __forceinline__ void subtract_offsets(uint32_t* h) {
  if constexpr (I < 16) {
    half2 v = __hadd2(*reinterpret_cast<half2*>(h + I), offset_of<B, pos<B, I>()>());
    h[I] = *reinterpret_cast<uint32_t*>(&v);
    subtract_offsets<B, I + 1>(h);
  }
}
// The same with zero points of columns g (low) and g + 8 (high), for the first and second 32 rows.
template <int B, int I = 0>
__device__ __forceinline__ void subtract_zeros(uint32_t* h, half2 first, half2 second) {
  if constexpr (I < 16) {
    const half2 zero = I < 8 ? first : second;
    constexpr float offset = static_cast<float>(1 << (10 - pos<B, I>()));
    const half2 v =
        __hsub2(*reinterpret_cast<half2*>(h + I), __hadd2(I & 1 ? __high2half2(zero) : __low2half2(zero), __float2half2_rn(offset)));
    h[I] = *reinterpret_cast<const uint32_t*>(&v);
    subtract_zeros<B, I + 1>(h, first, second);
  }
}

// Scale of a 4-bit code: fp16((code + 1)^2 * unit).
__device__ __forceinline__ half2 steps_of(uint32_t code, half unit) {
  uint32_t v = lop_and_or(code | (code << 12), 0x000f000fu, 0x64006400u);
  const half2 s = __hadd2(*reinterpret_cast<half2*>(&v), __float2half2_rn(-1023.f));
  return __hmul2(__hmul2(s, s), __half2half2(unit));
}

// This lane's words of a unit: planes of 16, then of 8 and 4 bytes per lane. 16 bits: dense, fp16 fragments.
template <int B>
__device__ __forceinline__ void load_unit(const uint8_t* p, int lane, uint32_t* w) {
  constexpr int kFull = B / 4 * 4, kRest = B - kFull;
#pragma unroll
  for (int i = 0; i < kFull; i += 4) load_bytes<16>(p + i * 128 + lane * 16, w + i);
  if constexpr (kRest >= 2) load_bytes<8>(p + kFull * 128 + lane * 8, w + kFull);
  if constexpr (kRest % 2) load_bytes<4>(p + (B - 1) * 128 + lane * 4, w + B - 1);
}

// GPTQ: scales and zero points of this lane's columns g and g + 8.
struct GptqSet {
  half2 scale, zero;
};
__device__ __forceinline__ GptqSet load_set(const uint8_t* sets, int set, int lane) {
  const uint2 v = *reinterpret_cast<const uint2*>(sets + set * kGptqSet + (lane >> 2) * 8);
  GptqSet s;
  s.scale = *reinterpret_cast<const half2*>(&v.x), s.zero = *reinterpret_cast<const half2*>(&v.y);
  return s;
}

// EncodedUnit: a unit as fp16 A fragments, scaled and rounded as the format says; for stream-K and unpacking.
enum Halves { kAnyHalves, kOneGroup, kTwoGroups };

// A unit in registers: this lane's words and scales; of dense weights (16 bits) the fragments themselves.
template <int B, bool GPTQ>
struct EncodedUnit {
  uint32_t w[B], codes;
  GptqSet sets[2];

  // st: item bytes; i: unit.
  __device__ __forceinline__ void load(const uint8_t* st, const Item& it, int i, int lane) {
    load(st + i * (128 * B), st + it.units * (128 * B), it, i, lane);
  }
  // The same; words: the unit; behind: the bytes after all units of the item.
  template <Halves HALVES = kAnyHalves>
  __device__ __forceinline__ void load(const uint8_t* words, const uint8_t* behind, const Item& it, int i, int lane) {
    load_unit<B>(words, lane, w);
    if constexpr (B == 16) return;
    const bool one = HALVES == kAnyHalves ? it.one : HALVES == kOneGroup;
    const int g = lane >> 2;
    if constexpr (GPTQ) {
      sets[0] = load_set(behind, one ? i >> (it.scales - 1) : 2 * i, lane);
      sets[1] = one ? sets[0] : load_set(behind, 2 * i + 1, lane);
    } else if constexpr (HALVES == kOneGroup) {
      codes = behind[i * 8 + g];
      asm("" : "+r"(codes));  // keep 32 bits: avoids another truncation
    } else {
      codes = one ? behind[i * 8 + g] * 0x101u : *reinterpret_cast<const uint16_t*>(behind + i * 16 + 2 * g);
    }
  }
  // A fragments of the fp16 weights.
  template <Halves HALVES = kAnyHalves>
  __device__ __forceinline__ void decode(half2 unit, uint32_t (&h)[16]) const {
    decode<HALVES>(unit, h, 0, 16);
  }
  // One half of the unit: two steps of 16 rows.
  template <Halves HALVES, int HALF>
  __device__ __forceinline__ void decode_half(half2 unit, uint32_t (&h)[8]) const {
    uint32_t all[16];  // unused halves are dead code
    decode<HALVES>(unit, all, HALF * 8, HALF * 8 + 8);
#pragma unroll
    for (int f = 0; f < 8; f++) h[f] = all[HALF * 8 + f];
  }

 private:
  template <Halves HALVES>
  __device__ __forceinline__ void decode(half2 unit, uint32_t (&h)[16], int from, int to) const {
    if constexpr (B == 16) {
#pragma unroll
      for (int f = from; f < to; f++) h[f] = w[f];
      return;
    }
    dequantize<B>(w, h);
    half2 step[2];
    if constexpr (GPTQ) {
      subtract_zeros<B>(h, sets[0].zero, sets[1].zero);
      step[0] = sets[0].scale, step[1] = sets[1].scale;
    } else {
      subtract_offsets<B>(h);
      step[0] = steps_of(HALVES == kOneGroup ? codes : codes & 0xff, __low2half(unit));
      step[1] = HALVES == kOneGroup ? step[0] : steps_of(codes >> 8, __high2half(unit));
    }
#pragma unroll
    for (int f = from; f < to; f++) {
      const half s = f & 1 ? __high2half(step[f >> 3]) : __low2half(step[f >> 3]);
      const half2 v = __hmul2(*reinterpret_cast<half2*>(h + f), __half2half2(s));
      h[f] = *reinterpret_cast<const uint32_t*>(&v);
    }
  }
};

}  // namespace exl2nb
#endif  // __CUDACC__
