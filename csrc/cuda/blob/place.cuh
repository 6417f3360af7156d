// Where the packers put the bits of a code: the inverse of what fields.cuh and item.cuh read.
#pragma once
#include <cstdint>

namespace exl2nb {

// Where bit t of field i of width b lies (i as in dq<b>: step i / 4, register i % 4): word, bit for the even row; the odd row's is 16
// higher.
struct Bit {
  int word, bit;
};
__device__ inline Bit bit_of(int b, int i, int t) {
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
// Byte offset of word w of a lane within a unit: planes of 16, 8 and 4 bytes per lane, as load_unit reads them.
__device__ inline int plane(int b, int w, int lane) {
  const int full = b / 4 * 4, rest = b - full;
  if (w < full) return w / 4 * 512 + lane * 16 + w % 4 * 4;
  const int base = full / 4 * 512;
  w -= full;
  if (rest >= 2 && w < 2) return base + lane * 8 + w * 4;
  return base + (rest == 3 ? 256 : 0) + lane * 4;
}

}  // namespace exl2nb
