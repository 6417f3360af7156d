// Group tables, permutations, packing and unpacking of EXL2 and GPTQ matrices: what read_groups accepts can be packed, gives a blob that
// check_blob accepts, and unpacks within its bounds.
#include "fuzz.h"

#include "cpu/engine.h"
#include "cpu/pack.h"

using namespace exl2nb;

namespace {

void use(const std::vector<uint8_t>& blob) {
  HOLDS(!check_blob(blob.data(), int64_t(blob.size())));
  const BlobHeader& h = header(blob.data());
  std::vector<float> weights(size_t(h.K) * h.N), x(size_t(h.K), 1.0f), out(size_t(h.N));
  unpack(blob.data(), weights.data());
  linear(x.data(), 1, blob.data(), nullptr, out.data(), false);
}

void exl2(FuzzedDataProvider& in) {
  static constexpr int kWidths[] = {2, 3, 4, 5, 6, 8};
  Exl2Source s{};
  s.N = 32 * in.ConsumeIntegralInRange(1, 3), s.G = in.ConsumeIntegralInRange(1, 5);  // callers check that N is a multiple of 32
  std::vector<int16_t> table;
  for (int64_t g = 0; g < s.G; g++) {
    const int bits = in.PickValueInArray(kWidths), units = in.ConsumeIntegralInRange(1, 3);
    table.push_back(int16_t(bits)), table.push_back(int16_t(s.R));
    s.R += bits * units, s.K += 32 * units;
  }
  if (in.ConsumeBool()) {  // a table that a stranger wrote
    table[in.ConsumeIntegralInRange<size_t>(0, table.size() - 1)] = in.ConsumeIntegral<int16_t>();
    s.K = in.ConsumeIntegralInRange<int64_t>(0, 512), s.R = in.ConsumeIntegralInRange<int64_t>(1, 128);
  }
  const auto perm = permutation(in, size_t(s.K));
  const auto scale = values<uint32_t>(in, size_t(s.G * s.N / 8));
  const auto maximum = values<uint16_t>(in, size_t(s.G));
  const auto weight = values<uint32_t>(in, size_t(s.R * s.N));
  s.q_weight = weight.data(), s.q_scale = scale.data(), s.q_scale_max = maximum.data(), s.q_groups = table.data(),
  s.q_invperm = perm.data();
  std::vector<BlobGroup> groups;
  if (read_groups(s, groups)) return;
  const int64_t outputs = in.ConsumeIntegralInRange<int64_t>(1, s.N);
  std::vector<uint8_t> blob(size_t(exl2_blob_bytes(s, groups, outputs)));
  pack_exl2(s, groups, 1.0f / 256, outputs, blob.data());
  use(blob);
  std::vector<uint16_t> dense(size_t(s.K * s.N));
  reconstruct(s, groups, dense.data());
}

void gptq(FuzzedDataProvider& in) {
  static constexpr int kWidths[] = {2, 3, 4, 8};
  GptqSource s{};
  s.bits = in.PickValueInArray(kWidths), s.wide = in.ConsumeBool();
  s.N = in.ConsumeIntegralInRange(1, 40), s.G = in.ConsumeIntegralInRange(1, 5);
  std::vector<int32_t> rows;
  for (int64_t g = 0; g < s.G; g++) rows.push_back(32 * in.ConsumeIntegralInRange(1, 3)), s.S += rows.back();
  s.K = s.S;
  const bool padded = in.ConsumeBool();
  if (padded) s.K = 32 * in.ConsumeIntegralInRange<int64_t>(1, s.S / 32);
  if (in.ConsumeBool()) rows[in.ConsumeIntegralInRange<size_t>(0, rows.size() - 1)] = in.ConsumeIntegral<int32_t>();
  auto perm = permutation(in, size_t(s.S));
  for (auto& row : perm)
    if (row > s.K && row < s.S) row = int32_t(s.K);
  s.R = s.K * s.bits / 32;
  const auto zeros = values<int16_t>(in, size_t(s.G * s.N));
  const auto scales = values<uint8_t>(in, size_t(s.G * s.N * (s.wide ? 4 : 2)));
  const auto weight = values<uint32_t>(in, size_t(s.R * s.N));
  const bool permuted = padded || in.ConsumeBool();
  if (!permuted) s.S = s.K;
  s.qweight = weight.data(), s.scales = scales.data(), s.zeros = in.ConsumeBool() ? zeros.data() : nullptr;
  s.perm = permuted ? perm.data() : nullptr, s.rows = rows.data();
  std::vector<BlobGroup> groups;
  if (read_groups(s, groups)) return;
  std::vector<uint8_t> blob(size_t(gptq_blob_bytes(s, groups)));
  pack_gptq(s, groups, blob.data());
  use(blob);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider in(data, size);
  in.ConsumeBool() ? exl2(in) : gptq(in);
  return 0;
}
