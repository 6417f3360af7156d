#include "moe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace exl2nb {
namespace {

constexpr int kGroupRows = 512;  // rows in flight between gate and down: bounds the memory of a long prompt

// Softmax over all experts, the k largest, divided by their norm.
void route(const float* logits, const Experts& e, int32_t* chosen, float* weight) {
  std::vector<float> p(logits, logits + e.count);
  const float top = *std::max_element(p.begin(), p.end());
  float sum = 0.0f;
  for (float& v : p) sum += v = std::exp(v - top);
  for (int i = 0; i < e.top_k; i++) {
    const auto best = std::max_element(p.begin(), p.end());  // of equal ones the first
    chosen[i] = int32_t(best - p.begin());
    weight[i] = *best / sum;
    *best = -1.0f;
  }
  if (!(e.renormalize > 0)) return;
  float norm = 0.0f;
  for (int i = 0; i < e.top_k; i++) norm += e.renormalize == 1.0f ? weight[i] : std::pow(weight[i], e.renormalize);
  if (e.renormalize != 1.0f) norm = std::pow(norm, 1.0f / e.renormalize);
  for (int i = 0; i < e.top_k; i++) weight[i] /= norm;
}

// All (row, expert) pairs in the order of the experts.
struct Pairs {
  std::vector<int> row, first;  // row of each pair; first pair of each expert, and their number at the end
  std::vector<int> at;          // (T, k): the pairs of each row, rising
  std::vector<float> weight;    // of each pair
};

Pairs sort_pairs(const int32_t* chosen, const float* weight, int T, int k, int count) {
  Pairs p{std::vector<int>(size_t(T) * k), std::vector<int>(size_t(count) + 1), std::vector<int>(size_t(T) * k),
          std::vector<float>(size_t(T) * k)};
  for (int64_t i = 0; i < int64_t(T) * k; i++) p.first[size_t(chosen[i]) + 1]++;
  for (int e = 0; e < count; e++) p.first[size_t(e) + 1] += p.first[size_t(e)];
  std::vector<int> next(p.first.begin(), p.first.end() - 1);
  for (int t = 0; t < T; t++) {
    for (int i = t * k; i < (t + 1) * k; i++) {
      const int pair = next[size_t(chosen[i])]++;
      p.row[size_t(pair)] = t;
      p.weight[size_t(pair)] = weight[i];
      p.at[size_t(i)] = pair;
    }
    std::sort(p.at.begin() + t * k, p.at.begin() + (t + 1) * k);
  }
  return p;
}

const uint8_t* blob_of(const Experts& e, int expert, int part) { return reinterpret_cast<const uint8_t*>(e.table[2 * expert + part]); }

// The products of the pairs [begin, end) with one matrix of their experts: in (pairs, K) -> out (pairs, N).
void product(const Experts& e, const Pairs& p, int begin, int end, int part, const float* in, float* out) {
  std::vector<Product> products;
  for (int expert = 0; expert < e.count; expert++) {
    const int from = std::max(begin, p.first[size_t(expert)]), to = std::min(end, p.first[size_t(expert) + 1]);
    if (from >= to) continue;
    const uint8_t* blob = blob_of(e, expert, part);
    const BlobHeader& h = header(blob);
    products.push_back({in + int64_t(from - begin) * h.K, to - from, blob, out + int64_t(from - begin) * h.N});
  }
  linear_each(products.data(), int(products.size()));
}

}  // namespace

void routed_mlp(float* x, int T, Norm norm, const Experts& e, int32_t* chosen) {
  if (T == 0) return;
  const int H = header(e.router).K, k = e.top_k;
  const int I = header(blob_of(e, 0, 1)).K;
  Buffer<float> normed(int64_t(T) * H), out(int64_t(T) * H), logits(int64_t(T) * e.count), weight(int64_t(T) * k);
  if (norm.weight)
    normalize(x, T, H, norm, normed);
  else
    std::memcpy(normed, x, size_t(T) * H * sizeof(float));
  linear(normed, T, e.router, nullptr, logits, false);
  for_each_task(T, int64_t(T) * e.count > 20'000, [&](int64_t t) { route(logits + t * e.count, e, chosen + t * k, weight + t * k); });
  const Pairs pairs = sort_pairs(chosen, weight, T, k, e.count);
  std::memset(out, 0, size_t(T) * H * sizeof(float));

  const int total = T * k, block = std::min(total, kGroupRows);
  Buffer<float> in(int64_t(block) * H), both(int64_t(block) * 2 * I), inner(int64_t(block) * I), y(int64_t(block) * H);
  for (int begin = 0; begin < total; begin += block) {
    const int end = std::min(begin + block, total);
    for (int i = begin; i < end; i++)
      std::memcpy(in + int64_t(i - begin) * H, normed + int64_t(pairs.row[size_t(i)]) * H, sizeof(float) * H);
    product(e, pairs, begin, end, 0, in, both);
    activate_pairs(both, end - begin, I, e.activation, true, inner);
    product(e, pairs, begin, end, 1, inner, y);
    for_each_task(T, int64_t(end - begin) * H > 20'000, [&](int64_t t) {
      for (int i = 0; i < k; i++) {
        const int pair = pairs.at[size_t(t * k + i)];
        if (pair < begin || pair >= end) continue;
        const float w = pairs.weight[size_t(pair)];
        const float* from = y + int64_t(pair - begin) * H;
        float* to = out + t * H;
        for (int j = 0; j < H; j++) to[j] += w * from[j];
      }
    });
  }

  if (e.shared_up) {
    const int shared = header(e.shared_down).K;
    Buffer<float> wide(int64_t(T) * shared), add(int64_t(T) * H), gate(T);
    norm_gate_up(normed, T, {nullptr, 0.0f}, e.shared_up, nullptr, e.activation, true, wide);
    linear(wide, T, e.shared_down, nullptr, add, false);
    if (e.shared_gate) linear(normed, T, e.shared_gate, nullptr, gate, false);
    for (int64_t t = 0; t < T; t++) {
      const float g = e.shared_gate ? 1.0f / (1.0f + std::exp(-gate[t])) : 1.0f;
      for (int j = 0; j < H; j++) out[t * H + j] += g * add[t * H + j];
    }
  }
  if (e.post.weight) normalize(out, T, H, e.post, out);
  for (int64_t i = 0; i < int64_t(T) * H; i++) x[i] += e.scale * out[i];
}

}  // namespace exl2nb
