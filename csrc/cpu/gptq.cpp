// The group loop of gptq.h: shared maximum per group, chunks of columns in parallel.
#include "gptq.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace exl2nb::gptq {
namespace {

// Nearest half of a non-negative finite float <= 65504, as bits.
uint16_t half_bits(float x) {
  uint32_t b;
  if (x < 6.103515625e-05f) {
    float t = (x + 0.75f) - 0.75f;
    return uint16_t(std::lrint(double(t) * 16777216.0));
  }
  std::memcpy(&b, &x, 4);
  b += 0xFFF + ((b >> 13) & 1);
  return uint16_t((b >> 13) - (112u << 10));
}

float half_value(uint16_t h) {
  const int e = h >> 10, m = h & 1023;
  return e ? std::ldexp(float(1024 + m), e - 25) : std::ldexp(float(m), -24);
}

constexpr float LOW = 0.5f, HIGH = 1.3f;        // the maxima tried, relative to the largest column's best step
constexpr float SMALLEST = 1.52587890625e-05f;  // 2^-16: a smaller maximum / 256 would round to zero

// The candidate maxima of one group: halves, geometrically spaced.
void spread(float top, int bits, uint16_t* maxima, float* applied) {
  const float largest = 65504.0f / float(1 << (bits - 1));
  for (int c = 0; c < MAX_CANDIDATES; c++) {
    const float f = LOW * std::pow(HIGH / LOW, float(c) / float(MAX_CANDIDATES - 1));
    maxima[c] = half_bits(std::clamp(top * f, SMALLEST, largest * 0.999f));
    applied[c] = half_value(half_bits(half_value(maxima[c]) / 256.0f));
  }
}

}  // namespace

Kernels kernels(int isa) {
#ifdef EXL2NB_X86
  if (isa >= 2) return kernels_avx512();
  if (isa == 1) return kernels_avx2();
#endif
  return kernels_base();
}

void quantize(const Problem& p, int isa, const Parallel& parallel) {
  const Kernels k = kernels(isa);
  const int chunks = (p.N + LANES - 1) / LANES, wide = chunks * LANES;
  int longest = 0;
  for (int g = 0; g < p.G; g++) longest = std::max(longest, p.groups[2 * g + 1]);
  std::vector<float> w(int64_t(wide) * p.K, 0.0f), best(wide), losses(int64_t(wide) * MAX_CANDIDATES), row_weight(p.K);
  std::vector<float> scratch(p.coupling ? int64_t(p.N) * (4 + longest) : 0);
  std::vector<uint8_t> codes(int64_t(wide) * p.K), picks(int64_t(wide) * MAX_CANDIDATES);
  for (int r = 0; r < p.K; r++) {
    const float d = p.factor[int64_t(r) * p.K + r];
    row_weight[r] = 1.0f / (d * d);
  }
  parallel(chunks, [&](int64_t from, int64_t to) {
    for (int64_t c = from; c < to; c++)
      for (int r = 0; r < p.K; r++)
        for (int l = 0; l < LANES && c * LANES + l < p.N; l++) w[(c * p.K + r) * LANES + l] = p.weight[int64_t(r) * p.N + c * LANES + l];
  });
  for (int g = 0, a = 0; g < p.G; g++) {
    const int bits = p.groups[2 * g], e = a + p.groups[2 * g + 1];
    parallel(chunks, [&](int64_t from, int64_t to) {
      for (int64_t c = from; c < to; c++) k.best_step(&w[(c * p.K + a) * LANES], &row_weight[a], e - a, bits, &best[c * LANES]);
    });
    uint16_t maxima[MAX_CANDIDATES];
    float applied[MAX_CANDIDATES];
    spread(*std::max_element(best.begin(), best.end()), bits, maxima, applied);
    parallel(chunks, [&](int64_t from, int64_t to) {
      for (int64_t c = from; c < to; c++)
        k.candidates(&w[(c * p.K + a) * LANES], &row_weight[a], e - a, bits, &best[c * LANES], applied, &losses[c * LANES * MAX_CANDIDATES],
                     &picks[c * LANES * MAX_CANDIDATES]);
    });
    int pick = 0;
    double lowest = INFINITY;
    for (int m = 0; m < MAX_CANDIDATES; m++) {
      double sum = 0.0;
      for (int n = 0; n < p.N; n++)
        sum += double(losses[(int64_t(n / LANES) * MAX_CANDIDATES + m) * LANES + n % LANES]) * double(p.column_weight[n]);
      if (sum < lowest) lowest = sum, pick = m;
    }
    p.scale_max[g] = maxima[pick];
    if (p.coupling) {
      const int per = p.B / LANES;
      const int64_t stride = int64_t(4 + longest) * p.B;
      parallel(p.N / p.B, [&](int64_t from, int64_t to) {
        std::vector<float> loss(p.B);
        for (int64_t b = from; b < to; b++) {
          const int64_t first = b * per;
          const uint8_t* code = &picks[(first * MAX_CANDIDATES + pick) * LANES];
          k.coupled(&w[first * p.K * LANES], p.factor, p.K, a, e, bits, applied[pick], per, code, MAX_CANDIDATES * LANES,
                    p.coupling + b * p.B * p.B, p.spread + b * p.B, &codes[first * p.K * LANES], loss.data(), &scratch[b * stride]);
          for (int n = 0; n < p.B; n++) {
            p.scale_index[int64_t(g) * p.N + b * p.B + n] = code[(n / LANES) * MAX_CANDIDATES * LANES + n % LANES];
            p.loss[int64_t(g) * p.N + b * p.B + n] = loss[n];
          }
        }
      });
      parallel(chunks, [&](int64_t from, int64_t to) {
        for (int64_t c = from; c < to; c++)
          k.trail(&w[c * p.K * LANES], p.factor, p.K, a, e, &scratch[(c / per) * stride + 4 * p.B + (c % per) * LANES], p.B);
      });
    } else {
      parallel(chunks, [&](int64_t from, int64_t to) {
        std::vector<float> err(int64_t(longest) * LANES);
        float loss[LANES];
        for (int64_t c = from; c < to; c++) {
          const uint8_t* code = &picks[(c * MAX_CANDIDATES + pick) * LANES];
          k.rows(&w[c * p.K * LANES], p.factor, p.K, a, e, bits, applied[pick], code, &codes[c * p.K * LANES], loss, err.data());
          for (int l = 0; l < LANES && c * LANES + l < p.N; l++) {
            p.scale_index[int64_t(g) * p.N + c * LANES + l] = code[l];
            p.loss[int64_t(g) * p.N + c * LANES + l] = loss[l];
          }
        }
      });
    }
    a = e;
  }
  parallel(chunks, [&](int64_t from, int64_t to) {
    for (int64_t c = from; c < to; c++)
      for (int r = 0; r < p.K; r++)
        for (int l = 0; l < LANES && c * LANES + l < p.N; l++) p.codes[int64_t(r) * p.N + c * LANES + l] = codes[(c * p.K + r) * LANES + l];
  });
}

}  // namespace exl2nb::gptq
