// A unit of a blob as fp16 weights in A fragments, scaled and rounded as the format says: for products of many tokens and for unpacking.
#pragma once
#include "cuda/blob/item.cuh"

namespace exl2nb {

// Whether a unit's halves belong to one group, where that is known when compiling.
enum Halves { kAnyHalves, kOneGroup, kTwoGroups };

// A unit as it lies in memory: this lane's words and what scales them.
template <int B, bool GPTQ>
struct Coded {
  uint32_t w[B], codes;
  GptqSet sets[2];

  // st: the bytes of the item, i: the unit in it.
  __device__ __forceinline__ void load(const uint8_t* st, const Item& it, int i, int lane) {
    load(st + i * (128 * B), st + it.units * (128 * B), it, i, lane);
  }
  // The same; words: those of the unit, behind: what lies behind all units of the item.
  template <Halves HALVES = kAnyHalves>
  __device__ __forceinline__ void load(const uint8_t* words, const uint8_t* behind, const Item& it, int i, int lane) {
    load_unit<B>(words, lane, w);
    const bool one = HALVES == kAnyHalves ? it.one : HALVES == kOneGroup;
    const int g = lane >> 2;
    if constexpr (GPTQ) {
      sets[0] = load_set(behind, one ? i >> (it.scales - 1) : 2 * i, lane);
      sets[1] = one ? sets[0] : load_set(behind, 2 * i + 1, lane);
    } else if constexpr (HALVES == kOneGroup) {
      codes = behind[i * 8 + g];
      asm("" : "+r"(codes));  // 32 bits, so that nobody cuts it again
    } else {
      codes = one ? behind[i * 8 + g] * 0x101u : *reinterpret_cast<const uint16_t*>(behind + i * 16 + 2 * g);
    }
  }
  // As A fragments of the format's fp16 weights.
  template <Halves HALVES = kAnyHalves>
  __device__ __forceinline__ void decode(half2 unit, uint32_t (&h)[16]) const {
    decode<HALVES>(unit, h, 0, 16);
  }
  // Of a half of the unit alone: its two steps of sixteen rows.
  template <Halves HALVES, int HALF>
  __device__ __forceinline__ void decode_half(half2 unit, uint32_t (&h)[8]) const {
    uint32_t all[16];  // what is not used is not computed
    decode<HALVES>(unit, all, HALF * 8, HALF * 8 + 8);
#pragma unroll
    for (int f = 0; f < 8; f++) h[f] = all[HALF * 8 + f];
  }

 private:
  template <Halves HALVES>
  __device__ __forceinline__ void decode(half2 unit, uint32_t (&h)[16], int from, int to) const {
    dq<B>(w, h);
    half2 step[2];
    if constexpr (GPTQ) {
      take_zeros<B>(h, sets[0].zero, sets[1].zero);
      step[0] = sets[0].scale, step[1] = sets[1].scale;
    } else {
      take_offsets<B>(h);
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
template <>
struct Coded<16, false> {  // dense: fp16 as the fragments hold it
  uint32_t w[16];
  template <Halves = kAnyHalves>
  __device__ __forceinline__ void load(const uint8_t* words, const uint8_t*, const Item&, int, int lane) {
#pragma unroll
    for (int s = 0; s < 4; s++) *reinterpret_cast<uint4*>(w + 4 * s) = *reinterpret_cast<const uint4*>(words + s * 512 + lane * 16);
  }
  __device__ __forceinline__ void load(const uint8_t* st, const Item& it, int i, int lane) { load(st + i * 2048, st, it, i, lane); }
  template <Halves = kAnyHalves>
  __device__ __forceinline__ void decode(half2, uint32_t (&h)[16]) const {
#pragma unroll
    for (int f = 0; f < 16; f++) h[f] = w[f];
  }
  template <Halves, int HALF>
  __device__ __forceinline__ void decode_half(half2, uint32_t (&h)[8]) const {
#pragma unroll
    for (int f = 0; f < 8; f++) h[f] = w[HALF * 8 + f];
  }
};

}  // namespace exl2nb
