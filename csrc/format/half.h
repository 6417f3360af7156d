// IEEE half and bfloat16 against float, for code that may not assume F16C. Round to nearest even, subnormals kept.
#pragma once
#include <cstdint>
#include <cstring>

namespace exl2nb {

static inline uint32_t float_bits(float f) {
  uint32_t b;
  std::memcpy(&b, &f, 4);
  return b;
}
static inline float bits_float(uint32_t b) {
  float f;
  std::memcpy(&f, &b, 4);
  return f;
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) return bits_float(sign | float_bits(float(magnitude) * 0x1p-24f));
  return bits_float(sign | ((magnitude << 13) + (112u << 23)));
}

static inline uint16_t float_to_half(float f) {
  const uint32_t b = float_bits(f), sign = b >> 16 & 0x8000, magnitude = b & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and up
  if (magnitude < 0x38800000) {                                 // below 2^-14: let the float adder round at 2^-24
    return uint16_t(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000));
  }
  return uint16_t(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13));
}

static inline float bfloat_to_float(uint16_t h) { return bits_float(uint32_t(h) << 16); }

}  // namespace exl2nb
