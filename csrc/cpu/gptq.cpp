// The group loop of gptq.h: shared maximum per group, chunks of columns in parallel.
#include "gptq.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "parallel.h"

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

// Rounds one matrix, group by group. Weights and codes are stored by chunk, LANES columns side by side, so that a kernel reads rows.
class Rounding {
 public:
  explicit Rounding(const Problem& problem) : p_(problem), k_(kernels()), chunks_((p_.N + LANES - 1) / LANES) {
    const int wide = chunks_ * LANES;
    for (int g = 0; g < p_.G; g++) longest_ = std::max(longest_, p_.groups[2 * g + 1]);
    w_.resize(int64_t(wide) * p_.K), codes_.resize(int64_t(wide) * p_.K), best_.resize(wide), row_weight_.resize(p_.K);
    losses_.resize(int64_t(wide) * MAX_CANDIDATES), picks_.resize(int64_t(wide) * MAX_CANDIDATES);
    if (p_.coupling) scratch_.resize(int64_t(p_.N) * (4 + longest_));
    for (int r = 0; r < p_.K; r++) {
      const float d = p_.factor[int64_t(r) * p_.K + r];
      row_weight_[r] = 1.0f / (d * d);
    }
    each_number([&](int64_t inside, int64_t outside) { w_[inside] = p_.weight[outside]; });
  }

  void run() {
    for (int g = 0, first = 0; g < p_.G; g++) {
      group_ = g, first_ = first, end_ = first + p_.groups[2 * g + 1], bits_ = p_.groups[2 * g];
      choose_scales();
      p_.coupling ? round_coupled() : round_columns();
      first = end_;
    }
    each_number([&](int64_t inside, int64_t outside) { p_.codes[outside] = codes_[inside]; });
  }

 private:
  template <class F>
  void each_chunk(const F& f) const {
    for_each_task(chunks_, true, f);
  }
  // Visits every number: its index in a buffer of this class and in the matrix.
  template <class Visit>
  void each_number(Visit visit) const {
    each_chunk([&](int64_t c) {
      for (int r = 0; r < p_.K; r++)
        for (int l = 0; l < LANES && c * LANES + l < p_.N; l++) visit((c * p_.K + r) * LANES + l, int64_t(r) * p_.N + c * LANES + l);
    });
  }

  // The group's largest step: the candidate with the least loss over all columns. The columns' scales under it stay in picks_.
  void choose_scales() {
    const float* const row_weight = &row_weight_[first_];
    const int rows = end_ - first_;
    each_chunk([&](int64_t c) { k_.best_step(&w_[(c * p_.K + first_) * LANES], row_weight, rows, bits_, &best_[c * LANES]); });
    uint16_t maxima[MAX_CANDIDATES];
    float applied[MAX_CANDIDATES];
    spread(*std::max_element(best_.begin(), best_.end()), bits_, maxima, applied);
    each_chunk([&](int64_t c) {
      k_.candidates(&w_[(c * p_.K + first_) * LANES], row_weight, rows, bits_, &best_[c * LANES], applied,
                    &losses_[c * LANES * MAX_CANDIDATES], &picks_[c * LANES * MAX_CANDIDATES]);
    });
    double lowest = INFINITY;
    pick_ = 0;
    for (int m = 0; m < MAX_CANDIDATES; m++) {
      double sum = 0.0;
      for (int n = 0; n < p_.N; n++)
        sum += double(losses_[(int64_t(n / LANES) * MAX_CANDIDATES + m) * LANES + n % LANES]) * double(p_.column_weight[n]);
      if (sum < lowest) lowest = sum, pick_ = m;
    }
    p_.scale_max[group_] = maxima[pick_], applied_ = applied[pick_];
  }

  void round_columns() {
    each_chunk([&](int64_t c) {
      std::vector<float> err(int64_t(longest_) * LANES);
      float loss[LANES];
      const uint8_t* code = &picks_[(c * MAX_CANDIDATES + pick_) * LANES];
      k_.rows(&w_[c * p_.K * LANES], p_.factor, p_.K, first_, end_, bits_, applied_, code, &codes_[c * p_.K * LANES], loss, err.data());
      for (int l = 0; l < LANES && c * LANES + l < p_.N; l++) report(c * LANES + l, code[l], loss[l]);
    });
  }

  // Blocks of B columns together; then their errors are compensated in the following rows, chunk by chunk.
  void round_coupled() {
    const int per = p_.B / LANES;
    const int64_t stride = int64_t(4 + longest_) * p_.B;
    for_each_task(p_.N / p_.B, true, [&](int64_t b) {
      std::vector<float> loss(p_.B);
      const int64_t first = b * per;
      const uint8_t* code = &picks_[(first * MAX_CANDIDATES + pick_) * LANES];
      k_.coupled(&w_[first * p_.K * LANES], p_.factor, p_.K, first_, end_, bits_, applied_, per, code, MAX_CANDIDATES * LANES,
                 p_.coupling + b * p_.B * p_.B, p_.spread + b * p_.B, &codes_[first * p_.K * LANES], loss.data(), &scratch_[b * stride]);
      for (int n = 0; n < p_.B; n++) report(b * p_.B + n, code[(n / LANES) * MAX_CANDIDATES * LANES + n % LANES], loss[n]);
    });
    each_chunk([&](int64_t c) {
      k_.trail(&w_[c * p_.K * LANES], p_.factor, p_.K, first_, end_, &scratch_[(c / per) * stride + 4 * p_.B + (c % per) * LANES], p_.B);
    });
  }

  void report(int64_t column, uint8_t scale_index, float loss) const {
    p_.scale_index[int64_t(group_) * p_.N + column] = scale_index;
    p_.loss[int64_t(group_) * p_.N + column] = loss;
  }

  const Problem& p_;
  const Kernels& k_;
  const int chunks_;
  int longest_ = 0;  // rows of the longest group
  std::vector<float> w_, best_, losses_, row_weight_, scratch_;
  std::vector<uint8_t> codes_, picks_;
  int group_ = 0, first_ = 0, end_ = 0, bits_ = 0, pick_ = 0;
  float applied_ = 0;  // the chosen largest step, as the kernels multiply by it
};

}  // namespace

void quantize(const Problem& p) { Rounding(p).run(); }

}  // namespace exl2nb::gptq
