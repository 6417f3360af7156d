// Samplers' settings, mask bits and rows of any numbers: a drawn id is one that the mask and the columns allow, and nothing is read beyond
// a row.
#include "fuzz.h"

#include <cmath>

#include "cpu/draw.h"

using namespace exl2nb;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider in(data, size);
  draw::Settings s{};
  const auto number = [&](double low, double high) {
    return in.ConsumeIntegralInRange(0, 7) ? in.ConsumeFloatingPointInRange(low, high) : in.ConsumeFloatingPoint<double>();
  };
  s.temperature = in.ConsumeBool() ? number(0, 2) : 0, s.top_k = in.ConsumeBool() ? std::floor(number(0, 40)) : 0;
  s.top_p = in.ConsumeBool() ? number(0, 1) : 1, s.min_p = in.ConsumeBool() ? number(0, 1) : 0, s.uniform = number(0, 0.999);
  const int64_t n = in.ConsumeIntegralInRange(1, 700), words = (n + 31) / 32, top = in.ConsumeIntegralInRange<int64_t>(0, n < 20 ? n : 20);
  const int64_t columns = in.ConsumeBool() ? in.ConsumeIntegralInRange<int64_t>(1, n) : n;
  const bool masked = in.ConsumeBool(), wild = in.ConsumeBool();
  const auto bits = values<uint32_t>(in, size_t(words));
  std::vector<float> x(static_cast<size_t>(n));
  uint32_t state = in.ConsumeIntegral<uint32_t>();
  for (auto& one : x) state = state * 1664525u + 1013904223u, one = float(int32_t(state) >> 16) / 4096;
  if (wild && in.remaining_bytes() >= 4) {
    const auto raw = values<float>(in, in.remaining_bytes() / 4 < x.size() ? in.remaining_bytes() / 4 : x.size());
    std::memcpy(x.data(), raw.data(), raw.size() * 4);
  }
  std::vector<float> out(static_cast<size_t>(n));
  draw::mask_row(x.data(), bits.data(), n, out.data());
  for (int64_t i = 0; i < n; i++)
    HOLDS((bits[size_t(i / 32)] >> (i % 32) & 1) ? std::memcmp(&out[size_t(i)], &x[size_t(i)], 4) == 0 : out[size_t(i)] == -INFINITY);
  if (!draw::valid(s)) return 0;
  std::vector<double> drawn(size_t(4 + 2 * top));
  draw::draw_into(x.data(), masked ? bits.data() : nullptr, n, columns, s, top, drawn.data());
  const double id = drawn[0];
  HOLDS(id == -2 || id == -1 || (id >= 0 && id < double(columns) && id == std::floor(id)));
  if (id >= 0 && masked) HOLDS(bits[size_t(id) / 32] >> (size_t(id) % 32) & 1);
  if (id >= 0) HOLDS(drawn[2] >= 1 && drawn[2] <= double(n));
  for (int64_t i = 0; id >= 0 && i < top; i++) HOLDS(drawn[size_t(4 + 2 * i)] >= 0 && drawn[size_t(4 + 2 * i)] < double(n));
  return 0;
}
