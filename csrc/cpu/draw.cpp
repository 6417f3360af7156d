// The choice itself; the passes over a row are in draw.inc.
#include "draw.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace exl2nb::draw {
namespace {

constexpr double kSlack = 1e-4;  // by which floors stay on the safe side of rounding
constexpr double kCold = 1e-30;  // temperatures that a float cannot divide by are greedy, and those by which the largest logit overflows
constexpr int kSorted = 256;     // weights that are sorted as they are; more are told apart by their leading bits first
constexpr int kShift = 18;       // of a weight's bits: 32 bins an octave
constexpr int kBins = 127 << (23 - kShift);

struct Scratch {
  std::vector<float> most, w, some;
  std::vector<double> sums, bins;
  std::vector<int32_t> ids;
};

// Set bits of a word, without POPCNT, which baseline x86-64 lacks; masks are mostly runs of zeros or ones.
int64_t ones(uint64_t v) {
  if (v == 0) return 0;
  if (v == ~uint64_t(0)) return 64;
  v -= v >> 1 & 0x5555555555555555;
  v = (v & 0x3333333333333333) + (v >> 2 & 0x3333333333333333);
  return int64_t(((v + (v >> 4)) & 0x0f0f0f0f0f0f0f0f) * 0x0101010101010101 >> 56);
}

int64_t choices(const uint32_t* bits, int64_t n) {
  int64_t count = 0, i = 0;
  for (; i + 2 <= n / 32; i += 2) {
    uint64_t pair;
    std::memcpy(&pair, bits + i, 8);
    count += ones(pair);
  }
  for (; i < n / 32; i++) count += ones(bits[i]);
  if (n % 32) count += ones(bits[i] & ((1u << n % 32) - 1));
  return count;
}

// The first allowed place of the largest logit.
int64_t first_of(const float* x, const uint32_t* bits, int64_t n, float best, const std::vector<float>& most) {
  int64_t block = 0;
  while (most[block] != best) block++;
  int64_t i = block * kMaxBlock;
  while (x[i] != best || (bits && !(bits[i / 32] >> (i % 32) & 1))) i++;
  return i;
}

// The place at which the weights, summed in order, pass `target`; rounding may point past the end: then the last that weighs anything.
template <class At>
int64_t pass(int64_t count, double target, At weight_at) {
  double through = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < count; i++) {
    const double w = weight_at(i);
    through += w;
    if (through > target) return i;
    if (w > 0) last = i;
  }
  return last;
}

// The smallest weight of `some` at which the sum of all up to it, in rising order, passes `limit`; the largest where none does. Two sums
// that rounding made different can give a limit below zero, at which no bin would be hit.
float crossing(std::vector<float>& some, double limit, std::vector<double>& bins) {
  double before = 0;
  limit = std::max(0.0, limit);
  if (some.size() > kSorted) {
    bins.assign(kBins + 1, 0.0);
    const auto bin = [](float w) {
      uint32_t bits;
      std::memcpy(&bits, &w, 4);
      return std::min<uint32_t>(bits >> kShift, kBins);
    };
    for (float w : some) bins[bin(w)] += w;
    uint32_t hit = 0, top = 0;
    for (uint32_t b = 0; b <= kBins; b++)
      if (bins[b] > 0) top = b;
    for (; hit < top && before + bins[hit] <= limit; hit++) before += bins[hit];
    some.erase(std::remove_if(some.begin(), some.end(), [&](float w) { return bin(w) != hit; }), some.end());
  }
  std::sort(some.begin(), some.end());
  for (float w : some) {
    before += w;
    if (before > limit) return w;
  }
  return some.back();
}

void drop_below(Scratch& t, int64_t& count, float floor) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i++)
    if (t.w[t.ids[i]] >= floor) t.ids[kept++] = t.ids[i];
  count = kept;
}

double sum_of(const Scratch& t, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += t.w[t.ids[i]];
  return sum;
}

