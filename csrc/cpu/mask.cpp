// One pass over the row, a word of 32 bits at a time. Masks of grammars are mostly runs of ones or of zeros, which are copied or filled;
// the other words go through a table of 16 masks of four lanes, which stays in the first-level cache. Reads 4.125 V bytes, writes 4 V.
#include "mask.h"

#include <cstring>
#include <limits>

namespace exl2nb {
namespace {

struct Nibbles {
  uint32_t lanes[16][4];
  constexpr Nibbles() : lanes() {
    for (int n = 0; n < 16; n++) {
      for (int j = 0; j < 4; j++) lanes[n][j] = n >> j & 1 ? 0xffffffffu : 0u;
    }
  }
};
constexpr Nibbles kNibbles;
constexpr uint32_t kMinusInfinity = 0xff800000u;

// The 32 logits of one word. Numbers travel as bits: a NaN must come out as it went in.
inline void mask_word(const float* logits, uint32_t word, float* out) {
  for (int n = 0; n < 8; n++) {
    const uint32_t* mask = kNibbles.lanes[word >> 4 * n & 15];
    uint32_t x[4];
    std::memcpy(x, logits + 4 * n, sizeof x);
    for (int j = 0; j < 4; j++) x[j] = (x[j] & mask[j]) | (kMinusInfinity & ~mask[j]);
    std::memcpy(out + 4 * n, x, sizeof x);
  }
}

}  // namespace

void mask_row(const float* logits, const uint32_t* bits, int64_t V, float* out) {
  const int64_t words = V / 32;
  for (int64_t i = 0; i < words; i++, logits += 32, out += 32) {
    const uint32_t word = bits[i];
    if (word == 0xffffffffu) {
      std::memcpy(out, logits, 32 * sizeof(float));
    } else if (word == 0) {
      for (int j = 0; j < 32; j++) out[j] = -std::numeric_limits<float>::infinity();
    } else {
      mask_word(logits, word, out);
    }
  }
  for (int64_t j = 0; j < V % 32; j++) out[j] = bits[words] >> j & 1 ? logits[j] : -std::numeric_limits<float>::infinity();
}

}  // namespace exl2nb
