// The units of a quantised tile (the drawing in format/blob.h): codes in, words out, and back. Shared by what packs blobs.
#pragma once
#include <cstdint>
#include <cstring>

#include "../format/blob.h"

namespace exl2nb {

constexpr int64_t kFirstSection = sizeof(BlobHeader) + sizeof(BlobPart);

inline void write_header(uint8_t* blob, int64_t K, int64_t N, int64_t num_parts, int64_t bytes) {
  const BlobHeader h{kBlobMagic, kBlobVersion, int32_t(K), int32_t(N), int32_t(num_parts), bytes, {}};
  std::memcpy(blob, &h, sizeof h);
}

// Calls f(pair, low bit of the piece, width of the piece, word, bit in the half) for every piece of format/blob.h's drawing.
template <int B, class F>
inline void each_piece(const F& f) {
  constexpr int per = 16 / B;
  for (int p = 0; p < per * B; p++) f(p, 0, B, p / per, p % per * B);
  if (B == 3 || B == 5)
    for (int t = 0; t < B; t++) f(15, t, 1, t, 15);
  if (B == 6)
    for (int i = 0; i < 4; i++) {
      f(12 + i, 0, 4, i, 12);
      f(12 + i, 4, 2, 4 + i / 2, 12 + i % 2 * 2);
    }
}

// Codes of one unit, one row of 16 columns after the other -> its words.
template <int B>
void pack_unit(const uint32_t (*codes)[kTile], uint32_t* out) {
  std::memset(out, 0, sizeof(uint32_t) * B * kTile);
  each_piece<B>([&](int pair, int low, int width, int word, int bit) {
    const uint32_t mask = (1u << width) - 1;
    const uint32_t *even = codes[2 * pair], *odd = codes[2 * pair + 1];
    uint32_t* o = out + word * kTile;
    for (int c = 0; c < kTile; c++) o[c] |= (even[c] >> low & mask) << bit | (odd[c] >> low & mask) << (bit + 16);
  });
}

// The codes of one unit of a tile.
template <int B>
void unpack_unit(const uint32_t* w, uint32_t (*codes)[kTile]) {
  std::memset(codes, 0, sizeof(uint32_t) * kUnit * kTile);
  each_piece<B>([&](int pair, int low, int width, int word, int bit) {
    const uint32_t mask = (1u << width) - 1;
    for (int c = 0; c < kTile; c++) {
      codes[2 * pair][c] |= (w[word * kTile + c] >> bit & mask) << low;
      codes[2 * pair + 1][c] |= (w[word * kTile + c] >> (bit + 16) & mask) << low;
    }
  });
}

template <template <int> class F, class... Args>
void by_width(int bits, Args... args) {
  switch (bits) {
    case 2:
      return F<2>::run(args...);
    case 3:
      return F<3>::run(args...);
    case 4:
      return F<4>::run(args...);
    case 5:
      return F<5>::run(args...);
    case 6:
      return F<6>::run(args...);
    default:
      return F<8>::run(args...);
  }
}
template <int B>
struct Unpack {
  static void run(const uint32_t* w, uint32_t (*codes)[kTile]) { unpack_unit<B>(w, codes); }
};

}  // namespace exl2nb