// A weight that top_k keeps for certain, or a lower one.
double floor_of_top_k(Scratch& t, int64_t top_k, float highest, double temperature) {
  const int64_t blocks = int64_t(t.most.size());
  if (top_k > blocks) return 0;
  t.some = t.most;
  std::nth_element(t.some.begin(), t.some.begin() + (top_k - 1), t.some.end(), [](float a, float b) { return a > b; });
  const float bound = t.some[top_k - 1];
  return bound == highest ? 1 - kSlack : std::exp((double(bound) - highest) / temperature) * (1 - kSlack) - 1e-30;
}

bool has_cuts(int64_t n, const Settings& s) { return (s.top_k > 0 && s.top_k < double(n)) || s.top_p < 1 || s.min_p > 0; }

bool greedy(const Settings& s, float highest) { return s.temperature < kCold || !std::isfinite(highest / float(s.temperature)); }

// The cuts, on t.w; returns how many ids of t.ids are left.
int64_t cut(int64_t n, float highest, double all, const Settings& s, Scratch& t) {
  const bool some_k = s.top_k > 0 && s.top_k < double(n);
  double floor = some_k && s.top_p < 1 ? 0 : s.min_p * (1 - kSlack);  // what top_p counts, min_p must not have taken away
  if (some_k) floor = std::max(floor, floor_of_top_k(t, int64_t(s.top_k), highest, s.temperature));
  if (s.top_p < 1 && !some_k) floor = std::max(floor, (1 - s.top_p) / double(n) * all * (1 - kSlack));
  t.ids.resize(n + kMaxBlock);
  int64_t count = kernels().collect(t.w.data(), n, float(std::max(floor, 1e-38)), t.ids.data());
  const auto weights = [&] {
    t.some.resize(count);
    for (int64_t i = 0; i < count; i++) t.some[i] = t.w[t.ids[i]];
  };
  if (some_k && count > int64_t(s.top_k)) {
    weights();
    const auto kth = t.some.begin() + (int64_t(s.top_k) - 1);
    std::nth_element(t.some.begin(), kth, t.some.end(), [](float a, float b) { return a > b; });
    drop_below(t, count, *kth);
  }
  if (s.top_p < 1) {
    const double mine = sum_of(t, count), total = some_k ? mine : all;
    weights();
    drop_below(t, count, crossing(t.some, (1 - s.top_p) * total - (total - mine), t.bins));
  }
  if (s.min_p > 0) drop_below(t, count, float(s.min_p));
  return count;
}

int64_t choose(int64_t n, float highest, double all, const Settings& s, Scratch& t) {
  if (has_cuts(n, s)) {
    const int64_t count = cut(n, highest, all, s, t);
    const double target = s.uniform * sum_of(t, count);
    return t.ids[pass(count, target, [&](int64_t i) { return double(t.w[t.ids[i]]); })];
  }
  const double target = s.uniform * all;
  const int64_t blocks = (n + kSumBlock - 1) / kSumBlock;
  const int64_t block = pass(blocks, target, [&](int64_t b) { return t.sums[b]; });
  double before = 0;
  for (int64_t b = 0; b < block; b++) before += t.sums[b];
  const int64_t first = block * kSumBlock;
  return first + pass(std::min<int64_t>(kSumBlock, n - first), target - before, [&](int64_t i) { return double(t.w[first + i]); });
}

