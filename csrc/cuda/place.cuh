// Where the packers put the bits of a code: the inverse of what fields.cuh and item.cuh read.
#pragma once
#include <cstdint>

namespace exl2nb {

// Where bit t of field i of width b lies: word, bit in the frame of the even row's half-word. The inverse of dq<b>.
struct Bit {
  int word, bit;
};
__device__ inline Bit wrapped(int word, int rotation, int position) { return {word, (position + rotation + 32) % 32}; }
__device__ inline Bit bit_of(int b, int i, int t) {
  switch (b) {
    case 2: {
      const int j = i % 8;
      return wrapped(i / 8, j < 4 ? 0 : 8, 2 + 2 * (j & 3) + t);
    }
    case 3: {
      const int w = i / 5, j = i % 5;
      if (i == 15) return wrapped(t, 9 - t, 7 + t);
      return j < 3 ? wrapped(w, 0, 1 + 3 * j + t) : wrapped(w, 9 - w, 1 + w + 3 * (j - 3) + t);
    }
    case 4: {
      const int j = i % 4;
      return wrapped(i / 4, j < 2 ? 0 : 8, (j & 1 ? 6 : 2) + t);
    }
    case 5: {
      if (i == 15) return wrapped(t, 10 - t, 5 + t);
      const int w = i / 3, j = i % 3;
      return j < 2 ? wrapped(w, 0, 5 * j + t) : wrapped(w, 10 - w, w + t);
    }
    case 6: {
      const int v = i / 8, j = i % 8;
      if (j < 6) return wrapped(3 * v + j / 2, j & 1 ? 6 : 0, 4 + t);
      if (j == 6) return t < 4 ? wrapped(3 * v, -4, 4 + t) : wrapped(3 * v + 1, -8, 8 + t - 4);
      return t < 4 ? wrapped(3 * v + 2, -4, 4 + t) : wrapped(3 * v + 1, -6, 8 + t - 4);
    }
    default:
      return wrapped(i / 2, i & 1 ? 8 : 0, 2 + t);
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