Drawn draw_row(const float* x, const uint32_t* bits, int64_t n, int64_t columns, const Settings& s) {
  static thread_local Scratch t;
  t.most.resize((columns + kMaxBlock - 1) / kMaxBlock);
  RowScan seen = kernels().scan(x, bits, columns, t.most.data());
  if (columns < n) {
    t.some.resize((n - columns + kMaxBlock - 1) / kMaxBlock);
    const RowScan rest = kernels().scan(x + columns, nullptr, n - columns, t.some.data());
    seen.highest = std::max(seen.highest, rest.highest), seen.bad |= rest.bad;
  }
  if (seen.bad || !(seen.highest > -INFINITY)) return {-1, NAN, 0, 0};
  const double free = bits ? double(choices(bits, columns)) : double(columns);
  if (!(seen.allowed > -INFINITY)) return {-2, NAN, 0, free};
  int64_t token;
  double all = 0;
  if (greedy(s, seen.allowed)) {
    token = first_of(x, bits, columns, seen.allowed, t.most);
  } else {
    t.w.resize((columns + kMaxBlock - 1) / kMaxBlock * kMaxBlock);
    t.sums.resize((columns + kSumBlock - 1) / kSumBlock);
    all = kernels().weigh(x, bits, columns, seen.allowed, float(s.temperature), t.w.data(), t.sums.data());
    token = choose(columns, seen.allowed, all, s, t);
  }
  if (s.temperature != 1 || bits || columns < n) all = kernels().weigh(x, nullptr, n, seen.highest, 1.0f, nullptr, nullptr);
  const float value = x[token];
  const double rank = value == seen.highest ? 1.0 : 1.0 + double(kernels().above(x, n, value));
  return {double(token), double(value) - (double(seen.highest) + std::log(all)), rank, free};
}

void best_of(const float* x, int64_t n, const Drawn& drawn, int64_t top, double* out) {
  static thread_local std::vector<float> values;
  static thread_local std::vector<int32_t> ids;
  values.resize(top), ids.resize(top);
  kernels().best(x, n, top, values.data(), ids.data());
  const double all = double(x[int64_t(drawn.id)]) - drawn.logprob;
  for (int64_t i = 0; i < top; i++) out[2 * i] = double(ids[i]), out[2 * i + 1] = double(values[i]) - all;
}

}  // namespace

void draw_into(const float* x, const uint32_t* bits, int64_t n, int64_t columns, const Settings& s, int64_t top, double* out) {
  const Drawn found = draw_row(x, bits, n, columns, s);
  std::memcpy(out, &found, sizeof found);
  if (top && found.id >= 0) best_of(x, n, found, top, out + 4);
  if (found.id < 0) std::fill(out + 4, out + 4 + 2 * top, -1.0);
}

bool probabilities_into(const float* x, int64_t n, const Settings& s, double* probs) {
  static thread_local Scratch t;
  t.most.resize((n + kMaxBlock - 1) / kMaxBlock);
  const RowScan seen = kernels().scan(x, nullptr, n, t.most.data());
  if (seen.bad || !(seen.highest > -INFINITY)) return false;
  std::fill(probs, probs + n, -1.0);
  if (greedy(s, seen.highest)) {
    probs[first_of(x, nullptr, n, seen.highest, t.most)] = 1;
    return true;
  }
  t.w.resize((n + kMaxBlock - 1) / kMaxBlock * kMaxBlock);
  t.sums.resize((n + kSumBlock - 1) / kSumBlock);
  const double all = kernels().weigh(x, nullptr, n, seen.highest, float(s.temperature), t.w.data(), t.sums.data());
  if (!has_cuts(n, s)) {
    for (int64_t i = 0; i < n; i++)
      if (x[i] > -INFINITY) probs[i] = t.w[i] / all;
    return true;
  }
  const int64_t count = cut(n, seen.highest, all, s, t);
  const double sum = sum_of(t, count);
  for (int64_t i = 0; i < count; i++) probs[t.ids[i]] = t.w[t.ids[i]] / sum;
  return true;
}

bool valid(const Settings& s) {
  return s.temperature >= 0 && s.top_k >= 0 && s.top_p > 0 && s.top_p <= 1 && s.min_p >= 0 && s.min_p <= 1 && s.uniform >= 0 &&
         s.uniform < 1;
}

// ---------------------------------------------------------------- mask_row
//
// One pass over the row, a word of 32 bits at a time. Masks of grammars are mostly runs of ones or of zeros, which are copied or filled;
// the other words go through a table of 16 masks of four lanes, which stays in the first-level cache. Reads 4.125 V bytes, writes 4 V.
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

}  // namespace exl2nb::draw
